"""Several ranks in an engine: the executor class of tensor, context and pipeline parallelism, and
an inbox that notices when a rank is lost.

A part of the wiring, like assemble.py. Knows the settings; the ranks are in quire/ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from quire.base.errors import SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig
from quire.config.machine import num_usable_cores
from quire.engine.assembly.expert_loads import read_expert_loads
from quire.engine.assembly.sizing import pass_limits
from quire.engine.core import Inbox
from quire.engine.process.messages import ToEngine
from quire.execute.executor import Executor, ExecutorSizing
from quire.program.expert_parallel import ExpertPlan
from quire.program.row_parallel import TpMode
from quire.ranks.draft_share import DraftLayers
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.kinds import NATIVE, NativeRanks, RankKind
from quire.ranks.launched import launched_site
from quire.ranks.leading import LeadingExecutor
from quire.ranks.other_ranks import RankSite
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.ray_cluster import ray_site
from quire.runner.model_runner import ModelRunner
from quire.runner.pipelined_runner import PipelinedRunner


def engine_ranks(config: EngineConfig, undo: ExitStack | None = None) -> RankedExecutorClass:
    """Return the executor class of an engine. Raises SettingError, CapacityError.

    Blocks leave and enter the pool whole where a tier or a store keeps them, or other engines
    exchange them. undo: see ranked_class.
    """
    kind: RankKind = NATIVE
    if config.executor.executor == "torch":
        from quire.engine.assembly.torch_choice import torch_ranks  # PyTorch is slow to import

        kind = torch_ranks(config)
    elif config.executor.disk_offload_gb is not None:
        from quire.engine.assembly.offload import stream_size

        kind = NativeRanks(on_disk=stream_size(config))
    drafts = draft_layers(config, kind) if config.speculation.proposer == "self" else None
    return ranked_class(
        config.executor,
        config.cache.block_size,
        shares_blocks=config.transfer.is_on or config.kv_store.is_on or config.cache.has_tier,
        kind=kind,
        drafts=drafts,
        undo=undo,
    )


def draft_layers(config: EngineConfig, sizing: ExecutorSizing) -> DraftLayers:
    """Return the first layers that draft over the ranks of an engine."""
    given = config.speculation.self_draft_layers
    return DraftLayers(num=given, limits=pass_limits(config, sizing))


def ranked_class(
    settings: ExecutorConfig,
    block_size: int = 16,
    *,
    shares_blocks: bool = False,
    kind: RankKind = NATIVE,
    drafts: DraftLayers | None = None,
    undo: ExitStack | None = None,
) -> RankedExecutorClass:
    """Return the executor class.

    undo: gives back what is reserved for the ranks, where a later part of the start fails; None:
    the caller starts no engine: it is given back at once, and the class must not be launched.
    Raises SettingError for more ranks than cores, and what rank_site raises.
    """
    with ExitStack() as reserved:
        site = rank_site(settings, reserved)
        _check_cores(settings, settings.num_ranks if site is None else site.here)
        made = class_of(settings, block_size, site, shares_blocks=shares_blocks, kind=kind)
        if undo is not None:
            undo.enter_context(reserved.pop_all())
    return replace(made, drafts=drafts)


def _check_cores(settings: ExecutorConfig, here: int) -> None:
    """Raise SettingError where this machine has fewer cores than ranks. here: its ranks."""
    cores = num_usable_cores()
    if here > cores:
        product = f", {settings.num_ranks} ranks together" if " and " in settings.ranks_text else ""
        of_them = "" if here == settings.num_ranks else f", {here} of them on this machine"
        raise SettingError(
            f"{settings.ranks_text}{product}{of_them}, and this process may use {cores} CPU cores; "
            "at most one rank per core is allowed, since ranks wait for each other"
        )


def class_of(
    settings: ExecutorConfig,
    block_size: int = 16,
    site: RankSite | None = None,
    *,
    shares_blocks: bool = False,
    kind: RankKind = NATIVE,
) -> RankedExecutorClass:
    """Return the executor class, however many cores there are. block_size: of the KV cache."""
    shared: dict[str, Any] = {
        "degree": settings.ranks_of_stage,
        "context": settings.context_parallel_size,
        "block_size": block_size,
        "experts": expert_plan(settings),
        "mode": TpMode(settings.tp_mode),
        "site": site,
        "shares_blocks": shares_blocks,
        "kind": kind,
    }
    if settings.pipeline_parallel_size == 1:
        return RankedExecutorClass(**shared)
    return PipelineExecutorClass(stages=settings.pipeline_parallel_size, **shared)


def rank_site(settings: ExecutorConfig, undo: ExitStack) -> RankSite | None:
    """Return where the ranks run; None: in processes that this one starts.

    undo: gives back what is reserved for them. Raises SettingError, CapacityError.
    """
    match settings.distributed_executor_backend:
        case "external_launcher":
            return launched_site(settings, os.environ)
        case "ray":
            return ray_site(settings, undo)
    return None


def expert_plan(settings: ExecutorConfig) -> ExpertPlan | None:
    """Return how whole experts are placed; None where each is split."""
    if not settings.enable_expert_parallel:
        return None
    if settings.expert_load_file is None:
        return ExpertPlan()
    loads = read_expert_loads(settings.expert_load_file)
    return ExpertPlan(loads=loads, redundant=settings.num_redundant_experts)


def stage_runner() -> type[ModelRunner]:
    """Return the runner of an executor of several stages."""
    return PipelinedRunner


def settle(runner: ModelRunner) -> Callable[[], None]:
    """Return what lets stages finish the steps that they have begun."""
    return cast(PipelinedRunner, runner).finish_begun  # made by stage_runner or heads.runner_class


def watched(executor: Executor, inbox: Inbox) -> Inbox:
    """Return an inbox that raises DeviceLost once a rank of the executor has ended."""
    return _WatchedInbox(cast(LeadingExecutor, executor), inbox)  # made by ranked_class


class _WatchedInbox:
    """An Inbox. An idle engine waits in it, so that the end of a rank must end this wait."""

    def __init__(self, executor: LeadingExecutor, inbox: Inbox) -> None:
        self._executor, self._inbox = executor, inbox
        executor.processes.notify(inbox.wake)
        if executor.processes.lost:  # before there was a wait to end
            inbox.wake()

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """See Inbox."""
        messages = self._inbox.take(wait_s)
        # Another thread may have found it, as one that moves blocks while no step is computed.
        if why := self._executor.processes.lost or self._executor.lead.loss:
            raise self._executor.lead.lost(why)
        return messages

    def wake(self) -> None:
        """See Inbox."""
        self._inbox.wake()

"""The optional parts of an engine: whether each is on, and what it is then.

A part of the wiring, like assemble.py. Knows the settings. Always holds: the modules of a part that
is off are not loaded, and an engine without it has None in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from quire.base.clock import Clock
from quire.base.log import Log
from quire.base.report import Report
from quire.config.groups import EngineConfig
from quire.config.kv_events import read_kv_events
from quire.config.machine import num_compute_threads
from quire.engine.assembly.drafter import make_drafter
from quire.engine.assembly.executor_choice import class_beside, open_pack_cache
from quire.engine.assembly.model_files import model_name
from quire.engine.assembly.sized_model import SizedModel
from quire.engine.core import Inbox
from quire.execute.executor import Executor, ExecutorOptions, PipelinedExecutor
from quire.program.expert_parallel import mixtures
from quire.program.program import Program
from quire.runner.model_runner import ModelRunner, OutputConstraints
from quire.scheduler.limits import SchedulerLimits
from quire.speculative.drafter import Drafter

if TYPE_CHECKING:
    from quire.engine.assembly.expert_loads import ExpertLoads
    from quire.engine.assembly.tier import OpenTier
    from quire.engine.kv_events.publisher import KVEventPublisher
    from quire.runner.tapped_runner import Taps
    from quire.transfer.folder import TierFolder


def tier(
    config: EngineConfig,
    executor: Executor,
    folder: TierFolder | None,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
) -> OpenTier | None:
    """Open a KV tier, if there is one."""
    if not config.cache.has_tier:
        return None
    from quire.engine.assembly.tier import open_tier

    return open_tier(
        folder,
        config,
        executor,
        fingerprint=fingerprint,
        clock=clock,
        report=report,
    )


def runner(
    config: EngineConfig,
    model: SizedModel,
    executor: Executor,
    limits: SchedulerLimits,
    constraints: OutputConstraints,
    tier: OpenTier | None,
    taps: Taps | None,
) -> ModelRunner:
    """Return the runner: of one stage or several, and whether it keeps hidden states."""
    return _runner_class(config, taps)(
        executor,
        num_slots=limits.max_num_seqs,
        max_model_len=model.memory.max_model_len,
        block_size=config.kv_block_tokens,
        max_samples=model.step_limits.max_samples,
        overlap=limits.plans_in_flight > 1,
        mover=None if tier is None else tier.mover,
        constraints=constraints,
    )


def _runner_class(config: EngineConfig, taps: Taps | None) -> Callable[..., ModelRunner]:
    is_staged = config.executor.pipeline_parallel_size > 1
    if taps is not None:
        from quire.engine.assembly import heads

        return heads.runner_class(taps, is_staged=is_staged)
    if is_staged:
        from quire.engine.assembly.ranks import stage_runner

        return stage_runner()
    return ModelRunner


def drafter(
    config: EngineConfig,
    limits: SchedulerLimits,
    model: SizedModel,
    runner: ModelRunner,
    clock: Clock,
    report: Report,
    taps: Taps | None,
) -> Drafter | None:
    """Return the source of drafts, and load what computes them where something does. runner: of
    the model."""
    max_drafts, sized = config.speculation.max_draft_tokens, model.proposer
    if not max_drafts:
        return None
    make = partial(
        make_drafter,
        max_drafts,
        num_slots=limits.max_num_seqs,
        vocab_size=model.spec.vocab_size,
        report=report,
    )
    if sized is None:
        return make()
    from quire.engine.assembly.sized_proposer import LoadedModel

    num_threads = num_compute_threads(config.executor.num_threads)
    options = ExecutorOptions(
        limits=model.step_limits,
        num_threads=max(num_threads // config.executor.num_ranks, 1),  # those of rank 0
        pack_cache=open_pack_cache(config.executor),
    )
    executor = runner.executor
    loaded = LoadedModel(
        executor=executor,
        executor_class=class_beside(config, model.executor_class),
        options=options,
        memory=model.memory,
        limits=limits,
        clock=clock,
        block_tokens=config.cache.block_size,
        settle=_settle(config, runner),
        taps=taps,
    )
    return make(proposer=sized.load(loaded))


def _settle(config: EngineConfig, runner: ModelRunner) -> Callable[[], None]:
    """Return what lets the stages of a pipeline finish the steps that they have begun."""
    if config.executor.pipeline_parallel_size == 1:
        return _nothing
    from quire.engine.assembly import ranks

    return ranks.settle(runner)


def watched(config: EngineConfig, executor: Executor) -> Callable[[Inbox], Inbox]:
    """Return what makes an inbox end where a rank is lost."""
    if config.executor.num_ranks == 1:
        return lambda inbox: inbox
    from quire.engine.assembly import ranks

    return partial(ranks.watched, executor)


def expert_loads(program: Program, executor: Executor) -> ExpertLoads | None:
    """Return the loads of the model's experts, if it has experts."""
    if not any(mixtures(program)):
        return None
    from quire.engine.assembly.expert_loads import expert_loads_of

    return expert_loads_of(executor)


def kv_events(config: EngineConfig, report: Report, undo: ExitStack) -> KVEventPublisher | None:
    """Start publishing the cache's block events, if they are asked for. undo: ends it."""
    if config.cache.kv_events_config is None:
        return None
    settings = read_kv_events(config.cache.kv_events_config)
    if not settings.is_on:
        return None
    from quire.engine.kv_events.publisher import KVEventPublisher  # only if asked for

    log = Log("engine")
    for endpoint in settings.remote_endpoints:
        log.warning("KV events hold prompt tokens, and other machines may read them", at=endpoint)
    topic = settings.topic
    if topic is None:
        topic = f"kv@localhost@{model_name(config.model)}"
    log.event("publishing KV events", endpoint=settings.endpoint, topic=topic)
    publisher = KVEventPublisher(
        settings, topic=topic, block_size=config.kv_block_tokens, report=report
    )
    undo.callback(publisher.close)
    return publisher


def stage_wait(executor: Executor) -> Callable[[], float] | None:
    """Return what gives the milliseconds the last stage waits, from now on; None without stages."""
    if not isinstance(executor, PipelinedExecutor):
        return None
    before_ms = executor.waited_ms
    return lambda: executor.waited_ms - before_ms


def _nothing() -> None:
    """Do nothing."""

"""The model of an engine: its configuration, its size in memory, and then its weights.

A part of the wiring, like assemble.py. Knows no scheduler and no request. Order: what the executor
cannot compute, or the memory cannot hold, is refused before a byte of weights is packed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import CapacityError, SettingError
from quire.base.log import Log
from quire.config.groups import EngineConfig
from quire.config.machine import machine_memory, num_compute_threads, shared_memory
from quire.config.memory import NO_DRAFT, DraftNeeds, MemoryPlan, mib, plan_memory
from quire.engine.assembly.executor_choice import choose_executor_class, class_beside
from quire.engine.assembly.model_files import model_folder
from quire.engine.assembly.pooling import model_pooling
from quire.engine.assembly.precision import warn_of_coarse
from quire.engine.assembly.programs import engine_program
from quire.engine.assembly.sizing import memory_needs, step_limits
from quire.execute.executor import Executor, ExecutorClass, ExecutorOptions, Progress, StepLimits
from quire.models.pooling_files import PoolingSpec
from quire.models.registry import open_model
from quire.models.spec import ModelSpec
from quire.program.pooling import with_pooling
from quire.program.program import Program
from quire.runner.prefault import Prefault
from quire.weights.binding import ignored_mtp
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.pack_cache import PackCache

if TYPE_CHECKING:
    from quire.engine.assembly.sized_proposer import SizedProposer


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """A model and an executor class, checked against each other and sized to the memory."""

    folder: Path
    spec: ModelSpec
    checkpoint: Checkpoint
    program: Program
    executor_class: ExecutorClass
    step_limits: StepLimits
    memory: MemoryPlan
    proposer: SizedProposer | None = None
    pooling: PoolingSpec | None = None

    @property
    def run_program(self) -> Program:
        """The program that is run: with its hidden states as outputs where heads read them."""
        return self.program if self.proposer is None else self.proposer.tap(self.program)

    @property
    def notes(self) -> list[str]:
        """Lines about memory, about what makes drafts, and about weights that nothing uses."""
        proposer, memory = self.proposer, self.memory
        notes = memory.text().splitlines()
        if proposer is not None:
            notes += proposer.notes(memory.max_model_len)
        if mtp := ignored_mtp(self.program, self.checkpoint):
            notes.append(
                f"ignored: {len(mtp)} weights of layers that predict further tokens (MTP), such as "
                f"{mtp[0]}; no answer depends on them, and they make no drafts"
            )
        return notes


def sized_model(config: EngineConfig, undo: ExitStack | None = None) -> SizedModel:
    """Read the model's configuration and plan the memory; packs no weights.

    undo: gives back what is reserved for ranks, where the start fails; None: the caller starts no
    engine. Raises where the executor cannot compute the model, or the memory has no room for it.
    """
    if config.cache.kv_cache_dtype == "fp8" and config.executor.executor == "native":
        raise SettingError(
            "kv_cache_dtype is 'fp8', which executor native (CPUs) does not have; it has auto, "
            "f32, bf16 and int8, which takes as much memory; fp8 needs executor torch (GPUs)"
        )
    folder = model_folder(config.model)
    spec = open_model(folder)
    checkpoint = open_checkpoint(folder)
    longest = engine_program(config, spec, checkpoint)
    pooling = model_pooling(config.model, folder, spec)
    if pooling is not None and pooling.embeds:
        longest = with_pooling(longest)
    executor_class = choose_executor_class(config, undo)
    executor_class.check_program(longest)
    if in_host := config.host_block_bytes:
        # Imported only where blocks are moved: it takes a megabyte.
        from quire.engine.assembly.tier import check_host_memory

        host = shared_memory(machine_memory(), config.executor.data_parallel_size)
        check_host_memory(in_host, executor_class.available_memory(), host)
    limits = step_limits(config, executor_class)
    proposer = _sized_proposer(config, spec, longest, checkpoint, executor_class)
    needs = NO_DRAFT if proposer is None else proposer.needs
    if proposer is not None and config.executor.offloads:
        from quire.engine.assembly.offload import beside_drafts

        executor_class = beside_drafts(config, executor_class, needs)
    run = longest if proposer is None else proposer.tap(longest)
    memory = _memory(config, spec, run, executor_class, limits, needs)
    return SizedModel(
        folder=folder,
        spec=spec,
        checkpoint=checkpoint,
        program=replace(longest, max_positions=memory.max_model_len),
        executor_class=executor_class,
        step_limits=limits,
        memory=memory,
        proposer=proposer,
        pooling=pooling,
    )


def _memory(
    config: EngineConfig,
    spec: ModelSpec,
    program: Program,
    make: ExecutorClass,
    limits: StepLimits,
    draft: DraftNeeds,
) -> MemoryPlan:
    memory = shared_memory(make.available_memory(), config.executor.data_parallel_size)
    needs = memory_needs(
        config,
        program,
        make,
        limits,
        model_max_len=spec.max_positions,
        device_is_own=memory.is_own,
        draft=draft,
    )
    if memory.is_own:
        _check_host(config, draft)
    plan = plan_memory(needs, memory)
    if memory.is_own:  # a device's, which loading may find smaller: what was counted on is known
        parts = "; ".join(f"{line.what} {mib(line.num_bytes)}" for line in plan.lines)
        Log("engine").event("memory is planned, weights are loaded", sum=parts)
    return plan


def _check_host(config: EngineConfig, draft: DraftNeeds) -> None:
    """Raise CapacityError where the host lacks the memory that what drafts takes beside a device
    with memory of its own."""
    host = shared_memory(machine_memory(), config.executor.data_parallel_size)
    in_host_bytes = sum(config.host_block_bytes.values())
    left_bytes = max(host.available_bytes - in_host_bytes, 0)
    if draft.host_bytes > left_bytes:
        beside = f", beside KV blocks of {mib(in_host_bytes)}" if in_host_bytes else ""
        raise CapacityError(
            f"{draft.name}: {mib(draft.host_bytes)} of the host's memory are needed for "
            f"{draft.host_what}, and {mib(left_bytes)} are available ({host.limit}{beside}); "
            f"{host.remedy}, or {draft.advice}"
        )


def _sized_proposer(
    config: EngineConfig,
    spec: ModelSpec,
    program: Program,
    checkpoint: Checkpoint,
    executor_class: ExecutorClass,
) -> SizedProposer | None:
    if not config.speculation.is_set:
        return None
    from quire.engine.assembly.proposers import sized_proposer  # only where one is named

    own_class = class_beside(config, executor_class)
    proposer = sized_proposer(config, spec, program, checkpoint, own_class)
    proposer.check(own_class)
    return proposer


def loaded_executor(
    config: EngineConfig,
    model: SizedModel,
    progress: Progress | None,
    pack_cache: PackCache | None,
) -> Executor:
    """Load the weights and allocate the KV cache."""
    executor = model.executor_class(
        model.run_program,
        model.checkpoint,
        ExecutorOptions(
            limits=model.step_limits,
            num_threads=num_compute_threads(config.executor.num_threads),
            progress=progress,
            pack_cache=pack_cache,
        ),
    )
    log = Log("engine")
    for warning in model.spec.generation.warnings:
        log.warning(warning)
    warn_of_coarse(log, model.program, executor.coarse_rows)
    executor.allocate_cache(model.memory.num_blocks, config.kv_block_tokens)
    return executor


def prefault(config: EngineConfig, model: SizedModel, executor: Executor) -> Prefault:
    """Return what prefaults the KV cache of an idle engine."""
    return Prefault(
        executor,
        num_blocks=model.memory.num_blocks,
        layers=model.program.caches[0].layers,
        block_bytes=model.memory.kv_bytes // model.memory.num_blocks,
        ahead_bytes=config.cache.kv_touch_ahead_bytes,
    )

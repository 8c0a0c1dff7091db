"""The only wiring: from an EngineConfig to an EngineCore that is warm and ready.

The parts get what they need as arguments and know nothing of the config. What is optional is
decided in features.py. Order: the model's configuration, then the memory sum (what does not fit
is refused before a byte is packed), then weights, cache, and a warm-up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from quire._native import BlockOperations
from quire.base.clock import Clock
from quire.base.gguf_open import gguf_read_once
from quire.base.log import Log
from quire.base.report import Report
from quire.base.user_path import user_path
from quire.config.groups import EngineConfig
from quire.engine.assembly import features
from quire.engine.assembly.executor_choice import open_pack_cache
from quire.engine.assembly.identity import engine_fingerprint, model_card
from quire.engine.assembly.initial_costs import initial_step_costs
from quire.engine.assembly.scheduler_factory import make_scheduler, scheduler_limits
from quire.engine.assembly.sized_model import SizedModel, loaded_executor, prefault, sized_model
from quire.engine.assembly.vocabulary import model_tokenizer, model_vocabulary
from quire.engine.assembly.warm_up import measure_cost, warm_up
from quire.engine.core import EngineCore, Inbox, error_fields
from quire.engine.grammars import Grammars
from quire.engine.mask_waits import TimedMaskWaits
from quire.engine.model_card import ModelCard
from quire.engine.new_file import open_new
from quire.engine.record import RecordingRunner, open_record
from quire.engine.stop_texts import StopTexts
from quire.engine.trace_file import TraceFile
from quire.execute.executor import Executor, LayeredExecutor, Progress
from quire.models.spec import ModelSpec
from quire.runner.model_runner import OutputConstraints
from quire.scheduler.limits import SchedulerLimits
from quire.structured.compiler import GrammarCompiler

if TYPE_CHECKING:
    from quire.engine.assembly.outside import Outside, OutsidePorts
    from quire.engine.assembly.tier import OpenTier
    from quire.engine.kv_events.publisher import KVEventPublisher
    from quire.transfer.folder import TierFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A core that is ready, what it says of itself, and lines about how it came to be."""

    core: EngineCore
    card: ModelCard
    notes: tuple[str, ...]
    step_tokens: int  # most of one step
    num_layers: int  # that the executor computes by themselves; 0 where it does not
    ops_done: Callable[[], int]  # operations of the executor so far; may be called in any thread
    close_drafts: Callable[[], None]  # frees what drafts
    watched: Callable[[Inbox], Inbox]  # an inbox that also ends where a rank is lost
    trace: TraceFile | None = None
    kv_events: KVEventPublisher | None = None
    outside: Outside | None = None  # sources of KV blocks: other engines, a shared store


def assemble(
    config: EngineConfig,
    *,
    clock: Clock,
    report: Report,
    progress: Progress | None = None,
) -> Engine:
    """Load, allocate, warm up. Raises ModelError, CapacityError or SettingError.

    `report` receives later errors that do not end the engine.
    """
    with gguf_read_once(), _undone_on_failure(report) as undo:
        record = None
        if config.executor.record_plans is not None:  # found out early: packing may take minutes
            record = undo.enter_context(open_record(user_path(config.executor.record_plans)))
        trace = None
        if config.executor.trace_file is not None:  # likewise
            trace = open_new(user_path(config.executor.trace_file), "--trace")
            undo.callback(os.close, trace[0])
            undo.callback(trace[1].unlink, missing_ok=True)
        tier_folder = None
        if config.cache.kv_tier_path is not None:  # likewise
            from quire.transfer.folder import TierFolder  # only where it is wanted, as executors

            tier_folder = TierFolder(user_path(config.cache.kv_tier_path))
            undo.callback(tier_folder.close)
            tier_folder.check_room(config.cache.kv_tier_bytes)
        outside_ports = None
        if config.transfer.is_on or config.kv_store.is_on:  # likewise
            from quire.engine.assembly.outside import OutsidePorts

            outside_ports = OutsidePorts(config, tier_folder)
            undo.callback(outside_ports.close)
        engine = _assembled(
            config,
            clock=clock,
            report=report,
            progress=progress,
            record=record,
            tier_folder=tier_folder,
            outside_ports=outside_ports,
            undo=undo,
        )
        if trace is None:
            return engine
        descriptor, path = trace
        Log("engine").event("writing a trace", file=str(path))
        return replace(engine, trace=TraceFile(descriptor, engine.core.scheduler.history, report))


@contextmanager
def _undone_on_failure(report: Report) -> Iterator[ExitStack]:
    """Yield a stack for what a start opens; it is closed where the start fails, with its error."""
    undo = ExitStack()
    try:
        yield undo
    except BaseException:
        try:
            undo.close()
        except Exception as error:  # noqa: BLE001  the cause of the failure is raised
            report("a part of an engine that failed to start was not closed", **error_fields(error))
        raise


def _assembled(
    config: EngineConfig,
    *,
    clock: Clock,
    report: Report,
    progress: Progress | None,
    record: BinaryIO | None,
    tier_folder: TierFolder | None,
    outside_ports: OutsidePorts | None,
    undo: ExitStack,
) -> Engine:
    """Return the engine. undo: closes what was opened, where a later part fails."""
    pack_cache = open_pack_cache(config.executor)
    model = sized_model(config, undo)
    memory, program = model.memory, model.program
    executor = loaded_executor(config, model, progress, pack_cache)
    # First the thread that moves blocks, then the executor: memory is pinned until it closes.
    loaded = undo.enter_context(ExitStack())
    loaded.callback(executor.close)
    num_layers = executor.num_layers if isinstance(executor, LayeredExecutor) else 0
    limits = _limits(config, model, num_layers)
    fingerprint = engine_fingerprint(config, program, executor)
    if outside_ports is not None:
        fingerprint = outside_ports.fingerprint(fingerprint)
    tier = _tier(config, model, executor, tier_folder, outside_ports, fingerprint, clock, report)
    if tier is not None:
        loaded.callback(tier.mover.close)
    texts, compiler = _text_sources(config, model.spec, clock)
    taps = None if model.proposer is None else model.proposer.taps(limits.max_num_seqs)
    constraints = OutputConstraints(matchers=compiler, watches=texts)
    runner = features.runner(config, model, executor, limits, constraints, tier, taps)
    loaded.pop_all()
    loaded.callback(runner.close)  # and with it what it moves blocks with, and the executor
    warm_up(runner, limits, num_blocks=memory.num_blocks)
    cost = measure_cost(runner, limits, memory.num_blocks, clock) if limits.step_budget_ms else None
    drafter = features.drafter(config, limits, model, runner, clock, report, taps)
    close_drafts = loaded.callback(_nothing if drafter is None else drafter.close)
    kv_events = features.kv_events(config, report, loaded)
    scheduler = make_scheduler(
        config,
        limits,
        num_blocks=memory.num_blocks,
        fingerprint=fingerprint.hex(),
        hash_key=os.urandom(16) if tier is None else tier.hash_key,
        cost=cost,
        prices=initial_step_costs(program),
        tier=None if tier is None else tier.tier,
        window=program.caches[0].window,
        operations=partial(BlockOperations, timed=True),
        draft_source=drafter,
        events=kv_events,
    )
    runner.tables.grammars.wait = TimedMaskWaits(scheduler.history.mask_waits, clock)
    core = EngineCore(
        scheduler,
        runner if record is None else RecordingRunner(runner, record, report=report),
        plans_in_flight=limits.plans_in_flight,
        report=report,
        tier=None if tier is None else tier.mover,
        touch_ahead=prefault(config, model, executor),
        grammars=Grammars(compiler, texts),
    )
    core.expert_loads = features.expert_loads(program, executor)
    core.waited_ms = features.stage_wait(executor)
    card = model_card(config, model, executor, max_num_seqs=limits.max_num_seqs)
    outside = None
    if outside_ports is not None:
        outside = outside_ports.start(tier, core, card, fingerprint, clock, report)
    return Engine(
        core=core,
        card=card if outside is None else outside.card,
        notes=(*model.notes, *([] if tier is None else [tier.note])),
        step_tokens=model.step_limits.max_tokens,
        num_layers=num_layers,
        ops_done=lambda: executor.ops_done,
        close_drafts=close_drafts,
        watched=features.watched(config, executor),
        kv_events=kv_events,
        outside=outside,
    )


def _tier(
    config: EngineConfig,
    model: SizedModel,
    executor: Executor,
    folder: TierFolder | None,
    ports: OutsidePorts | None,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
) -> OpenTier | None:
    """Open where KV blocks are kept beside the pool, if they are: a tier, or what goes outside."""
    if ports is None:
        return features.tier(config, executor, folder, fingerprint, clock, report)
    step_tokens = model.step_limits.max_tokens
    return ports.open_tier(executor, model.program, fingerprint, step_tokens, clock, report)


def _limits(config: EngineConfig, model: SizedModel, num_layers: int) -> SchedulerLimits:
    return scheduler_limits(
        config.scheduler,
        num_layers=num_layers,
        num_blocks=model.memory.num_blocks,
        max_model_len=model.memory.max_model_len,
        step_tokens=model.step_limits.max_tokens,
        plans_in_flight=model.executor_class.plans_in_flight(),
        is_pipelined=config.executor.pipeline_parallel_size > 1,
        pin_share=config.cache.cache_pin_share,
    )


def _text_sources(
    config: EngineConfig, spec: ModelSpec, clock: Clock
) -> tuple[StopTexts, GrammarCompiler]:
    """Return the sources of stop strings and of grammars; both read the tokenizer on first use."""
    texts = StopTexts(lambda: model_tokenizer(config.model, vocab_size=spec.vocab_size))
    compiler = GrammarCompiler(
        lambda: model_vocabulary(texts.tokenizer(), eos_ids=spec.generation.eos_ids),
        now_ms=clock.now_ms,
    )
    return texts, compiler


def _nothing() -> None:
    """Do nothing."""

"""The only wiring: from an EngineConfig to an EngineCore that is warm and ready.

All "is it on" questions are asked here. The parts get what they need as arguments and know
nothing of the config. Order: the model's configuration, then the memory sum (what does not fit
is refused before a byte is packed), then weights, cache, and a warm-up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from quire._native import BlockOperations
from quire.base.clock import Clock
from quire.base.errors import SettingError
from quire.base.gguf_open import gguf_read_once
from quire.base.log import Log
from quire.base.report import Report
from quire.base.user_path import user_path
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig
from quire.config.kv_events import read_kv_events
from quire.config.machine import machine_memory, num_compute_threads, shared_memory
from quire.config.memory import NO_DRAFT, DraftNeeds, MemoryPlan, mib, plan_memory
from quire.engine.assembly.drafts import make_drafter
from quire.engine.assembly.initial_costs import initial_step_costs
from quire.engine.assembly.model_files import model_folder, model_name
from quire.engine.assembly.pooling import model_pooling
from quire.engine.assembly.precision import warn_of_coarse
from quire.engine.assembly.programs import engine_program
from quire.engine.assembly.scheduler_factory import make_scheduler, scheduler_limits
from quire.engine.assembly.sizing import memory_needs, step_limits
from quire.engine.assembly.vocabulary import model_tokenizer, model_vocabulary
from quire.engine.assembly.warm_up import measure_cost, warm_up
from quire.engine.core import EngineCore, Inbox
from quire.engine.grammars import Grammars
from quire.engine.mask_waits import TimedMaskWaits
from quire.engine.model_card import ModelCard
from quire.engine.new_file import open_new
from quire.engine.record import RecordingRunner, open_record
from quire.engine.stop_texts import StopTexts
from quire.engine.trace_file import TraceFile
from quire.execute.executor import (
    Executor,
    ExecutorClass,
    ExecutorOptions,
    LayeredExecutor,
    PipelinedExecutor,
    Progress,
    StepLimits,
)
from quire.models.pooling_files import PoolingSpec
from quire.models.registry import compute_dtype, open_model
from quire.models.spec import ModelSpec
from quire.program.kv_cache import kv_cache_text
from quire.program.pooling import with_pooling
from quire.program.program import Program
from quire.program.quantize import precision_text
from quire.runner.fingerprint import block_fingerprint, system_fingerprint
from quire.runner.model_runner import ModelRunner, OutputConstraints
from quire.runner.prefault import Prefault
from quire.scheduler.limits import SchedulerLimits
from quire.speculative.drafter import Drafter
from quire.structured.compiler import GrammarCompiler
from quire.text.template_files import source_in_force
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.pack_cache import PackCache

if TYPE_CHECKING:
    from quire.engine.assembly.drafting import SizedDrafting
    from quire.engine.assembly.exchange import ExchangePort
    from quire.engine.assembly.expert_loads import ExpertLoads
    from quire.engine.assembly.kv_store import StorePort
    from quire.engine.assembly.tier import OpenTier
    from quire.engine.kv_events.publisher import KVEventPublisher
    from quire.engine.kv_store.store_client import StoreClient
    from quire.engine.transfer.exchange import Exchange
    from quire.runner.tapped_runner import Taps
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
    close_drafts: Callable[[], None]  # frees a draft model
    watched: Callable[[Inbox], Inbox]  # an inbox that also ends where a rank is lost
    trace: TraceFile | None = None
    kv_events: KVEventPublisher | None = None
    exchange: Exchange | None = None  # of KV blocks with other engines
    store_client: StoreClient | None = None  # of a KV store that engines share


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
    with gguf_read_once(), ExitStack() as undo:
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
        exchange_port = None
        if config.transfer.is_on:  # likewise
            from quire.engine.assembly.exchange import ExchangePort

            exchange_port = ExchangePort(config.transfer)
            undo.callback(exchange_port.close)
        store_port = None
        if config.kv_store.is_on:  # likewise
            from quire.engine.assembly.kv_store import StorePort

            store_port = StorePort(config, tier_folder)
            undo.callback(store_port.close)
        engine = _assembled(
            config,
            clock=clock,
            report=report,
            progress=progress,
            record=record,
            tier_folder=tier_folder,
            exchange_port=exchange_port,
            store_port=store_port,
        )
        undo.pop_all()
        if trace is None:
            return engine
        descriptor, path = trace
        Log("engine").event("writing a trace", file=str(path))
        return replace(engine, trace=TraceFile(descriptor, engine.core.scheduler.history, report))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizedModel:
    """A model and an executor class, checked against each other and sized to the memory."""

    folder: Path
    spec: ModelSpec
    checkpoint: Checkpoint
    program: Program
    executor_class: ExecutorClass
    step_limits: StepLimits
    memory: MemoryPlan
    drafting: SizedDrafting | None = None
    pooling: PoolingSpec | None = None

    @property
    def run_program(self) -> Program:
        """The program that is run: with its hidden states as outputs where heads read them."""
        return self.program if self.drafting is None else self.drafting.tap(self.program)


def _assembled(
    config: EngineConfig,
    *,
    clock: Clock,
    report: Report,
    progress: Progress | None,
    record: BinaryIO | None,
    tier_folder: TierFolder | None,
    exchange_port: ExchangePort | None,
    store_port: StorePort | None,
) -> Engine:
    pack_cache = _pack_cache(config.executor)
    model = _sized_model(config)
    memory, program = model.memory, model.program
    executor = _loaded_executor(config, model, progress, pack_cache)
    num_layers = executor.num_layers if isinstance(executor, LayeredExecutor) else 0
    limits = _limits(config, model, num_layers)
    fingerprint = _block_fingerprint(config, program, executor)
    if store_port is None:
        tier = _tier(config, executor, tier_folder, exchange_port, fingerprint, clock, report)
    else:
        fingerprint = store_port.fingerprint(fingerprint)
        tier = store_port.open_tier(executor, program, fingerprint, clock, report)
    texts, compiler = _text_sources(config, model.spec, clock)
    taps = None if model.drafting is None else model.drafting.taps(limits.max_num_seqs)
    constraints = OutputConstraints(matchers=compiler, watches=texts)
    runner = _runner(config, model, executor, limits, constraints, tier, taps)
    warm_up(runner, limits, num_blocks=memory.num_blocks)
    cost = measure_cost(runner, limits, memory.num_blocks, clock) if limits.step_budget_ms else None
    drafter = _drafter(config, limits, model, executor, clock, report, taps)
    kv_events = _kv_events(config, report)
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
        touch_ahead=_prefault(config, model, executor),
        grammars=Grammars(compiler, texts),
    )
    core.expert_loads = _expert_loads(program, executor)
    core.waited_ms = _stage_wait(executor)
    card = replace(
        _card(config, model, executor, max_num_seqs=limits.max_num_seqs),
        max_draft_tokens=config.scheduler.max_draft_tokens,
        speculates=config.scheduler.speculate != "off",
    )
    exchange, store_client = None, None
    if exchange_port is not None:
        exchange, card = _start_exchange(tier, core, card, config, fingerprint, clock, report)
    if store_port is not None:
        store_client, card = store_port.start(tier, core, card, clock, report)
    return Engine(
        core=core,
        card=card,
        notes=(*_notes(model), *([] if tier is None else [tier.note])),
        step_tokens=model.step_limits.max_tokens,
        num_layers=num_layers,
        ops_done=lambda: executor.ops_done,
        close_drafts=_nothing if drafter is None else drafter.close,
        watched=_watched(config, executor),
        kv_events=kv_events,
        exchange=exchange,
        store_client=store_client,
    )


def _tier(
    config: EngineConfig,
    executor: Executor,
    folder: TierFolder | None,
    port: ExchangePort | None,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
) -> OpenTier | None:
    """Open what keeps blocks beside the pool: a tier, the store of an exchange, or both."""
    if port is not None:
        from quire.engine.assembly.exchange import open_store

        return open_store(
            config, port, executor, folder, fingerprint=fingerprint, clock=clock, report=report
        )
    if not config.cache.has_tier:
        return None
    from quire.engine.assembly.tier import open_tier

    return open_tier(
        folder, config.cache, executor, fingerprint=fingerprint, clock=clock, report=report
    )


def _start_exchange(
    tier: OpenTier | None,
    core: EngineCore,
    card: ModelCard,
    config: EngineConfig,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
) -> tuple[Exchange, ModelCard]:
    from quire.engine.assembly.exchange import ExchangeStore, start_exchange

    assert isinstance(tier, ExchangeStore), "opened before the scheduler was made"
    return start_exchange(
        tier, core, card, config, fingerprint=fingerprint, clock=clock, report=report
    )


def _sized_model(config: EngineConfig) -> _SizedModel:
    """Read the model's configuration and plan the memory; packs no weights.

    Raises where the executor cannot compute the model, or the memory has no room for it.
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
    executor_class = _executor_class(config)
    executor_class.check_program(longest)
    if config.cache.kv_tier_host_bytes is not None:
        # Imported only where the tier is used: it takes a megabyte.
        from quire.engine.assembly.tier import check_host_tier

        check_host_tier(
            config.cache.kv_tier_host_bytes, executor_class.available_memory(), machine_memory()
        )
    limits = step_limits(config, executor_class)
    drafting = _sized_drafting(config, spec, longest, checkpoint, executor_class)
    needs = NO_DRAFT if drafting is None else drafting.needs
    run = longest if drafting is None else drafting.tap(longest)
    memory = _memory(config, spec, run, executor_class, limits, needs)
    return _SizedModel(
        folder=folder,
        spec=spec,
        checkpoint=checkpoint,
        program=replace(longest, max_positions=memory.max_model_len),
        executor_class=executor_class,
        step_limits=limits,
        memory=memory,
        drafting=drafting,
        pooling=pooling,
    )


def _loaded_executor(
    config: EngineConfig,
    model: _SizedModel,
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


def _limits(config: EngineConfig, model: _SizedModel, num_layers: int) -> SchedulerLimits:
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


def _sized_drafting(
    config: EngineConfig,
    spec: ModelSpec,
    program: Program,
    checkpoint: Checkpoint,
    executor_class: ExecutorClass,
) -> SizedDrafting | None:
    if not config.scheduler.has_drafting:
        return None
    from quire.engine.assembly.drafting import sized_drafting  # only where it is used

    drafting = sized_drafting(config, spec, program, checkpoint, executor_class)
    drafting.check(executor_class)
    return drafting


def _runner(
    config: EngineConfig,
    model: _SizedModel,
    executor: Executor,
    limits: SchedulerLimits,
    constraints: OutputConstraints,
    tier: OpenTier | None,
    taps: Taps | None,
) -> ModelRunner:
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
    if config.executor.pipeline_parallel_size > 1:
        from quire.engine.assembly.ranks import stage_runner

        return stage_runner()
    if taps is None:
        return ModelRunner
    from quire.engine.assembly.heads import runner_class  # only where it is used

    return runner_class(taps)


def _drafter(
    config: EngineConfig,
    limits: SchedulerLimits,
    model: _SizedModel,
    executor: Executor,
    clock: Clock,
    report: Report,
    taps: Taps | None,
) -> Drafter | None:
    """Return the source of drafts, and load what computes them where something does."""
    max_drafts, drafting = config.scheduler.max_draft_tokens, model.drafting
    if not max_drafts:
        return None
    make = partial(
        make_drafter,
        max_drafts,
        num_slots=limits.max_num_seqs,
        vocab_size=model.spec.vocab_size,
        report=report,
    )
    if drafting is None:
        return make()
    from quire.engine.assembly.drafting import loaded_proposer

    options = ExecutorOptions(
        limits=model.step_limits,
        num_threads=num_compute_threads(config.executor.num_threads),
        pack_cache=_pack_cache(config.executor),
    )
    proposer = loaded_proposer(
        drafting,
        executor,
        model.executor_class,
        options,
        memory=model.memory,
        limits=limits,
        clock=clock,
        taps=taps,
    )
    return make(proposer=proposer, drafter=drafting.drafter_class)


def _notes(model: _SizedModel) -> list[str]:
    """Return lines about memory, and about what makes drafts."""
    drafting, memory = model.drafting, model.memory
    drafts = [] if drafting is None else drafting.notes(memory.max_model_len)
    return [*memory.text().splitlines(), *drafts]


def _watched(config: EngineConfig, executor: Executor) -> Callable[[Inbox], Inbox]:
    if config.executor.num_ranks == 1:
        return lambda inbox: inbox
    from quire.engine.assembly.ranks import watched

    return partial(watched, executor)


def _expert_loads(program: Program, executor: Executor) -> ExpertLoads | None:
    if not any(weight.experts > 1 for weight in program.weights.values()):
        return None
    from quire.engine.assembly.expert_loads import expert_loads_of

    return expert_loads_of(executor)


def _split_degree(settings: ExecutorConfig) -> int:
    """Return the degree of a parallelism that splits sums, on which answers depend."""
    return settings.tensor_parallel_size if settings.tp_mode == "fast" else 1


def _kv_events(config: EngineConfig, report: Report) -> KVEventPublisher | None:
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
    return KVEventPublisher(settings, topic=topic, block_size=config.kv_block_tokens, report=report)


def _stage_wait(executor: Executor) -> Callable[[], float] | None:
    """Return what gives the milliseconds the last stage waits, from now on; None without stages."""
    if not isinstance(executor, PipelinedExecutor):
        return None
    before_ms = executor.waited_ms
    return lambda: executor.waited_ms - before_ms


def _nothing() -> None:
    """Do nothing."""


def _block_fingerprint(config: EngineConfig, program: Program, executor: Executor) -> bytes:
    degree = _split_degree(config.executor)
    return block_fingerprint(
        program,
        executor=executor.name,
        recipe=executor.recipe if degree == 1 else f"{executor.recipe}, sums of {degree} parts",
        weights_digest=executor.weights_digest,
        block_size=config.kv_block_tokens,
        block_bytes=executor.block_bytes,
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


def _prefault(config: EngineConfig, model: _SizedModel, executor: Executor) -> Prefault:
    return Prefault(
        executor,
        num_blocks=model.memory.num_blocks,
        layers=model.program.caches[0].layers,
        block_bytes=model.memory.kv_bytes // model.memory.num_blocks,
        ahead_bytes=config.cache.kv_touch_ahead_bytes,
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
    plan = plan_memory(needs, memory)
    if memory.is_own:  # a device's, which loading may find smaller: what was counted on is known
        parts = "; ".join(f"{line.what} {mib(line.num_bytes)}" for line in plan.lines)
        Log("engine").event("memory is planned, weights are loaded", sum=parts)
    return plan


def _pack_cache(settings: ExecutorConfig) -> PackCache | None:
    if settings.pack_cache is None:
        return None
    return PackCache(user_path(settings.pack_cache), Log("engine"))


def _executor_class(config: EngineConfig) -> ExecutorClass:
    settings = config.executor
    # One of them, and only when it is wanted: start-up is felt.
    if settings.num_ranks > 1:
        from quire.engine.assembly.ranks import ranked_class

        return ranked_class(settings, config.cache.block_size, shares_blocks=config.transfer.is_on)
    if settings.disk_offload_gb is not None:
        from quire.execute.streamed_weights import StreamingExecutorClass

        return StreamingExecutorClass(
            offload_bytes=settings.disk_offload_bytes, kv_bytes=config.cache.kv_cache_memory_bytes
        )
    if settings.executor == "native":
        from quire.execute.native import NativeExecutor

        return NativeExecutor
    if settings.executor == "torch":
        return _torch_class(config)
    from quire.execute.reference import ReferenceExecutor

    return ReferenceExecutor


def _torch_class(config: EngineConfig) -> ExecutorClass:
    settings, offload = config.executor, None
    try:
        from quire.execute.gpu.device import choose, has_fp8, look, reason
        from quire.execute.gpu.executor_class import TorchExecutorClass
    except ModuleNotFoundError as error:
        raise SettingError(
            f"executor is torch and {error.name} is not installed; install it: "
            "pip install 'quire-llm[gpu]'"
        ) from error
    except (ImportError, OSError) as error:  # a library that it was built with is not there
        raise SettingError(
            f"executor is torch and PyTorch cannot be loaded ({error}); install it anew, built for "
            "this machine's driver (pytorch.org says how)"
        ) from error
    machine, wanted = look(), settings.device or "auto"
    device = choose(wanted, machine)
    card = "" if device.type == "cpu" else machine.cards[device.index].name
    Log("engine").event(
        "computing on",
        device=str(device),
        **({"card": card} if card else {}),
        because=reason(wanted, device, machine),
    )
    if settings.cpu_offload_gb is not None:
        from quire.execute.gpu.offload_plan import OffloadSize

        offload = OffloadSize(
            saved_bytes=settings.cpu_offload_bytes, kv_bytes=config.cache.kv_cache_memory_bytes
        )
    exact = settings.numerics != "fast"
    return TorchExecutorClass(
        device,
        exact=exact,
        has_fp8=has_fp8(device, machine),
        captures=not settings.enforce_eager,
        offload=offload,
    )


def _card(
    config: EngineConfig, model: _SizedModel, executor: Executor, *, max_num_seqs: int
) -> ModelCard:
    spec, program, folder, memory = model.spec, model.program, model.folder, model.memory
    return ModelCard(
        name=model_name(config.model),
        aliases=config.model.served_model_name[1:],
        path=str(folder),
        max_model_len=memory.max_model_len,
        vocab_size=spec.vocab_size,
        eos_ids=spec.generation.eos_ids,
        fingerprint=system_fingerprint(
            program,
            folder,
            weights_digest=executor.weights_digest,
            recipe=executor.recipe,
            max_model_len=memory.max_model_len,
            parallel_degree=_split_degree(config.executor),
            chat_template=source_in_force(folder, config.model.chat_template),
        ),
        generation_defaults=dict(spec.generation.defaults),
        banned_sequences=spec.generation.banned_sequences,
        dtype=compute_dtype(spec, config.model.dtype).value,
        quantization=precision_text(program),
        kv_cache_dtype=kv_cache_text(program),
        recipe=executor.recipe,
        num_blocks=memory.num_blocks,
        block_size=config.kv_block_tokens,
        block_bytes=executor.block_bytes,
        max_num_seqs=max_num_seqs,
        created_s=int(time.time()),
        pooling=model.pooling,
        generates=spec.has_head,
    )

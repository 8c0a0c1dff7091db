"""Run cases on a real engine core, one step at a time, and record the output of each stream.

The executor of a model is created once per thread count; each case gets its own KV pool, cache
metadata, scheduler and runner. Time is a counter. Tests inject faults through `wrap_executor` and
`runner_type`.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast

import numpy as np

from quire.base.errors import DeadlineMissed
from quire.base.rare_records import PooledSums
from quire.base.records import (
    TOO_FEW_SEQUENCES,
    FinishReason,
    PromptScores,
    Request,
    RequestOutput,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.base.report import Field
from quire.cache.manager import CacheManager
from quire.cache.tier_map import TierMap
from quire.config.proposer_kinds import HEADS
from quire.engine.core import EngineCore
from quire.execute.executor import (
    PART_TOKENS,
    AsyncExecutor,
    Executor,
    ExecutorOptions,
    LayeredExecutor,
    StepLimits,
    TappedExecutor,
)
from quire.execute.native import NativeExecutor
from quire.execute.native_first_layers import NativeFirstLayers
from quire.execute.reference import ReferenceExecutor
from quire.execute.reference_first_layers import ReferenceFirstLayers
from quire.models.registry import build_program, open_model
from quire.program.first_layers import first_layers, num_layers
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.pooling import with_pooling
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.runner.handle import Handle
from quire.runner.model_runner import ModelRunner, OutputConstraints
from quire.runner.pipelined_runner import PipelinedRunner
from quire.runner.tapped_runner import TappedPipelinedRunner, TappedRunner, Taps
from quire.runner.tier_mover import TierMover
from quire.scheduler.cost.transfer_cost import RestoreMode
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.policies import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.speculative.drafter import Drafter
from quire.speculative.proposer import CostlyProposer
from quire.speculative.self_draft import SelfProposer
from quire.transfer.disk import DiskStore
from quire.transfer.folder import TierFolder
from quire.transfer.host import HostStore
from quire.transfer.segment import segment_bytes
from quire.transfer.store import BlockStore
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from tests.exact.drafts import IS_RIGHT, draft_source, model_proposer, self_proposer
from tests.exact.heads import Heads
from tests.exact.letters import GRAMMARS, TEXTS
from tests.exact.workload import (
    ALONE,
    ALONE_WITH_BEAMS,
    MAX_MODEL_LEN,
    Arrival,
    Case,
    Settings,
)

MAX_STEPS = 20_000
MAX_ROWS = 512
MAX_SEQUENCES = 16
# Tolerances of log-probabilities as a share of the row's spread. bf16 and integer products round
# activations to 8 bits, and each executor sums in its own order.
TOLERANCES = {DType.F32: 3e-6, DType.BF16: 0.015}
# Most rows of integer products agree to the last bit. Where an earlier last bit differs, an
# activation may round to the neighbouring one of 127 integers: rare, and then the error exceeds
# that of bf16 (0.015 at most in 480 rows, 0.019 in some thousand).
INTEGER_TOLERANCE = 0.03


@dataclass(slots=True)
class Stream:
    """The output of one stream: (token id, logprob, alternatives, listed) by position, the prompt
    scores if the stream carried them, and the finish reason.
    """

    tokens: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    scores: PromptScores | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_preemptions: int = 0
    score: float | None = None

    def take(self, output: RequestOutput) -> None:
        """Add an output."""
        assert self.finish_reason is None, "an ended stream has no further output"
        if output.scores is not None:
            assert self.scores is None, "prompt scores are emitted once"
            assert not self.tokens, "prompt scores come with the first token"
            self.scores = output.scores
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        for token_id, logprob in zip(output.token_ids, logprobs, strict=True):
            shown = (
                ()
                if logprob is None
                else tuple(getattr(logprob, item.name) for item in fields(TokenLogprobs))
            )
            self.tokens.append((token_id, shown))
        self.finish_reason, self.error = output.finish_reason, output.error
        self.num_preemptions, self.score = output.num_preemptions, output.score


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a case, with the flags that the coverage counts."""

    case: Case
    streams: dict[str, Stream]
    preempted: bool
    prefix_hit: bool
    saved: bool  # to the tier
    fetched: bool  # from the tier
    chunked: bool
    layered: bool  # one prompt chunk was computed over several steps
    forked: bool  # a block was copied on write
    cancelled: bool
    held: bool  # a stream was paused for some steps, as under backpressure
    searched: bool  # beam search
    search_preempted: bool
    scored: bool
    structured: bool  # output follows a grammar
    jumped: bool  # forced tokens were appended together with others
    beams_watched: bool  # a beam search with stop strings ended by a token
    beams_structured: bool  # a beam search with a grammar ended by a token
    rescored: bool  # preempted with its prompt partly scored, then resumed
    accepted: bool  # a draft was
    rejected: bool
    problems: list[str]
    plans: list[tuple[StepPlan, StepResult]]


class SharedCache(Executor, Protocol):
    """An executor of a model's first layers, in the cache of the model's."""

    def share_cache(self) -> None: ...


class Model:
    """A model and its executors, one per thread count."""

    def __init__(
        self,
        folder: Path,
        dtype: DType,
        precision: str = "none",
        kv_cache_dtype: str = "auto",
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.name = f"{folder.name} {dtype} {precision} {kv_cache_dtype}"
        self.folder, self.max_model_len = folder, max_model_len
        self.dtype = dtype
        self.precision, self.kv_cache_dtype = precision, kv_cache_dtype
        is_rounded = precision != "none" or kv_cache_dtype == "int8"
        kept = DType.BF16 if kv_cache_dtype == "bf16" else dtype
        self.tolerance = INTEGER_TOLERANCE if is_rounded else TOLERANCES[kept]
        spec = open_model(folder)
        # Near a tie a router chooses another expert where a last bit differs, and rounded
        # activations differ by more: such logits cannot be compared row by row.
        self.is_comparable = spec.experts is None or (dtype is DType.F32 and not is_rounded)
        self.vocab_size = spec.vocab_size
        plain = build_program(spec, dtype=dtype, max_positions=max_model_len)
        kept_in = with_kv_cache_dtype(quantize(plain, precision), kv_cache_dtype)
        self.program: Program = with_pooling(kept_in)
        self.checkpoint: Checkpoint = open_checkpoint(folder)
        self._executors: dict[int, Executor] = {}
        self._draft_executor: Executor | None = None
        self._first_layers: dict[tuple[int, bool, bool], SharedCache] = {}
        self._heads: dict[str, Heads] = {}
        self._tapped: dict[tuple[str, int], Executor] = {}

    @property
    def has_heads(self) -> bool:
        """Whether heads draft for it: they run on executors that _make creates."""
        return isinstance(self.executor(1), NativeExecutor)

    def heads(self, kind: str) -> Heads:
        """Return draft heads for this model, created on first use."""
        if kind not in self._heads:
            self._heads[kind] = Heads(
                kind,
                self.folder,
                self.program,
                self.checkpoint,
                lambda program, checkpoint: self._make(program, checkpoint, 1),
            )
        return self._heads[kind]

    def tapped_executor(self, kind: str, num_threads: int) -> Executor:
        """Return an executor that hands out what the heads read, created on first use."""
        key = kind, num_threads
        if key not in self._tapped:
            self._tapped[key] = self._make(self.heads(kind).program, self.checkpoint, num_threads)
        return self._tapped[key]

    def draft_executor(self) -> Executor:
        """Return another executor of the same model, which drafts for it."""
        if self._draft_executor is None:
            self._draft_executor = self.make_executor(1)
        return self._draft_executor

    def first_layers(self, num_threads: int, *, is_beside: bool, is_whole: bool) -> SharedCache:
        """Return half of the layers of the executor with `num_threads`, or all.

        is_beside: they are computed while the executor computes in another thread.
        """
        total = num_layers(self.program)
        key = num_threads, is_beside, is_whole
        if key not in self._first_layers:
            program = first_layers(self.program, total if is_whole else -(-total // 2))
            limits = StepLimits(
                max_tokens=MAX_SEQUENCES, max_samples=MAX_SEQUENCES, max_sequences=MAX_SEQUENCES
            )
            own_threads = num_threads if is_beside else 0
            self._first_layers[key] = self.make_first_layers(
                self.executor(num_threads), program, limits, own_threads
            )
        return self._first_layers[key]

    def make_first_layers(
        self, executor: Executor, program: Program, limits: StepLimits, own_threads: int
    ) -> SharedCache:
        """Create the executor of the first layers of `executor`."""
        if isinstance(executor, NativeExecutor):
            return NativeFirstLayers(
                executor, program, limits, num_threads=own_threads, poison=True
            )
        return ReferenceFirstLayers(cast(ReferenceExecutor, executor), program, limits)

    def executor(self, num_threads: int) -> Executor:
        """Return the executor with `num_threads`, created on first use."""
        if num_threads not in self._executors:
            self._executors[num_threads] = self.make_executor(num_threads)
        return self._executors[num_threads]

    def make_executor(self, num_threads: int) -> Executor:
        """Create the native executor, with all buffers filled with NaN before each run."""
        return self._make(self.program, self.checkpoint, num_threads)

    def _make(self, program: Program, checkpoint: Checkpoint, num_threads: int) -> Executor:
        return NativeExecutor(
            program,
            checkpoint,
            ExecutorOptions(
                limits=StepLimits(
                    max_tokens=MAX_ROWS, max_samples=MAX_SEQUENCES, max_sequences=MAX_SEQUENCES
                ),
                num_threads=num_threads,
            ),
            poison=True,
        )

    def close(self) -> None:
        """Free all executors."""
        for drafting in self._first_layers.values():
            drafting.close()
        self._first_layers.clear()
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
        if self._draft_executor is not None:
            self._draft_executor.close()
            self._draft_executor = None
        for closable in (*self._heads.values(), *self._tapped.values()):
            closable.close()
        self._heads.clear()
        self._tapped.clear()


class WatchedRunner:
    """A Runner that records the plans and results passing through it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps: list[tuple[StepPlan, StepResult]] = []
        self._plans: dict[int, StepPlan] = {}

    def submit(self, plan: StepPlan) -> Handle:
        handle = self.runner.submit(plan)
        self._plans[id(handle)] = plan
        return handle

    def collect(self, handle: Handle) -> StepResult:
        plan = self._plans.pop(id(handle))
        result = self.runner.collect(handle)
        self.steps.append((plan, result))
        return result

    def close(self) -> None:
        self.runner.close()


def run_case(
    model: Model,
    case: Case,
    *,
    wrap_executor: Callable[[Executor], Executor] = lambda executor: executor,
    runner_type: type[ModelRunner] = ModelRunner,
    alone: AloneRuns | None = None,
    wrap_drafts: Callable[[Drafter], Drafter] = lambda drafts: drafts,
) -> Outcome:
    """Run the case to its end and audit the cache metadata afterwards.

    alone: knows the answers that proposers need.
    """
    source, taps = make_drafts(model, case, AloneRuns() if alone is None else alone)
    num_threads, kind = case.settings.num_threads, case.settings.proposer
    plain = (
        model.executor(num_threads) if taps is None else model.tapped_executor(kind, num_threads)
    )
    executor = wrap_executor(plain)
    runner = WatchedRunner(make_runner(executor, case.settings, runner_type, taps))
    if kind == "self":
        first_layers_of(model, case.settings).share_cache()
        if isinstance(runner.runner, PipelinedRunner):
            assert source is not None, "the case has a proposer"
            cast(SelfProposer, source.proposer).settle = runner.runner.finish_begun
    core = make_core(
        runner,
        case.settings,
        window=model.program.caches[0].window,
        draft_source=None if source is None else wrap_drafts(source),
    )
    streams = {request.request_id: Stream() for request in case.requests}
    num_cancelled = 0
    clock = count()
    woken = threading.Event()
    if core.tier is not None:
        core.tier.wake = woken.set
    try:
        for step in range(MAX_STEPS):
            if not core.has_work and all(arrival.at_step < step for arrival in case.arrivals):
                break
            _hold_before(core, case, step)
            for output in _events_before(core, case.arrivals, step):
                num_cancelled += output.finish_reason is FinishReason.ABORT
                streams[output.request_id].take(output)
            outputs = core.step(lambda: float(next(clock)))
            for output in outputs or ():
                streams[output.request_id].take(output)
            if outputs is None and core.tier is not None:  # blocks are in transfer
                woken.wait(0.01)
                woken.clear()
        else:
            raise AssertionError(f"case {case.number} has not ended after {MAX_STEPS} steps")
        problems = core.scheduler.check_integrity()
    finally:
        runner.runner.end_thread()
    stats = core.stats()
    return Outcome(
        case=case,
        streams=streams,
        preempted=stats.preemptions_total > 0,
        prefix_hit=stats.prefix_hit_tokens_total > 0,
        saved=stats.tier_saved_blocks_total > 0,
        fetched=stats.tier_fetched_blocks_total > 0,
        chunked=any(not plan.samples.all() for plan, _ in runner.steps),
        layered=any(plan.layers and plan.layers.first_layer for plan, _ in runner.steps),
        forked=any(len(plan.copy_from) for plan, _ in runner.steps),
        cancelled=num_cancelled > 0,
        held=stats.held_total > 0,
        searched=any(stream.score is not None for stream in streams.values()),
        search_preempted=any(
            stream.score is not None and stream.num_preemptions for stream in streams.values()
        ),
        scored=any(stream.scores is not None for stream in streams.values()),
        rescored=any(
            admission.scores_from for plan, _ in runner.steps for admission in plan.admissions
        ),
        structured=any(request.sampling.structured_outputs for request in case.requests),
        jumped=any(
            (result.token_counts > plan.sample_counts).any() for plan, result in runner.steps
        ),
        beams_watched=_has_ends(case, runner, stop=True),
        beams_structured=_has_ends(case, runner, stop=False),
        accepted=any(
            ((plan.draft_counts > 0) & (result.token_counts > 1)).any()
            for plan, result in runner.steps
            if plan.draft_ids.size
        ),
        rejected=any(
            ((result.token_counts > 0) & (result.token_counts < plan.sample_counts)).any()
            for plan, result in runner.steps
            if plan.draft_ids.size
        ),
        problems=problems,
        plans=runner.steps,
    )


def make_drafts(model: Model, case: Case, alone: AloneRuns) -> tuple[Drafter | None, Taps | None]:
    """Return the draft source of a case, and where heads find hidden states. The answers are
    computed first, as they use the executor of the model."""
    answers: dict[str, list[int]] = {}
    if case.settings.proposer in IS_RIGHT:
        for request in case.requests:
            if request.speculation is not None:
                stream = alone.of(model, request)
                answers[request.request_id] = [token_id for token_id, _ in stream.tokens]
    settings, taps = case.settings, None
    drafts: CostlyProposer | None = None
    if settings.proposer == "draft":
        drafts = model_proposer(model.draft_executor(), settings, settings.max_model_len)
    if settings.proposer == "self":
        drafts = self_proposer(first_layers_of(model, settings), settings, settings.max_model_len)
    if settings.proposer in HEADS and model.has_heads:
        drafts, taps = model.heads(settings.proposer).proposer(settings, settings.max_model_len)
    return draft_source(settings, lambda request: answers[request.request_id], drafts), taps


def first_layers_of(model: Model, settings: Settings) -> SharedCache:
    """Return the executor that drafts where the model drafts by itself."""
    return model.first_layers(
        settings.num_threads,
        is_beside=settings.plans_in_flight > 1,
        is_whole=settings.all_layers,
    )


def _has_ends(case: Case, runner: WatchedRunner, *, stop: bool) -> bool:
    """Return whether a stop token ended beams of a search with stop strings or a grammar."""
    asked = any(
        request.sampling.use_beam_search
        and bool(request.sampling.stop if stop else request.sampling.structured_outputs)
        for request in case.requests
    )
    candidates = (result.candidates for _, result in runner.steps)
    return asked and any(one is not None and one.ends.any() for one in candidates)


def make_runner(
    executor: Executor,
    settings: Settings,
    runner_type: type[ModelRunner] = ModelRunner,
    taps: Taps | None = None,
) -> ModelRunner:
    """Return a runner with a fresh KV pool. taps: where it leaves hidden states."""
    executor.allocate_cache(settings.num_blocks, settings.block_size)
    make: Callable[..., ModelRunner] = runner_type
    if taps is not None and isinstance(executor, TappedExecutor):
        is_staged = issubclass(runner_type, PipelinedRunner)
        tapped = TappedPipelinedRunner if is_staged else TappedRunner
        order = (tapped,) if issubclass(tapped, runner_type) else (tapped, runner_type)
        make = partial(type("Tapped", order, {}), taps=taps)
    return make(
        executor,
        num_slots=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        max_samples=settings.max_samples,
        overlap=settings.plans_in_flight > 1,
        mover=make_mover(executor, settings) if settings.tier_blocks else None,
        constraints=OutputConstraints(
            matchers=GRAMMARS, watches=TEXTS, jump_ahead=settings.jump_ahead
        ),
    )


class TemporaryStore(DiskStore):
    """A disk tier of `num_places` places that deletes its directory on close."""

    def __init__(self, num_places: int, block_bytes: int) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        super().__init__(
            TierFolder(Path(self._temporary.name)),
            max_bytes=2 * segment_bytes(num_places // 2, block_bytes) + segment_bytes(1, 0),
            block_bytes=block_bytes,
            fingerprint=b"exact",
            max_segment_bytes=segment_bytes(num_places // 2, block_bytes),
        )

    def close(self) -> None:
        super().close()
        self._temporary.cleanup()


def make_mover(executor: Executor, settings: Settings) -> TierMover:
    """Return a mover to and from a fresh tier, on disk or in host memory."""

    def report(problem: str, **_: Field) -> None:
        raise AssertionError(problem)

    store: BlockStore
    if settings.tier_in_host:
        assert isinstance(executor, AsyncExecutor), (
            "a host-memory tier needs an asynchronous executor"
        )
        pieces = [executor.host_memory(places * executor.block_bytes) for places in (1, 2)]
        rest = settings.tier_blocks - 3
        store = HostStore(
            [*pieces, executor.host_memory(rest * executor.block_bytes)], executor.block_bytes
        )
    else:
        store = TemporaryStore(settings.tier_blocks, executor.block_bytes)
    return TierMover(executor, store, now_ms=lambda: 0.0, report=report)


def make_core(
    runner: WatchedRunner,
    settings: Settings,
    *,
    window: int,
    draft_source: Drafter | None = None,
) -> EngineCore:
    """Return a core with fresh cache metadata."""
    executor = runner.runner.executor
    is_able = isinstance(executor, LayeredExecutor)
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        plans_in_flight=settings.plans_in_flight,
        long_prompt_tokens=int(settings.layered),
        part_layers=executor.num_layers if settings.layered and is_able else 0,
        layered_part_tokens=PART_TOKENS,
        micro_batches=settings.micro_batches,
    )
    mover = runner.runner.mover
    cache = CacheManager(
        settings.num_blocks,
        settings.block_size,
        prefix_caching=settings.prefix_caching,
        tier=(
            None
            if mover is None
            else TierMap(mover.store.num_blocks, mover.store.tier, max_saving=4)
        ),
        window=window,
    )

    def report(problem: str, **fields: Field) -> None:
        raise AssertionError(f"{problem}: {fields}")

    return EngineCore(
        Scheduler(
            limits,
            cache,
            make_policy(settings.policy),
            restore_mode=RestoreMode.MOVE,
            tenants=settings.tenants,
            draft_source=draft_source,
        ),
        runner,
        plans_in_flight=settings.plans_in_flight,
        report=report,
        tier=mover,
    )


class AloneRuns:
    """The output of each request run alone, computed once."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], Stream] = {}

    def of(self, model: Model, request: Request) -> Stream:
        """Return the stream of `request` run alone on `model`."""
        key = (model.name, request.request_id)
        if key not in self._streams:
            requests, settings = (request,), ALONE
            if request.sampling.use_beam_search:  # every stream reports the one search
                settings = ALONE_WITH_BEAMS
                requests = tuple(
                    replace(request, request_id=f"{request.group_id}/{stream}", stream=stream)
                    for stream in range(request.sampling.n)
                )
            longer = model.max_model_len // MAX_MODEL_LEN
            settings = replace(
                settings,
                max_model_len=model.max_model_len,
                num_blocks=longer * settings.num_blocks,
            )
            arrival = Arrival(at_step=0, requests=requests, cancel_at=(None,) * len(requests))
            case = Case(number=-1, model=0, settings=settings, arrivals=(arrival,))
            streams = run_case(model, case).streams
            scores = next((one.scores for one in streams.values() if one.scores is not None), None)
            for stream in streams.values():  # under load any of them may carry the scores
                stream.scores = scores
            self._streams |= {(model.name, name): stream for name, stream in streams.items()}
        return self._streams[key]


def differences(model: Model, outcome: Outcome, alone: AloneRuns) -> list[str]:
    """Return one line per difference between the case and its requests run alone.

    The tokens of a cancelled stream must be a prefix of the output alone; all others must be equal.
    """
    lines = [*outcome.problems, *_missing_scores(outcome)]
    for request in outcome.case.requests:
        got, wanted = outcome.streams[request.request_id], alone.of(model, request)
        where = f"{model.name}, case {outcome.case.number}, {request.request_id}"
        too_few = (wanted.error or "").startswith(TOO_FEW_SEQUENCES)
        # A search that is cancelled has no tokens yet; alone it goes on until it fails.
        if too_few and (got.error == wanted.error or got.finish_reason is FinishReason.ABORT):
            continue
        if got.error is not None or wanted.error is not None:
            lines.append(f"{where}: error {got.error!r}, alone {wanted.error!r}")
            continue
        if got.scores is not None and _bits(got.scores) != _bits(wanted.scores):
            lines.append(f"{where}: scores of the prompt differ from those alone")
        pairs = enumerate(zip(got.tokens, wanted.tokens, strict=False))
        if got.score is not None and got.score != wanted.score:
            lines.append(f"{where}: score {got.score}, alone {wanted.score}")
        different = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), None)
        if different is not None:
            at, (one, other) = different
            lines.append(f"{where}: token {at} is {one}, alone {other}")
        elif got.finish_reason is not FinishReason.ABORT and (
            len(got.tokens) != len(wanted.tokens) or got.finish_reason is not wanted.finish_reason
        ):
            lines.append(
                f"{where}: {len(got.tokens)} tokens and {got.finish_reason}, alone "
                f"{len(wanted.tokens)} and {wanted.finish_reason}"
            )
    return lines


def _bits(scores: PromptScores | PooledSums | None) -> list[tuple[tuple[int, ...], bytes]]:
    """Return shapes and bytes, so that NaN equals NaN."""
    parts = [] if scores is None else [getattr(scores, item.name) for item in fields(scores)]
    pooled = scores.pooled if isinstance(scores, PromptScores) else None
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    return [(part.shape, part.tobytes()) for part in arrays] + (_bits(pooled) if pooled else [])


def _missing_scores(outcome: Outcome) -> Iterator[str]:
    """Return requests with prompt scores that were not emitted by exactly one of their streams."""
    for arrival in outcome.case.arrivals:
        streams = [outcome.streams[request.request_id] for request in arrival.requests]
        if any(stream.error is not None for stream in streams):
            continue
        num_reports = sum(stream.scores is not None for stream in streams)
        sampling = arrival.requests[0].sampling
        wanted = int(sampling.prompt_logprobs is not None or sampling.pooling is not None)
        is_cut_short = all(stream.finish_reason is FinishReason.ABORT for stream in streams)
        if num_reports != wanted and not (is_cut_short and num_reports < wanted):
            where = f"case {outcome.case.number}, group {arrival.requests[0].group_id}"
            yield f"{where}: prompt scores were reported {num_reports} times, wanted {wanted}"


def _hold_before(core: EngineCore, case: Case, step: int) -> None:
    """Pause some streams for some steps, in one case of five."""
    if case.number % 5:
        return
    for request, at_step in (
        (one, each.at_step) for each in case.arrivals for one in each.requests
    ):
        drawn = Random(f"held {request.request_id}")
        first = at_step + drawn.randint(1, 30)
        if drawn.random() < 0.3 and step in (first, first + drawn.randint(1, 20)):
            core.scheduler.hold(request.request_id, is_held=step == first)


def _events_before(
    core: EngineCore, arrivals: tuple[Arrival, ...], step: int
) -> Iterator[RequestOutput]:
    for arrival in arrivals:
        if arrival.at_step == step:
            try:
                core.add(arrival.requests)
            except DeadlineMissed:  # refused for its deadline, which changes no output
                core.add([replace(one, ttft_slo_ms=None) for one in arrival.requests])
        for request, cancel_at in zip(arrival.requests, arrival.cancel_at, strict=True):
            if cancel_at == step:
                yield from core.abort([request.request_id])

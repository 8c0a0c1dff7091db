"""EngineCore: the loop, on one page. Take messages, schedule, submit, collect, update, emit.

Knows no clock (its owner passes one in), no process, no text and no executor. Always holds: plans
are collected in the order they were submitted; a step that fails ends the requests it computed,
with an error each, and no other request; with nothing to do the loop waits in its inbox.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quire.base.block_copies import CopiesEnded
from quire.base.engine_stats import EngineStats
from quire.base.errors import DeviceLost, QuireError, WorkerError
from quire.base.records import (
    NO_INTS,
    Request,
    RequestOutput,
    RowError,
    StepOutputs,
    StepPlan,
    StepResult,
)
from quire.base.report import Field, Report
from quire.engine.grammars import Grammars
from quire.engine.process.message_routing import id_prefix
from quire.engine.process.messages import (
    Abort,
    CacheReported,
    FromEngine,
    Hold,
    HoldClient,
    Join,
    Leave,
    Outputs,
    QueryCache,
    QuerySnapshot,
    QueryTimelines,
    Refused,
    SnapshotReported,
    Stop,
    Submit,
    ToEngine,
    fault_of,
)
from quire.engine.timelines import TimelineAnswers
from quire.runner.handle import Handle
from quire.runner.prefault import Prefault
from quire.scheduler.scheduler import Scheduler

# A step that fails is its requests' misfortune; this many in a row are the engine's.
MAX_FAILED_STEPS = 3
# Seconds without work after which the cache is audited, once.
AUDIT_AFTER_S = 5.0
# Milliseconds between looks for leaks while there is work: some vector operations each.
QUICK_AUDIT_EVERY_MS = 30_000.0
# Seconds to wait for a message where work is pending that cannot be scheduled.
RETRY_AFTER_S = 0.05


class Runner(Protocol):
    """Computes plans in order."""

    def submit(self, plan: StepPlan) -> Handle: ...

    def collect(self, handle: Handle) -> StepResult: ...

    def close(self) -> None: ...


class TierEnd(Protocol):
    """Copies blocks between the pool and a tier, beside the steps."""

    wake: Callable[[], None]  # called in a thread of its own when no copy is left

    def ended(self) -> CopiesEnded | None:
        """Return the copies that have ended since the last call."""

    def clear(self) -> None:
        """Forget all saved blocks; none of them is loaded again."""


class Inbox(Protocol):
    """Messages to the engine."""

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """Return the received messages; wait at most `wait_s` for the first (None: no limit)."""

    def wake(self) -> None:
        """End a wait now, or the next; from any thread."""


class StepCounts:
    """Plans submitted and collected so far. active: set by each step that is tried, until the
    heartbeat clears it; any thread may read these."""

    def __init__(self) -> None:
        self.num_submitted = self.num_collected = 0
        self.active = threading.Event()


class EngineCore:
    """One scheduler, one runner, and the plans in flight between them.

    `report` receives each error that does not end the engine. tier: reports the outcomes of copies
    between tiers. touch_ahead: memory to prefault while the engine is idle. grammars: compile the
    grammars that answers follow.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        plans_in_flight: int,
        report: Report,
        tier: TierEnd | None = None,
        touch_ahead: Prefault | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.report = report
        self.tier = tier
        self.touch_ahead = touch_ahead
        self.grammars = grammars
        self.expert_loads: Callable[[EngineStats], tuple[tuple[int, ...], ...]] | None = None
        self._plans_in_flight = plans_in_flight
        self.steps = StepCounts()
        self.timelines = TimelineAnswers(scheduler)
        self._flight: deque[tuple[StepPlan, Handle]] = deque()
        self.waited_ms: Callable[[], float] | None = None  # of the last stage of a pipeline
        self._failed_steps = 0
        # When to look for leaks though there is work; None before the first step.
        self._look_at_ms: float | None = None

    @property
    def has_work(self) -> bool:
        """True while a request is not finished or a plan is not collected."""
        return bool(self._flight) or self.scheduler.has_work

    def add(self, requests: Sequence[Request]) -> None:
        """Take the streams of one request, all or none. Raises as Scheduler.add does."""
        for index, request in enumerate(requests):
            try:
                self.scheduler.add(request)
            except QuireError:
                self.abort([taken.request_id for taken in requests[:index]])
                raise
        if self.grammars is not None and any(map(_is_prepared, requests)):
            self.scheduler.add_gate(self.grammars.gate)
            self.grammars.want(requests)

    def abort(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests now; their last outputs. Ids not running are ignored."""
        if self.grammars is not None and self.grammars.live:
            self.grammars.forget(request_ids)
        outputs = [self.scheduler.abort(request_id) for request_id in request_ids]
        return [output for output in outputs if output is not None]

    def step(self, now_ms: Callable[[], float]) -> StepOutputs | None:
        """Hand out plans as far as allowed, then finish the oldest. None: nothing could be done.

        Raises WorkerError when several steps in a row have failed, DeviceLost when no more can
        be computed.
        """
        if self.tier is not None and (copies := self.tier.ended()) is not None:
            self.scheduler.copies_ended(copies, now_ms())
        if not self.steps.active.is_set():
            self.steps.active.set()
        while len(self._flight) < self._plans_in_flight:
            plan = self.scheduler.schedule(now_ms())
            if plan is None:
                break
            self.steps.num_submitted += 1
            self._flight.append((plan, self.runner.submit(plan)))
        if not self._flight:
            return None
        plan, handle = self._flight.popleft()
        result, ended_ms = self._result(plan, handle), now_ms()
        self.steps.num_collected += 1
        outputs = self.scheduler.update(plan, result, ended_ms)
        if self.grammars is not None and self.grammars.live:
            self.grammars.forget_ended(outputs.events)
        if self._look_at_ms is None:
            self._look_at_ms = ended_ms + QUICK_AUDIT_EVERY_MS
        elif ended_ms >= self._look_at_ms:
            self._look_at_ms = ended_ms + QUICK_AUDIT_EVERY_MS
            self.audit(quick=True)
        return outputs

    def touch(self) -> bool:
        """Prefault some memory for the next blocks; return False once there is enough."""
        if self.touch_ahead is None:
            return False
        return self.touch_ahead.touch(self.scheduler.num_never_used_blocks)

    def expire(self, now_ms: float) -> list[Refused]:
        """End what has waited for its first step as long as it may, or waits for a grammar that
        cannot be used."""
        ended: list[tuple[tuple[str, ...], QuireError]] = [*self.scheduler.expire(now_ms)]
        if self.grammars is not None and self.grammars.live:
            for ids, _ in ended:
                self.grammars.forget(ids)
            for ids, error in self.grammars.refused():
                self.abort(ids)
                ended.append((ids, error))
        return [Refused(request_ids=ids, fault=fault_of(error)) for ids, error in ended]

    def stats(self) -> EngineStats:
        """Return counters and gauges as of now."""
        stats = self.scheduler.stats()
        if self.expert_loads is not None:
            stats.expert_tokens_total = self.expert_loads(stats)
        if self.waited_ms is not None:
            stats.stage_wait_ms_total = self.waited_ms()
        return stats

    def ask_cache(self, ask: QueryCache) -> CacheReported:
        """Return what the prefix cache holds; flushed first where that is asked for."""
        flushed_blocks = self.scheduler.flush_cache() if ask.flush else 0
        if ask.flush and self.tier is not None:
            self.tier.clear()  # nor after a restart
        report = self.scheduler.cache_report(num_prefixes=ask.num_prefixes)
        return CacheReported(ask_id=ask.ask_id, report=report, flushed_blocks=flushed_blocks)

    def audit(self, *, quick: bool = False) -> None:
        """Audit the KV blocks, repair what can be, and report. quick: while there is work, which
        it does not disturb; leaks are found and repaired even so."""
        found = self.scheduler.check_integrity(repair=True, quick=quick)
        left = set(self.scheduler.check_integrity()) if found else set()
        for problem in found:
            self.report("audit of the KV blocks", problem=problem, repaired=problem not in left)

    def _result(self, plan: StepPlan, handle: Handle) -> StepResult:
        try:
            result = self.runner.collect(handle)
        except Exception as error:  # whatever an executor raises fails this step, not the engine
            self._failed_steps += 1
            self.report("step failed", step=plan.step, **error_fields(error))
            if isinstance(error, DeviceLost):  # nor will any later one be computed
                raise
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise WorkerError(
                    f"{self._failed_steps} steps in a row failed, the last with "
                    f"{type(error).__name__}: {error}"
                ) from error
            return _all_rows_failed(plan, error)
        self._failed_steps = 0
        return result


def error_fields(error: Exception) -> dict[str, Field]:
    """Return an error as fields of a report; an unexpected one with its traceback."""
    fields: dict[str, Field] = {"error": f"{type(error).__name__}: {error}"}
    if not isinstance(error, QuireError):
        fields["traceback"] = "".join(traceback.format_exception(error))
    return fields


def serve(
    core: EngineCore,
    inbox: Inbox,
    emit: Callable[[FromEngine], None],
    now_ms: Callable[[], float],
) -> None:
    """Run until a Stop comes; with nothing to do, touch memory ahead, then audit the cache."""
    stuck, audited, touching, gather_s = False, True, core.touch_ahead is not None, 0.0
    if core.tier is not None:
        core.tier.wake = inbox.wake
    if core.grammars is not None:
        core.grammars.wake = inbox.wake
    while True:
        wait_s: float | None = None if audited else AUDIT_AFTER_S
        if core.has_work:
            wait_s = RETRY_AFTER_S if stuck and not core.timelines.pending else gather_s
        elif touching or core.timelines.pending:
            wait_s = 0.0
        messages = inbox.take(wait_s)
        for message in messages:
            if isinstance(message, Stop):
                return
            _handle(core, message, emit, now_ms)
        expired = core.expire(now_ms())
        for refused in expired:
            emit(refused)
        if expired:  # their blocks are free, and there may be no step to report it
            emit(Outputs(outputs=None, stats=core.stats()))
        continued = core.scheduler.continued
        gather_s = continued.gather_s(now_ms()) if continued and continued.is_active else 0.0
        if gather_s:
            continue
        if core.has_work:
            was_stuck = stuck and not messages
            outputs = core.step(now_ms)
            stuck, audited, touching = outputs is None, False, core.touch_ahead is not None
            # Nothing can be computed; emit the counters once: running requests may have been held,
            # and copies to a tier may have ended.
            if not (stuck and was_stuck and core.has_work):
                emit(Outputs(outputs=outputs, stats=core.stats()))
        elif touching:
            touching = core.touch()
        elif not messages and not audited and not core.timelines.pending:
            core.audit()
            audited = True
        if core.timelines.pending and (answer := core.timelines.advance(now_ms())) is not None:
            emit(answer)


def _handle(
    core: EngineCore,
    message: ToEngine,
    emit: Callable[[FromEngine], None],
    now_ms: Callable[[], float],
) -> None:
    if isinstance(message, Abort):
        ended = core.abort(message.request_ids)
        emit(Outputs(outputs=_events(ended), stats=core.stats()))
    elif isinstance(message, Hold):
        for request_id in message.request_ids:
            core.scheduler.hold(request_id, is_held=message.is_held, now_ms=now_ms())
    elif isinstance(message, HoldClient):
        core.scheduler.hold_client(message.prefix, is_held=message.is_held, now_ms=now_ms())
        emit(Outputs(outputs=None, stats=core.stats()))
    elif isinstance(message, Join):
        emit(Outputs(outputs=None, stats=core.stats()))
    elif isinstance(message, Leave):
        core.abort(core.scheduler.ids_that_begin(id_prefix(message.client)))
        emit(Outputs(outputs=None, stats=core.stats()))
    elif isinstance(message, QueryCache):
        emit(core.ask_cache(message))
    elif isinstance(message, QuerySnapshot):
        snapshot = core.scheduler.snapshot(now_ms())
        emit(SnapshotReported(ask_id=message.ask_id, snapshot=snapshot))
    elif isinstance(message, QueryTimelines):
        core.timelines.pending.append(message)
    elif isinstance(message, Submit):
        try:
            core.add(message.requests)
        except QuireError as error:
            ids = tuple(request.request_id for request in message.requests)
            emit(Refused(request_ids=ids, fault=fault_of(error)))


def _is_prepared(request: Request) -> bool:
    """Return whether a request waits for a grammar or for the tokenizer."""
    sampling = request.sampling
    return sampling.structured_outputs is not None or sampling.ends_beams_by_text


def _events(outputs: list[RequestOutput]) -> StepOutputs:
    return StepOutputs(step=-1, request_ids=[], token_ids=NO_INTS, events=tuple(outputs))


def _all_rows_failed(plan: StepPlan, error: Exception) -> StepResult:
    num_rows = len(plan.slots) + (plan.layers is not None)
    message = f"the step failed: {type(error).__name__}: {error}"
    return StepResult(
        step=plan.step,
        token_counts=np.zeros(len(plan.slots), np.int32),
        token_ids=NO_INTS,
        errors=tuple(RowError(row=row, message=message) for row in range(num_rows)),
    )

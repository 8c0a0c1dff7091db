"""One simulation: the engine's own loop on a virtual clock, fed with a trace's requests.

EngineCore, Scheduler, CacheManager and policy are those of the server; the runner and the clock are
simulated. Always holds: nothing here reads a clock or draws a random number, so the same requests,
machine and config give the same answers and times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from quire.base.engine_stats import EngineStats
from quire.base.errors import QuireError, WorkerError
from quire.base.records import Request, RequestOutput, StepOutputs, StepPlan
from quire.base.report import Field
from quire.cache.chain import FIXED_KEY
from quire.config.groups import EngineConfig
from quire.engine.assembly.scheduler_factory import make_scheduler
from quire.engine.core import RETRY_AFTER_S, EngineCore
from quire.sim.clock import VirtualClock
from quire.sim.drafts import DraftAcceptance, planned_source
from quire.sim.load import RequestDefaults, RequestFactory, TraceRequest
from quire.sim.machine import Machine
from quire.sim.runner import PlannedOutputs, VirtualRunner

# Virtual time without a step, while work is pending and no request arrives, that means a fault of
# the scheduler.
STUCK_AFTER_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that finished: times of its first schedule, first token and last token."""

    request: TraceRequest
    first_scheduled_ms: float
    first_token_ms: float
    last_token_ms: float
    num_preemptions: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Run:
    """Results of a simulation. refused: requests the engine rejected, by the kind of error.

    complete: False where the run was stopped before its last request ended. busy_ms: in which the
    last stage had a plan, waits for rows included. stage_busy_ms: in which each stage of a pipeline
    computed.
    """

    finished: list[FinishedRequest] = field(default_factory=list)
    refused: list[tuple[TraceRequest, str]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    end_ms: float = 0.0
    busy_ms: float = 0.0
    stage_busy_ms: tuple[float, ...] = ()
    complete: bool = True

    @property
    def refusals(self) -> dict[str, int]:
        """Return the number of rejected requests by the kind of error."""
        return dict(sorted(Counter(kind for _, kind in self.refused).items()))


def simulate(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    *,
    on_plan: Callable[[StepPlan], None] | None = None,
    on_progress: OnProgress | None = None,
    on_accepted: Callable[..., None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    acceptance: DraftAcceptance | None = None,
) -> Run:
    """Run `requests` (in order of arrival) until all have ended.

    on_plan receives every plan; on_accepted(number, scheduler=...) is called for each accepted
    request before it is scheduled. should_stop is called between steps; when it returns True, the
    partial run is returned. acceptance: of draft tokens; None: there are none.

    Raises WorkerError where the engine makes no progress, SettingError and InvalidParameter for an
    invalid config.
    """
    num_blocks = machine.num_blocks(config)
    limits = machine.limits(config, num_blocks=num_blocks, max_model_len=defaults.max_model_len)
    if acceptance is not None:
        defaults = replace(defaults, max_drafts=acceptance.max_drafts)
    clock, factory = VirtualClock(), RequestFactory(requests, defaults)
    drafts = None
    if acceptance is not None:
        drafts = planned_source(acceptance, factory.planned, num_slots=limits.max_num_seqs)
    scheduler = make_scheduler(
        config,
        limits,
        num_blocks=num_blocks,
        fingerprint=machine.name,
        hash_key=FIXED_KEY,
        cost=machine.linear if limits.step_budget_ms else None,
        draft_source=drafts,
    )
    ends = PlannedOutputs(factory.planned, num_slots=limits.max_num_seqs)
    runner = VirtualRunner(clock, machine.stages or (machine.cost,), ends, on_plan=on_plan)
    core = EngineCore(
        scheduler, runner, plans_in_flight=limits.plans_in_flight, report=report_nothing
    )
    replay = TraceReplay(core, clock, requests, factory)
    if on_accepted is not None:
        replay.on_accepted = partial(on_accepted, scheduler=scheduler)
    replay.busy_ms = lambda: runner.busy_ms
    if machine.stages:
        core.waited_ms = lambda: runner.waited_ms
    run = replay.run(on_progress, should_stop)
    run.stage_busy_ms = tuple(runner.stage_busy_ms) if machine.stages else ()
    return run


class OnProgress(Protocol):
    """Receives the progress of a run after arrivals and after steps in which requests ended."""

    def __call__(self, *, num_arrived: int, num_ended: int, now_ms: float) -> None: ...


class WaitingClock(Protocol):
    """A clock, virtual or real, that can be waited on."""

    def now_ms(self) -> float: ...

    def wait_until(self, moment_ms: float) -> None: ...


class TraceReplay:
    """Adds requests to the engine core as they arrive, steps it, and records results.

    Arrival times and `clock` share their zero. on_accepted: called with the number of each accepted
    request. on_outputs: called with what clients get of each step. on_refused: returns whether
    another engine answers a request. busy_ms: returns how long steps took.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: WaitingClock,
        requests: Sequence[TraceRequest],
        factory: RequestFactory,
    ) -> None:
        self._core = core
        self._clock = clock
        self._jobs = requests
        self._factory = factory
        self._run = Run()
        self._next = 0
        self.on_accepted: Callable[[int], None] | None = None
        self.on_outputs: Callable[[StepOutputs], None] | None = None
        self.on_refused: Callable[[str], bool] | None = None
        self.busy_ms: Callable[[], float] = lambda: 0.0
        self._stuck_since_ms: float | None = None

    def run(
        self,
        on_progress: OnProgress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Run:
        """Run until all requests have arrived and ended, or until should_stop returns True."""
        while True:
            if should_stop is not None and should_stop():
                self.stop()
                break
            if not self.advance(on_progress):
                break
        return self.result

    @property
    def now_ms(self) -> float:
        """The time that this run has come to."""
        return self._clock.now_ms()

    @property
    def has_more(self) -> bool:
        """Whether requests are still to come or to end."""
        return self._next < len(self._jobs) or self._core.has_work

    @property
    def result(self) -> Run:
        """The run so far."""
        self._run.stats, self._run.end_ms = self._core.stats(), self._clock.now_ms()
        self._run.busy_ms = self.busy_ms()
        return self._run

    def stop(self) -> None:
        """Mark the run as partial, unless it is over."""
        if self.has_more:
            self._run.complete = False

    def advance(self, on_progress: OnProgress | None = None) -> bool:
        """Go on by one step, one arrival or one wait; return False where the run is over."""
        core, clock = self._core, self._clock
        if not self.has_more:
            return False
        if not core.has_work and self.next_ms > clock.now_ms():
            clock.wait_until(self.next_ms)
            return True
        if self._take():
            self._report(on_progress)
        self._expire()
        if not core.has_work:
            return True
        outputs = core.step(clock.now_ms)
        if outputs is None:
            self._stuck_since_ms = self._wait(self._stuck_since_ms)
            return True
        self._stuck_since_ms = None
        shown = self._shown(outputs)
        if self.on_outputs is not None:
            self.on_outputs(shown)
        finished = [one for one in shown.events if one.finish_reason is not None]
        for output in finished:
            self._end(output)
        if finished:
            self._report(on_progress)
        return True

    def _report(self, on_progress: OnProgress | None) -> None:
        if on_progress is not None:
            on_progress(
                num_arrived=self._next,
                num_ended=len(self._run.finished) + len(self._run.refused),
                now_ms=self._clock.now_ms(),
            )

    @property
    def next_ms(self) -> float:
        """When something comes next that is not a step; inf for never."""
        return self._jobs[self._next].arrival_ms if self._next < len(self._jobs) else math.inf

    def _take(self) -> bool:
        """Take what has come; return whether requests have."""
        arrived = self._arrived()
        for request in arrived:
            self._add(request)
        return bool(arrived)

    def _arrived(self) -> list[Request]:
        """Return the requests that have arrived."""
        now_ms, arrived = self._clock.now_ms(), list[Request]()
        while self._next < len(self._jobs) and self._jobs[self._next].arrival_ms <= now_ms:
            arrived.append(self._factory.make(self._next, self._jobs[self._next]))
            self._next += 1
        return arrived

    def _add(self, request: Request) -> None:
        try:
            self._core.add((request,))
        except QuireError as error:
            self._refuse(request.request_id, type(error).__name__)
            return
        if self.on_accepted is not None:
            self.on_accepted(int(request.request_id))

    def _refuse(self, request_id: str, kind: str) -> None:
        """Record a request that is not answered, unless that is up to another engine."""
        if self.on_refused is None or not self.on_refused(request_id):
            self._run.refused.append((self._jobs[int(request_id)], kind))
        self._factory.forget(request_id)

    def _shown(self, outputs: StepOutputs) -> StepOutputs:
        """Return what the clients of requests get of a step."""
        return outputs

    def _expire(self) -> None:
        """End requests that passed their time limit."""
        for refused in self._core.expire(self._clock.now_ms()):
            for request_id in refused.request_ids:
                self._refuse(request_id, refused.fault.kind)

    def _wait(self, since_ms: float | None) -> float:
        """Wait before the next attempt, as the engine does when nothing can be scheduled."""
        now_ms = self._clock.now_ms()
        since_ms = now_ms if since_ms is None else since_ms
        if self._next >= len(self._jobs) and now_ms - since_ms > STUCK_AFTER_MS:
            raise WorkerError(
                f"{self._core.stats().waiting} requests wait and none was scheduled in "
                f"{STUCK_AFTER_MS / 6e4:.0f} virtual minutes: the policy or admission control "
                "blocks them all"
            )
        self._clock.wait_until(min(now_ms + 1e3 * RETRY_AFTER_S, max(self.next_ms, now_ms)))
        return since_ms

    def _end(self, output: RequestOutput) -> None:
        times, request = output.times, self._jobs[int(output.request_id)]
        self._factory.forget(output.request_id)
        if output.error is not None or times is None:
            self._run.refused.append((request, output.error or str(output.finish_reason)))
            return
        self._run.finished.append(
            FinishedRequest(
                request,
                times.first_scheduled_ms,
                times.first_token_ms,
                times.last_token_ms,
                output.num_preemptions,
                output.cached_tokens,
            )
        )


def report_nothing(what: str, **fields: Field) -> None:
    """Ignore reports of failed steps; none fail here."""

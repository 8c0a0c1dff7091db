"""One simulation: the engine's own loop over a virtual clock, fed with jobs, watched by nobody.

EngineCore, Scheduler, CacheManager and policy are those that serve; what computes and what time
it is are made up. Always holds: nothing here reads a clock or draws a random number, so the same
jobs, machine and config give the same answers and the same times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from quire.base.errors import QuireError, WorkerError
from quire.base.records import EngineStats, RequestOutput, StepPlan
from quire.base.report import Field
from quire.cache.digest import FIXED_KEY
from quire.config.groups import EngineConfig
from quire.engine.assembly.scheduler_factory import make_scheduler, scheduler_limits
from quire.engine.core import RETRY_AFTER_S, EngineCore
from quire.sim.clock import VirtualClock
from quire.sim.load import Asks, Job, Requests
from quire.sim.machine import Machine
from quire.sim.runner import PlannedEnds, VirtualRunner

# Seconds of virtual time without a step, while work is pending and nobody arrives, that are a
# fault of the scheduler and not a pause.
STUCK_AFTER_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that ended: when it was first scheduled, its first and last token came."""

    job: Job
    first_scheduled_ms: float
    first_token_ms: float
    last_token_ms: float
    num_preemptions: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of a simulation. refused: jobs the engine did not take, by the kind of error.

    complete: False where the run was stopped before its last request ended.
    """

    ended: list[Ended] = field(default_factory=list)
    refused: list[tuple[Job, str]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    end_ms: float = 0.0
    busy_ms: float = 0.0
    complete: bool = True

    @property
    def refusals(self) -> dict[str, int]:
        """How many were refused, by the kind of error."""
        return dict(sorted(Counter(kind for _, kind in self.refused).items()))


def simulate(
    jobs: Sequence[Job],
    asks: Asks,
    machine: Machine,
    config: EngineConfig,
    *,
    on_plan: Callable[[StepPlan], None] | None = None,
    on_progress: OnProgress | None = None,
    on_taken: Callable[..., None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Run:
    """Run `jobs` (in order of arrival) to the last end. on_plan sees every plan; on_taken(number,
    scheduler=...) is told of each job that the engine has taken, before anything is done with it.
    should_stop is asked between steps; when it returns True, the partial run is returned.

    Raises WorkerError where the engine stops getting on, SettingError and InvalidParameter for a
    config that cannot be.
    """
    num_blocks = machine.num_blocks(config)
    limits = scheduler_limits(
        config.scheduler,
        num_blocks=num_blocks,
        max_model_len=min(asks.max_model_len, num_blocks * config.cache.block_size),
        step_tokens=machine.step_tokens_of(config),
        num_layers=machine.num_layers,
    )
    scheduler = make_scheduler(
        config,
        limits,
        num_blocks=num_blocks,
        fingerprint=machine.name,
        hash_key=FIXED_KEY,
        cost=machine.linear if limits.step_budget_ms else None,
    )
    clock, requests = VirtualClock(), Requests(jobs, asks)
    ends = PlannedEnds(requests.planned, num_slots=limits.max_num_seqs)
    runner = VirtualRunner(clock, machine.cost, ends, on_plan=on_plan)
    core = EngineCore(
        scheduler, runner, plans_in_flight=limits.plans_in_flight, report=_report_nothing
    )
    feed = Feed(core, clock, jobs, requests)
    if on_taken is not None:
        feed.on_taken = partial(on_taken, scheduler=scheduler)
    run = feed.run(on_progress, should_stop)
    run.busy_ms = runner.busy_ms
    return run


class OnProgress(Protocol):
    """Receives the progress of a run after arrivals and after steps in which requests ended."""

    def __call__(self, *, num_arrived: int, num_ended: int, now_ms: float) -> None: ...


class WaitingClock(Protocol):
    """A clock, virtual or not, that can be waited on."""

    def now_ms(self) -> float: ...

    def wait_until(self, moment_ms: float) -> None: ...


class Feed:
    """What `serve` is to the engine: takes who has arrived, steps, notes who ended.

    Times of jobs and of `clock` count from the same moment. on_taken: told the number of each job
    taken.
    """

    def __init__(
        self, core: EngineCore, clock: WaitingClock, jobs: Sequence[Job], requests: Requests
    ) -> None:
        self._core = core
        self._clock = clock
        self._jobs = jobs
        self._requests = requests
        self._run = Run()
        self._next = 0
        self.on_taken: Callable[[int], None] | None = None

    def run(
        self,
        on_progress: OnProgress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Run:
        """Run until all requests have arrived and ended, or until should_stop returns True."""
        core, clock, jobs = self._core, self._clock, self._jobs
        stuck_since_ms: float | None = None
        while self._next < len(jobs) or core.has_work:
            if should_stop is not None and should_stop():
                self._run.complete = False
                break
            if not core.has_work:
                clock.wait_until(jobs[self._next].arrival_ms)
            if self._next < len(jobs) and jobs[self._next].arrival_ms <= clock.now_ms():
                self._take_arrived()
                self._report(on_progress)
            self._expire()
            if not core.has_work:
                continue
            outputs = core.step(clock.now_ms)
            if outputs is None:
                stuck_since_ms = self._wait(stuck_since_ms)
                continue
            stuck_since_ms = None
            ended = [one for one in outputs.events if one.finish_reason is not None]
            for output in ended:
                self._end(output)
            if ended:
                self._report(on_progress)
        self._run.stats, self._run.end_ms = core.stats(), clock.now_ms()
        return self._run

    def _report(self, on_progress: OnProgress | None) -> None:
        if on_progress is not None:
            on_progress(
                num_arrived=self._next,
                num_ended=len(self._run.ended) + len(self._run.refused),
                now_ms=self._clock.now_ms(),
            )

    def _take_arrived(self) -> None:
        now_ms = self._clock.now_ms()
        while self._next < len(self._jobs) and self._jobs[self._next].arrival_ms <= now_ms:
            number, job = self._next, self._jobs[self._next]
            self._next += 1
            request = self._requests.make(number, job)
            try:
                self._core.add((request,))
                if self.on_taken is not None:
                    self.on_taken(number)
            except QuireError as error:
                self._run.refused.append((job, type(error).__name__))
                self._requests.forget(request.request_id)

    def _expire(self) -> None:
        """End whose time is over."""
        for refused in self._core.expire(self._clock.now_ms()):
            for request_id in refused.request_ids:
                self._run.refused.append((self._jobs[int(request_id)], refused.fault.kind))
                self._requests.forget(request_id)

    def _wait(self, since_ms: float | None) -> float:
        """Nothing could be scheduled: as the engine does, try again a little later."""
        now_ms = self._clock.now_ms()
        since_ms = now_ms if since_ms is None else since_ms
        until_ms = now_ms + 1e3 * RETRY_AFTER_S
        if self._next < len(self._jobs):
            until_ms = min(until_ms, max(self._jobs[self._next].arrival_ms, now_ms))
        elif now_ms - since_ms > STUCK_AFTER_MS:
            raise WorkerError(
                f"{self._core.stats().waiting} requests wait and none was scheduled for "
                f"{STUCK_AFTER_MS / 6e4:.0f} virtual minutes: the policy or a gate holds all"
            )
        self._clock.wait_until(until_ms)
        return since_ms

    def _end(self, output: RequestOutput) -> None:
        times, job = output.times, self._jobs[int(output.request_id)]
        self._requests.forget(output.request_id)
        if output.error is not None or times is None:
            self._run.refused.append((job, output.error or str(output.finish_reason)))
            return
        self._run.ended.append(
            Ended(
                job,
                times.first_scheduled_ms,
                times.first_token_ms,
                times.last_token_ms,
                output.num_preemptions,
                output.cached_tokens,
            )
        )


def _report_nothing(what: str, **fields: Field) -> None:
    """The loop reports failed steps; none fail here."""

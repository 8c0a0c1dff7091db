"""The same jobs on a real engine, in real time: what a simulation is held against.

The engine computes everything; only where a request ends is as the trace says, as it is in the
simulation: its last token is replaced by the stop token. Reads the machine's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.base.records import StepPlan, StepResult
from quire.engine.assembly.assemble import Engine
from quire.engine.core import EngineCore, Runner
from quire.runner.handle import Handle
from quire.scheduler.scheduler import Scheduler
from quire.sim.load import Asks, Job, Requests
from quire.sim.run import Feed, OnProgress, Run, WaitingClock
from quire.sim.runner import PlannedEnds


class RealClock:
    """Milliseconds since it was made; waiting sleeps."""

    def __init__(self) -> None:
        self._began_ms = time.monotonic_ns() / 1e6

    def now_ms(self) -> float:
        """The moment it is."""
        return time.monotonic_ns() / 1e6 - self._began_ms

    def wait_until(self, moment_ms: float) -> None:
        """Sleep; nothing where that moment is over already."""
        left_ms = moment_ms - self.now_ms()
        if left_ms > 0:
            time.sleep(left_ms / 1e3)


@dataclass(frozen=True, slots=True)
class _Computing:
    plan: StepPlan
    handle: Handle

    def outcome(self) -> StepResult:
        return self.handle.outcome()


class EndingRunner:
    """Computes plans with `runner` and ends requests where `ends` plans it. on_plan sees plans."""

    def __init__(
        self,
        runner: Runner,
        ends: PlannedEnds,
        *,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._runner = runner
        self._ends = ends
        self._on_plan = on_plan

    def submit(self, plan: StepPlan) -> _Computing:
        """Hand on."""
        if self._on_plan is not None:
            self._on_plan(plan)
        return _Computing(plan, self._runner.submit(plan))

    def collect(self, handle: Handle) -> StepResult:
        """The result with other tokens. Plans come in order, so those admitted are known now."""
        assert isinstance(handle, _Computing)
        result = self._runner.collect(handle.handle)
        self._ends.admit(handle.plan)
        if result.errors:
            return result
        return replace(result, token_ids=self._ends.token_ids(handle.plan))

    def close(self) -> None:
        """Its owner closes it."""


def run_real(
    engine: Engine,
    jobs: Sequence[Job],
    asks: Asks,
    *,
    scheduler: Scheduler,
    plans_in_flight: int = 1,
    clock: WaitingClock | None = None,
    on_plan: Callable[[StepPlan], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Run:
    """Run `jobs` on an engine that has nothing else to do, as they arrive.

    scheduler: a fresh one of as many slots as the engine's and no more blocks.
    on_progress: see OnProgress.
    clock: the machine's, where none is given; its zero is when the first job is waited for.
    """
    requests = Requests(jobs, asks, vocab_size=engine.card.vocab_size)
    ends = PlannedEnds(requests.planned, num_slots=engine.card.max_num_seqs)
    runner = EndingRunner(engine.core.runner, ends, on_plan=on_plan)
    core = EngineCore(
        scheduler,
        runner,
        plans_in_flight=plans_in_flight,
        report=engine.core.report,
    )
    return Feed(core, clock or RealClock(), jobs, requests).run(on_progress)

"""Run the same requests on a real engine in real time, to validate a simulation.

The engine computes everything. Only the lengths of answers come from the trace, as in the
simulation: the last token is replaced by the stop token. Reads the machine's clock.
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
from quire.sim.load import RequestDefaults, RequestFactory, TraceRequest
from quire.sim.run import OnProgress, Run, TraceReplay, WaitingClock
from quire.sim.runner import PlannedOutputs


class WallClock:
    """Milliseconds since its creation; waiting sleeps."""

    def __init__(self) -> None:
        self._began_ms = time.monotonic_ns() / 1e6

    def now_ms(self) -> float:
        """Return the current time."""
        return time.monotonic_ns() / 1e6 - self._began_ms

    def wait_until(self, moment_ms: float) -> None:
        """Sleep until `moment_ms`; return at once if it has passed."""
        left_ms = moment_ms - self.now_ms()
        if left_ms > 0:
            time.sleep(left_ms / 1e3)


@dataclass(frozen=True, slots=True)
class _PendingStep:
    plan: StepPlan
    handle: Handle

    def outcome(self) -> StepResult:
        return self.handle.outcome()


class PlannedLengthRunner:
    """Computes plans with `runner` and ends requests at their planned length.

    on_plan receives every plan.
    """

    def __init__(
        self,
        runner: Runner,
        ends: PlannedOutputs,
        *,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._runner = runner
        self._ends = ends
        self._on_plan = on_plan

    def submit(self, plan: StepPlan) -> _PendingStep:
        """Pass the plan on."""
        if self._on_plan is not None:
            self._on_plan(plan)
        return _PendingStep(plan, self._runner.submit(plan))

    def collect(self, handle: Handle) -> StepResult:
        """Return the result with planned tokens; plans must be collected in order."""
        assert isinstance(handle, _PendingStep)
        result = self._runner.collect(handle.handle)
        self._ends.admit(handle.plan)
        if result.errors:
            return result
        return replace(result, token_ids=self._ends.token_ids(handle.plan))

    def close(self) -> None:
        """Do nothing; the owner of the inner runner closes it."""


def run_real(
    engine: Engine,
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    *,
    scheduler: Scheduler,
    plans_in_flight: int = 1,
    clock: WaitingClock | None = None,
    on_plan: Callable[[StepPlan], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Run:
    """Run `requests` at their arrival times on an otherwise idle engine.

    scheduler: a new one with as many slots as the engine's and no more blocks. on_progress: see
    OnProgress. clock: a wall clock by default; its zero is the start of the run.
    """
    factory = RequestFactory(requests, defaults, vocab_size=engine.card.vocab_size)
    ends = PlannedOutputs(factory.planned, num_slots=engine.card.max_num_seqs)
    runner = PlannedLengthRunner(engine.core.runner, ends, on_plan=on_plan)
    core = EngineCore(
        scheduler,
        runner,
        plans_in_flight=plans_in_flight,
        report=engine.core.report,
    )
    return TraceReplay(core, clock or WallClock(), requests, factory).run(on_progress)

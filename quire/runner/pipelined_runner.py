"""PipelinedRunner: a ModelRunner on an executor of several stages (PipelinedExecutor).

`submit` takes a plan over and lets the first stages begin its rows; they are finished when the plan
is collected: the last stage, the head and the token choice. So each stage computes another plan.
Knows no policy and no transport. Always holds: plans are begun and finished in the order in which
they were submitted; while a plan is in flight, each of its rows has the slot it was made for: a
plan that gives such a slot to another request waits until it is finished; no row reads a token that
a plan in flight samples (quire/scheduler/micro_batches.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.base.errors import SettingError, WorkerError
from quire.base.records import StepPlan, StepResult
from quire.execute.executor import Executor, PipelinedExecutor
from quire.runner.model_runner import ModelRunner
from quire.runner.step_result import no_rows, step_result
from quire.runner.step_run import StepRun


class PipelinedRunner(ModelRunner):
    """See ModelRunner for `settings`; plans overlap in any case. Raises SettingError for an
    executor of one stage."""

    def __init__(self, executor: Executor, *, overlap: bool = True, **settings: Any) -> None:
        if not isinstance(executor, PipelinedExecutor):
            raise SettingError(
                f"the {executor.name} executor has no stages; leave pipeline_parallel_size out"
            )
        super().__init__(executor, overlap=False, **settings)
        self._stages: PipelinedExecutor = executor
        self._out: deque[_PipelinedStep] = deque()  # not finished, oldest first

    def submit(self, plan: StepPlan) -> _PipelinedStep:
        """Begin a plan; its outcome raises what goes wrong."""
        self._make_way(plan)
        step = _PipelinedStep(plan, self)
        try:
            self._apply(plan)
            if len(plan.slots):
                run = self.run_of(plan)
                self._check_known(plan)
                self._stages.begin_trunk(run.batch)
                step.run = run
        except Exception as error:  # noqa: BLE001  raised by the outcome
            step.error = error
        self._out.append(step)
        return step

    def finish(self, last: _PipelinedStep) -> None:
        """Finish all steps up to this one, in order."""
        while last.result is None and last.error is None:
            self._out.popleft().end()

    def end_thread(self) -> None:
        """Finish the plans handed in, and end the runner's own threads."""
        while self._out:
            self._out.popleft().end()
        super().end_thread()

    def finish_begun(self) -> None:
        """Finish the steps in flight."""
        if self._out:
            self.finish(self._out[-1])

    def run_of(self, plan: StepPlan) -> StepRun:
        """Return the run of a plan that was applied."""
        return StepRun(plan, self._resources)

    def result_of(self, plan: StepPlan, run: StepRun) -> StepResult:
        """Compute the rest of a step that was begun."""
        return step_result(plan, self.tables, self._computed(plan, run), run.rows)

    def _make_way(self, plan: StepPlan) -> None:
        """Finish the steps in flight before a plan that changes slots which their rows have, or
        copies the tokens of slots."""
        if self._out and must_follow(plan, (step.plan for step in self._out)):
            self.finish_begun()

    def _check_known(self, plan: StepPlan) -> None:
        unknown = plan.starts + plan.counts > self.tables.tokens.lengths[plan.slots]
        if unknown.any():
            raise WorkerError(
                f"step {plan.step}: slots {plan.slots[np.flatnonzero(unknown)].tolist()} compute "
                "tokens that a plan in flight samples; a pipeline takes them when that is finished"
            )


class _PipelinedStep:
    """A plan handed in: a Handle."""

    def __init__(self, plan: StepPlan, runner: PipelinedRunner) -> None:
        self.run: StepRun | None = None
        self.result: StepResult | None = None
        self.error: Exception | None = None
        self.plan, self._runner = plan, runner

    def outcome(self) -> StepResult:
        """Wait for the step; return its result or raise its error."""
        self._runner.finish(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None, "a finished step has a result or an error"
        return self.result

    def end(self) -> None:
        """Finish it; all steps before it are finished."""
        if self.error is not None:
            return
        if self.run is None:
            self.result = no_rows(self.plan)
            return
        try:
            self.result = self._runner.result_of(self.plan, self.run)
        except Exception as error:  # noqa: BLE001  raised by the outcome
            self.error = error


def must_follow(plan: StepPlan, before: Iterable[StepPlan]) -> bool:
    """Return whether a plan can begin only when the plans before it are finished, of which there
    are some."""
    if len(plan.known_slots) or len(plan.branch_from):
        return any(True for _ in before)
    taken = {*plan.retired.tolist(), *(admission.slot for admission in plan.admissions)}
    return bool(taken) and not all(taken.isdisjoint(one.slots.tolist()) for one in before)

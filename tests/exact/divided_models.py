"""Models that several processes compute, over drawn cases: One Answer against one process.

Knows neither ranks nor stages. Always holds: the processes of all models end, whatever the cases
give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.program.program import Program
from quire.ranks.executor_class import RankedExecutorClass
from tests.exact.heads import Heads
from tests.exact.rig import MAX_ROWS, MAX_SEQUENCES, AloneRuns, Model, differences, run_case
from tests.exact.workload import Case

LIMITS = StepLimits(max_tokens=MAX_ROWS, max_samples=MAX_SEQUENCES, max_sequences=MAX_SEQUENCES)


class DividedModel(Model):
    """A model over several processes, with the name of the model in one process: AloneRuns returns
    what that has answered."""

    def __init__(self, whole: Model, executor_class: RankedExecutorClass) -> None:
        super().__init__(whole.folder, whole.dtype, max_model_len=whole.max_model_len)
        self.name, self.program = whole.name, whole.program
        self.whole, self._class = whole, executor_class

    def executor(self, num_threads: int) -> Executor:
        """Return the one executor: each process has one thread."""
        return super().executor(1)

    def draft_executor(self) -> Executor:
        """Return the model in this process: a draft model is not divided."""
        return self.whole.draft_executor()

    def heads(self, kind: str) -> Heads:
        """Return the heads of the model in one process: they are not divided."""
        return self.whole.heads(kind)

    def tapped_executor(self, kind: str, num_threads: int) -> Executor:
        """Return processes of which the first hands out what the heads read."""
        key = kind, 1
        if key not in self._tapped:
            self._tapped[key] = self._started(self.heads(kind).program)
        return self._tapped[key]

    def make_executor(self, num_threads: int) -> Executor:
        """Start the processes."""
        return self._started(self.program)

    def _started(self, program: Program) -> Executor:
        options = ExecutorOptions(limits=LIMITS, num_threads=1)
        return self._class(program, self.checkpoint, options)


def compare_with_one_process(
    models: Sequence[DividedModel], cases: Iterable[Case], goals: Iterable[str], **options: Any
) -> tuple[list[str], dict[str, int]]:
    """Return a line for each difference, and how often each goal was reached; close the models.

    models: by the number that a case has. options: of run_case.
    """
    alone, lines, reached = AloneRuns(), [], dict.fromkeys(goals, 0)
    try:
        for case in cases:
            model = models[case.model]
            for request in case.requests:
                alone.of(model.whole, request)
            outcome = run_case(model, case, alone=alone, **options)
            lines += differences(model.whole, outcome, alone)
            for goal in reached:
                reached[goal] += getattr(outcome, goal)
    finally:
        for model in models:
            model.close()
    return lines, reached


def any_differs(model: DividedModel, cases: Iterable[Case], **options: Any) -> bool:
    """Return whether an answer differs in one of the cases, the first that shows it being the last
    that is run; close the model. options: of run_case."""
    alone = AloneRuns()
    try:
        for case in cases:
            for request in case.requests:
                alone.of(model.whole, request)
            if differences(model.whole, run_case(model, case, alone=alone, **options), alone):
                return True
    finally:
        model.close()
    return False

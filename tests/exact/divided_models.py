"""Models that several processes compute, over drawn cases: One Answer against one process.

Knows neither ranks nor stages. Always holds: the processes of all models end, whatever the cases
give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.program.program import Program
from quire.ranks.draft_share import DraftLayers
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.leading import LeadingExecutor
from tests.exact.heads import Heads
from tests.exact.rig import (
    MAX_ROWS,
    MAX_SEQUENCES,
    AloneRuns,
    Model,
    Outcome,
    SharedCache,
    differences,
    run_case,
)
from tests.exact.workload import Case

LIMITS = StepLimits(max_tokens=MAX_ROWS, max_samples=MAX_SEQUENCES, max_sequences=MAX_SEQUENCES)
PASS_LIMITS = StepLimits(
    max_tokens=MAX_SEQUENCES, max_samples=MAX_SEQUENCES, max_sequences=MAX_SEQUENCES
)


class DividedModel(Model):
    """A model over several processes, with the name of the model in one process: AloneRuns returns
    what that has answered. draft_layers: first layers that draft."""

    def __init__(
        self, whole: Model, executor_class: RankedExecutorClass, draft_layers: int = 1
    ) -> None:
        super().__init__(whole.folder, whole.dtype, max_model_len=whole.max_model_len)
        self.name, self.program = whole.name, whole.program
        self.whole, self._class = whole, executor_class
        self._num_drafting = draft_layers
        self._drafts = DraftLayers(num=draft_layers, limits=PASS_LIMITS)

    def executor(self, num_threads: int) -> Executor:
        """Return the one executor: each process has one thread."""
        return super().executor(1)

    def draft_executor(self) -> Executor:
        """Return the model in this process: a draft model is not divided."""
        return self.whole.draft_executor()

    def first_layers(self, num_threads: int, *, is_beside: bool, is_whole: bool) -> SharedCache:
        """Return the first layers of all processes."""
        key = 1, is_beside, False
        if key not in self._first_layers:
            leading = cast(LeadingExecutor, self.executor(1))
            self._first_layers[key] = leading.first_layers(self._num_drafting, int(is_beside))
        return self._first_layers[key]

    @property
    def has_heads(self) -> bool:
        """Return that of the model in one process."""
        return self.whole.has_heads

    def heads(self, kind: str) -> Heads:
        """Return the heads of the model in one process: they are not divided."""
        return self.whole.heads(kind)

    def tapped_executor(self, kind: str, num_threads: int) -> Executor:
        """Return processes of which the first hands out what the heads read."""
        key = kind, 1
        if key not in self._tapped:
            self._tapped[key] = self._started(self._class, self.heads(kind).program)
        return self._tapped[key]

    def make_executor(self, num_threads: int) -> Executor:
        """Start the processes."""
        return self._started(replace(self._class, drafts=self._drafts), self.program)

    def _started(self, made: RankedExecutorClass, program: Program) -> Executor:
        return made(program, self.checkpoint, ExecutorOptions(limits=LIMITS, num_threads=1))


def compare_with_one_process(
    models: Sequence[DividedModel], cases: Iterable[Case], goals: Iterable[str], **options: Any
) -> tuple[list[str], dict[str, int]]:
    """Return a line for each difference, and how often each goal was reached; close the models.

    models: by the number that a case has. options: of run_case; `alone` has answers of one process
    to compare with.
    """
    lines, reached = list[str](), dict.fromkeys(goals, 0)
    for outcome, found in _compared(models, cases, **options):
        lines += found
        for goal in reached:
            reached[goal] += getattr(outcome, goal)
    return lines, reached


def compare_drafts(
    model: DividedModel, cases: Iterable[Case], **options: Any
) -> tuple[list[str], dict[str, int]]:
    """Return a line for each difference, and how many drafts of each proposer were verified; close
    the model. options: of run_case."""
    lines, drafted = list[str](), dict[str, int]()
    for outcome, found in _compared([model], cases, **options):
        lines += found
        proposer = outcome.case.settings.proposer
        num = sum(plan.draft_ids.size for plan, _ in outcome.plans)
        drafted[proposer] = drafted.get(proposer, 0) + num
    return lines, drafted


def drafts_alike(whole: Model, divided: Model, case: Case, **options: Any) -> bool:
    """Return whether the same drafts are verified in both models, and some are. options: of
    run_case for the divided one."""
    # A tier's copies and plans in flight would make plans depend on time, and stages compute no
    # layers by themselves.
    settings = replace(
        case.settings, tier_blocks=0, plans_in_flight=1, micro_batches=1, layered=False
    )
    case, found = replace(case, settings=settings), []
    for model, more in ((whole, {}), (divided, options)):
        outcome = run_case(model, case, alone=AloneRuns(), **more)
        found.append([plan.draft_ids.tolist() for plan, _ in outcome.plans])
    return found[0] == found[1] and any(found[0])


def drafted_cases(cases: Iterable[Case], proposers: Iterable[str], each: int) -> list[Case]:
    """Return the first cases of each of `proposers`, for model 0."""
    left, found = dict.fromkeys(proposers, each), list[Case]()
    for case in cases:
        if left.get(proposer := case.settings.proposer, 0):
            left[proposer] -= 1
            found.append(replace(case, model=0))
        if not any(left.values()):
            break
    return found


def _compared(
    models: Sequence[DividedModel],
    cases: Iterable[Case],
    *,
    alone: AloneRuns | None = None,
    **options: Any,
) -> Iterator[tuple[Outcome, list[str]]]:
    """Yield the outcome of each case, and its differences from one process; close the models."""
    alone = AloneRuns() if alone is None else alone
    try:
        for case in cases:
            model = models[case.model]
            for request in case.requests:
                alone.of(model.whole, request)
            outcome = run_case(model, case, alone=alone, **options)
            yield outcome, differences(model.whole, outcome, alone)
    finally:
        for model in models:
            model.close()


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

"""PipelinedRunner: plans are begun when they are submitted and finished when they are collected, in
order; a plan that changes the slots of one in flight waits for it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from quire.base.errors import SettingError, WorkerError
from quire.program.batch import ForwardBatch
from quire.runner.pipelined_runner import PipelinedRunner
from tests.unit.runner.plans import BLOCK_SIZE, admission_of, ints, plan_of
from tests.unit.runner.scripted_executor import ScriptedExecutor


class StagedExecutor(ScriptedExecutor):
    """A scripted executor of two stages that logs what is begun and what is run."""

    num_stages = 2
    waited_ms = 0.0

    def __init__(self) -> None:
        super().__init__(lambda positions: (positions + 20).astype(np.int32))
        self.log: list[tuple[str, list[int]]] = []
        self.fail_next_begin: Exception | None = None

    def begin_trunk(self, batch: ForwardBatch) -> None:
        error, self.fail_next_begin = self.fail_next_begin, None
        if error is not None:
            raise error
        self.log.append(("begin", batch.token_ids.tolist()))

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        self.log.append(("run", batch.token_ids.tolist()))
        super().run_trunk(batch, head_rows=head_rows)

    def copy_blocks(self, copy_from: Any, copy_to: Any) -> None:
        self.log.append(("copy", copy_to.tolist()))


@pytest.fixture
def executor() -> StagedExecutor:
    """An executor that computes nothing."""
    return StagedExecutor()


@pytest.fixture
def runner(executor: StagedExecutor) -> PipelinedRunner:
    """A runner of eight slots."""
    return PipelinedRunner(
        cast(Any, executor), num_slots=8, max_model_len=64, block_size=BLOCK_SIZE, max_samples=64
    )


def prompt(step: int, slot: int, ids: list[int], **more: Any) -> Any:
    """Return a plan that admits and computes a prompt."""
    return plan_of(
        step,
        [(slot, 0, len(ids), True)],
        admissions=(admission_of(slot, ids),),
        blocks={slot: [3 + 2 * slot, 4 + 2 * slot]},
        **more,
    )


def test_plans_are_begun_at_once_and_finished_in_order(
    runner: PipelinedRunner, executor: StagedExecutor
) -> None:
    first, second = runner.submit(prompt(1, 0, [1, 2])), runner.submit(prompt(2, 1, [5]))
    assert executor.log == [("begin", [1, 2]), ("begin", [5])]
    assert runner.collect(second).token_ids.tolist() == [21]  # the first one is finished before
    assert executor.log[2:] == [("run", [1, 2]), ("run", [5])]
    assert runner.collect(first).token_ids.tolist() == [22]
    third = runner.submit(plan_of(3, [(0, 2, 1, True), (1, 1, 1, True)]))
    assert executor.log[4:] == [("begin", [22, 21])]
    assert runner.collect(third).token_ids.tolist() == [23, 22]


@pytest.mark.parametrize("what", ["another request", "retired", "branch"])
def test_a_plan_that_changes_slots_in_flight_waits_for_them(
    runner: PipelinedRunner, executor: StagedExecutor, what: str
) -> None:
    first = runner.submit(prompt(1, 0, [1, 2]))
    if what == "another request":
        plan = prompt(2, 0, [7], retired=ints(0))
    elif what == "retired":
        plan = prompt(2, 1, [7], retired=ints(0))
    else:
        plan = prompt(
            2, 1, [7], known_slots=ints(0), known_ids=ints(9), branch_from=ints(), branch_to=ints()
        )
    second = runner.submit(plan)
    assert executor.log == [("begin", [1, 2]), ("run", [1, 2]), ("begin", [7])]
    assert runner.collect(first).token_ids.tolist() == [22]
    assert runner.collect(second).token_ids.tolist() == [21]


def test_a_plan_of_other_slots_does_not_wait(
    runner: PipelinedRunner, executor: StagedExecutor
) -> None:
    runner.collect(runner.submit(prompt(1, 2, [4])))
    executor.log.clear()
    runner.submit(prompt(2, 0, [1, 2]))
    runner.submit(prompt(3, 1, [7], retired=ints(2), copy_from=ints(1), copy_to=ints(9)))
    assert executor.log == [("begin", [1, 2]), ("copy", [9]), ("begin", [7])]
    runner.close()
    assert executor.log[3:] == [("run", [1, 2]), ("run", [7])]  # what was handed in is finished


def test_errors_are_of_the_plan_that_has_them(
    runner: PipelinedRunner, executor: StagedExecutor
) -> None:
    executor.fail_next_begin = WorkerError("no room")
    failed, fine = runner.submit(prompt(1, 0, [1])), runner.submit(prompt(2, 1, [5]))
    with pytest.raises(WorkerError, match="no room"):
        runner.collect(failed)
    executor.fail_next_trunk = ValueError("out of range")
    other = runner.submit(prompt(3, 2, [6]))
    with pytest.raises(ValueError, match="out of range"):
        runner.collect(fine)
    assert runner.collect(other).token_ids.tolist() == [21]


def test_a_row_whose_token_is_in_flight_is_refused(runner: PipelinedRunner) -> None:
    runner.submit(prompt(1, 0, [1, 2]))
    early = runner.submit(plan_of(2, [(0, 2, 1, True)]))
    with pytest.raises(WorkerError, match=r"step 2: slots \[0\] compute tokens that a plan"):
        runner.collect(early)


def test_an_executor_of_one_stage_is_refused() -> None:
    with pytest.raises(SettingError, match="the scripted executor has no stages"):
        PipelinedRunner(
            cast(Any, ScriptedExecutor()),
            num_slots=1,
            max_model_len=8,
            block_size=4,
            max_samples=1,
        )

"""Steps that exceed a device's memory are computed in parts; a row that never fits fails alone.

The allocator's failures are scripted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.records import PromptScores, StepPlan, StepResult
from quire.execute.executor import StepMemoryError
from quire.program.batch import ForwardBatch
from quire.sampling.batch import SampleBatch, TokenChoice
from tests.unit.runner.deferred_executor import DeferredExecutor
from tests.unit.runner.plans import admission_of, ints, plan_of, runner_of
from tests.unit.runner.scripted_executor import FAILS, ScriptedExecutor

TOO_MUCH = 13  # a token with a row that never fits


@dataclass(frozen=True)
class Room:
    """Memory for `max_rows` rows of a trunk, `max_chosen` of a choice, and for no TOO_MUCH."""

    max_rows: int
    max_chosen: int = 99

    def check_trunk(self, batch: ForwardBatch) -> None:
        if len(batch.seq_starts) - 1 > self.max_rows or TOO_MUCH in batch.token_ids:
            raise StepMemoryError("tried to allocate 2 GiB")

    def check_choice(self, batch: SampleBatch) -> None:
        if len(batch.positions) > self.max_chosen:
            raise StepMemoryError("tried to allocate 1 GiB")


class TightExecutor(ScriptedExecutor):
    """An executor without more memory than `room`."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        self._room.check_trunk(batch)
        super().run_trunk(batch, head_rows=head_rows)

    def sample(self, logits: Any, batch: SampleBatch) -> TokenChoice:
        self._room.check_choice(batch)
        return super().sample(logits, batch)


class TightDevice(DeferredExecutor):
    """The same as an asynchronous device: memory is allocated at submission."""

    def __init__(self, room: Room) -> None:
        super().__init__(ScriptedExecutor())
        self._room = room

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        self._room.check_trunk(batch)
        super().run_trunk(batch, head_rows=head_rows)

    def sample(self, logits: Any, batch: SampleBatch) -> TokenChoice:
        self._room.check_choice(batch)
        return super().sample(logits, batch)

    def sample_later(
        self, logits: Any, batch: SampleBatch, slots: NDArray[np.int32]
    ) -> Callable[[], TokenChoice]:
        self._room.check_choice(batch)
        return super().sample_later(logits, batch, slots)


def tight(room: Room, *, overlap: bool) -> Any:
    """Return one of them."""
    return TightDevice(room) if overlap else TightExecutor(room)


def _mixed(*, broken: bool = False) -> StepPlan:
    """Return a step of six rows: all but one sample, one is scored, one lists ids, one is rare."""
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"prompt_logprobs": 1},
        {"logprob_token_ids": (3, 5)},
        {"repetition_penalty": 1.5},
        {"mirostat": 2},
        {},
    ]
    admissions = [
        admission_of(slot, [slot, 21, 22, 23, slot + 30], logprobs=2, **asks)
        for slot, asks in enumerate(wishes)
    ]
    admissions[1] = replace(admissions[1], scores_from=0)
    if broken:
        admissions[3] = replace(admissions[3], token_ids=np.array([TOO_MUCH] * 5, np.int32))
    return plan_of(
        1,
        [(slot, 0, 5 - (slot == 5), slot != 5) for slot in range(6)],
        admissions=tuple(admissions),
        blocks={slot: [2 * slot, 2 * slot + 1] for slot in range(6)},
    )


def _same(one: StepResult, other: StepResult) -> None:
    for item in fields(StepResult):
        left, right = getattr(one, item.name), getattr(other, item.name)
        if isinstance(left, PromptScores):
            for part in fields(PromptScores):
                np.testing.assert_array_equal(getattr(left, part.name), getattr(right, part.name))
        elif isinstance(left, np.ndarray) and left.size + right.size:
            np.testing.assert_array_equal(left, right, item.name)
        elif not isinstance(left, np.ndarray):
            assert left == right, item.name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("max_rows", "max_chosen"), [(99, 1), (1, 99), (2, 1), (4, 2)])
def test_a_step_in_parts_gives_the_results_of_the_whole(
    max_rows: int, max_chosen: int, overlap: bool
) -> None:
    roomy = runner_of(ScriptedExecutor())
    whole = roomy.collect(roomy.submit(_mixed()))
    executor = tight(Room(max_rows, max_chosen), overlap=overlap)
    runner = runner_of(executor, overlap=overlap)
    _same(runner.collect(runner.submit(_mixed())), whole)
    assert len(executor.batches) > 1
    assert (runner.tables.tokens.tokens == roomy.tables.tokens.tokens).all()
    assert (runner.tables.rare.mirostat_mu == roomy.tables.rare.mirostat_mu).all()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_rows", [99, 1])
def test_drafts_are_verified_in_parts(max_rows: int, overlap: bool) -> None:
    """The token at a position is its number: the drafts of slot 0 are right, wrong; one of slot 1
    is right."""
    runner = runner_of(tight(Room(max_rows), overlap=overlap), overlap=overlap)
    plan = plan_of(
        1,
        [(0, 1, 3, 3), (1, 2, 2, 2), (2, 1, 1, 1)],
        admissions=(admission_of(0, [7, 8]), admission_of(1, [7, 8, 9]), admission_of(2, [5, 6])),
        blocks={slot: [2 * slot, 2 * slot + 1] for slot in range(3)},
        draft_counts=ints(2, 1, 0),
        draft_ids=ints(2, 9, 3),
    )
    result = runner.collect(runner.submit(plan))
    assert result.token_counts.tolist() == [2, 2, 1]
    assert result.token_ids.tolist() == [2, 3, 3, 4, 2]
    assert runner.tables.tokens.lengths[:3].tolist() == [4, 5, 3]
    assert runner.tables.tokens.tokens[0, :6].tolist() == [7, 8, 2, 3, 0, 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_never_fits_fails_alone(overlap: bool) -> None:
    roomy = runner_of(ScriptedExecutor())
    whole = roomy.collect(roomy.submit(_mixed()))
    runner = runner_of(tight(Room(99), overlap=overlap), overlap=overlap)
    result = runner.collect(runner.submit(_mixed(broken=True)))
    assert [error.row for error in result.errors] == [3]
    assert "this request alone does not fit" in result.errors[0].message
    assert "2 GiB" in result.errors[0].message
    assert result.token_counts.tolist() == [1, 1, 1, 0, 1, 0]
    others = [0, 1, 2, 4]
    assert result.token_ids.tolist() == whole.token_ids[others].tolist()
    np.testing.assert_array_equal(result.logprobs, whole.logprobs[others])
    assert runner.tables.tokens.lengths.tolist()[:5] == [6, 6, 6, 5, 6]


def test_a_row_with_failing_scores_and_one_without_memory_are_distinguished() -> None:
    plan = _mixed(broken=True)
    scored = replace(plan.admissions[1], token_ids=np.array([1, FAILS, 22, 23, 31], np.int32))
    plan = replace(plan, admissions=(plan.admissions[0], scored, *plan.admissions[2:]))
    runner = runner_of(TightExecutor(Room(2)))
    messages = {error.row: error.message for error in runner.collect(runner.submit(plan)).errors}
    assert list(messages) == [1, 3]
    assert "NaN" in messages[1]
    assert "does not fit" in messages[3]


def test_the_step_after_one_in_parts_continues_from_its_tokens() -> None:
    device = TightDevice(Room(99))
    runner = runner_of(device, overlap=True)
    both = (admission_of(0, [1, 2]), admission_of(1, [5]))
    first = runner.submit(
        plan_of(1, [(0, 0, 2, True), (1, 0, 1, True)], admissions=both, blocks={0: [3], 1: [4]})
    )
    device.fail_next["choose"] = StepMemoryError("no room")
    second = runner.submit(plan_of(2, [(0, 2, 1, True), (1, 1, 1, True)]))
    third = runner.submit(plan_of(3, [(0, 3, 1, True), (1, 2, 1, True)]))
    results = [runner.collect(handle).token_ids.tolist() for handle in (first, second, third)]
    assert results == [[2, 1], [3, 2], [4, 3]]
    assert device.batches[-1].token_ids.tolist() == [3, 2]

"""The choice of drafts that pay: when the control is asked, and with what cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.scheduler.interfaces import DraftCost
from quire.speculative.control import FixedControl, StepCost
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.draft_choice import DRAFTS_PER_CATCH_UP
from quire.speculative.ngram import NgramProposer
from quire.speculative.plain_counts import LONG_MATCHES, OF_TEXT, PREDICTED
from quire.speculative.prediction import PredictionProposer
from tests.unit.speculative.test_drafter import (
    MAX_DRAFTS,
    NUM_SLOTS,
    Case,
    CountedModel,
    cost_of,
    ints,
)

Int32s = NDArray[np.int32]


class Noting(FixedControl):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(MAX_DRAFTS)
        self.asked: list[tuple[list[int], StepCost | None]] = []
        self.kinds: Any = None

    def limits(
        self, slots: NDArray[np.intp], limits: Int32s, cost: StepCost | None, kinds: Any = None
    ) -> Int32s:
        self.asked.append((slots.tolist(), cost))
        self.kinds = kinds
        return super().limits(slots, limits, cost, kinds)


@pytest.mark.parametrize("proposer", [NgramProposer(NUM_SLOTS), PredictionProposer(NUM_SLOTS)])
def test_where_nothing_is_found_no_cost_is_predicted(proposer: Any) -> None:
    case = Case(proposer, control := Noting())
    case.begin(0, [1, 2, 3], 3)
    asked: list[int] = []

    def cost() -> DraftCost:
        asked.append(1)
        return cost_of(1)

    index, limits = np.array([0]), ints(MAX_DRAFTS)
    counts, ids = case.drafter.propose(case.tokens, index, limits, cost)
    assert (counts.tolist(), len(ids)) == ([0], 0)
    assert not case.drafter.would_propose(case.tokens, index, limits).any()
    assert not asked
    assert not control.asked


def test_the_control_is_asked_for_rows_with_drafts_with_what_making_them_takes() -> None:
    case = Case(CountedModel(pass_ms=2.0, behind_ms=32.0), control := Noting())
    case.begin(0, [1, 2, 3], 3)
    case.begin(1, [1, 2, 5, 1, 2], 3, prediction_ids=ints(30, 31, 32))
    case.begin(2, [1, 2, 3], 3, prediction_ids=ints(30, 31, 32))
    case.begin(3, [1, 2, 5, 1, 2], 3, prediction_ids=ints(30, 31, 32), uses_proposer=False)
    assert case.propose(0, 1, 2, 3) == [[7, 8], [7, 8], [30, 31, 32], []]
    [(slots, cost)] = control.asked
    assert slots == [0, 1, 2]
    assert cost is not None
    assert cost.passes is not None
    assert cost.passes.rows.tolist() == [True, True, False]
    assert cost.passes.ms.tolist() == [2.0, 2.0, 2.0]
    assert cost.draft_ms.tolist() == [32.0 / DRAFTS_PER_CATCH_UP] * 2 + [0.0]
    assert (cost.step_ms, cost.step_tokens) == (10.0, 4)


def test_the_control_knows_which_drafts_are_of_predictions_and_which_of_long_matches() -> None:
    case = Case(NgramProposer(NUM_SLOTS), control := Noting())
    case.begin(0, [1, 2, 5, 1, 2], 5)
    assert case.propose(0) == [[5, 1, 2]]
    assert control.kinds.tolist() == [OF_TEXT]
    case.begin(1, [1, 2, 3, 4, 5, 1, 2, 3, 4], 9, prediction_ids=ints(30, 31), uses_proposer=False)
    case.begin(2, [1, 2, 3, 4, 5, 1, 2, 3, 4], 9)
    index, limits = np.arange(3), np.full(3, MAX_DRAFTS, np.int32)
    assert case.drafter.would_propose(case.tokens, index, limits).all()
    assert control.kinds.tolist() == [OF_TEXT, PREDICTED, LONG_MATCHES]
    control.kinds = None
    assert case.propose(0, 1, 2) == [[5, 1, 2], [30, 31], [5, 1, 2]]
    assert control.kinds.tolist() == [OF_TEXT, PREDICTED, LONG_MATCHES]


def test_the_control_knows_which_drafts_of_several_are_computed() -> None:
    case = Case(CountedModel(), control := Noting())
    case.begin(0, [1, 2, 3], 3)
    case.begin(1, [1, 2, 3], 3, prediction_ids=ints(30, 31))
    case.propose(0, 1)
    assert control.kinds.tolist() == [OF_TEXT, PREDICTED]


def test_whether_drafts_would_pay_is_asked_without_a_cost() -> None:
    case = Case(CountedModel(), control := Noting())
    case.begin(0, [1, 2, 3], 3)
    assert case.drafter.would_propose(case.tokens, np.array([0]), ints(3)).all()
    assert control.asked == [([0], None)]


@pytest.mark.parametrize("uses_proposer", [False, True])
def test_an_account_that_is_not_asked_counts_no_steps(*, uses_proposer: bool) -> None:
    """What is learned of drafts is forgotten by the steps since the control was asked."""
    case = Case(CountedModel(), control := Noting())
    case.drafter._own.balance = balance = DraftBalance()
    while balance.allows_drafts:
        balance.drafted(-8.0, 10.0)
    case.begin(0, [1, 2, 3], 3, prediction_ids=ints(30, 31), uses_proposer=uses_proposer)
    case.drafter._predictions.rests._since = 40  # a rest has ended
    case.drafter.skips_step(case.tokens, lambda: np.array([0]))
    assert case.propose(0) == [[30, 31]]
    [(_, cost)] = control.asked
    assert cost is not None
    assert cost.num_steps == 40

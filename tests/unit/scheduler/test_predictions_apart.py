"""Requests with a prediction beside others: each origin of drafts rests, waits and is limited by
what its own drafts gain. Answers are one token again and again; time and work are counted.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import numpy as np
import pytest

from quire.base.rare_records import Speculation
from quire.base.records import Request, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.scheduler.interfaces import DraftSource
from quire.speculative.control import AdaptiveControl, Control, FixedControl
from tests.unit.scheduler.test_draft_effort import (
    MAX_DRAFTS,
    TOKEN,
    Case,
    Eager,
    LateModel,
    Model,
    Repeats,
)

LENGTH = 4000
RIGHT = LENGTH * [TOKEN]
# It is aligned with the answer in every step, and what follows is never right.
USELESS = (LENGTH // 3) * [TOKEN, TOKEN, TOKEN + 2]
UNRELATED = list(range(20, 99))


class Beside(Case):
    """A further request, in the last slot, brings a prediction. uses_proposer: asks it as well."""

    counts, spare = False, 1

    def compute(self, plan: StepPlan) -> None:
        """See Case; only drafts that are the token are accepted."""
        drafts_ms = self.drafts_ms if plan.draft_ids.size else 0.0
        self.now_ms += self.step_ms + drafts_ms
        is_right = plan.draft_ids == TOKEN
        drafted = plan.draft_counts if plan.draft_ids.size else np.zeros_like(plan.counts)
        parts = np.split(is_right, np.cumsum(drafted)[:-1])
        nums = [int(np.cumprod(part).sum()) for part in parts]
        counts = np.minimum(plan.sample_counts, np.array(nums, np.int32) + np.int32(1))
        tokens = np.full(counts.sum(), TOKEN, np.int32)
        result = StepResult(step=plan.step, token_counts=counts, token_ids=tokens)
        self._counted(lambda: self.scheduler.update(plan, result, self.now_ms))
        self.num_drafts += plan.draft_ids.size
        self.num_tokens += int(counts.sum())

    def predict(
        self, prediction: list[int], *, uses_proposer: bool = True, name: str = "predicts"
    ) -> None:
        self.scheduler.add(
            Request(
                request_id=name,
                group_id=name,
                stream=0,
                prompt_ids=np.array([5, 6], np.int32),
                sampling=SamplingParams(seed=1),
                stop_ids=(),
                max_total_tokens=LENGTH,
                arrival_ms=0.0,
                speculation=Speculation(
                    max_drafts=MAX_DRAFTS,
                    uses_proposer=uses_proposer,
                    prediction_ids=np.array(prediction, np.int32),
                ),
            )
        )

    @property
    def source(self) -> Any:
        assert self.scheduler._drafts is not None
        source: DraftSource = self.scheduler._drafts._source
        return source


class TwoPlans(Beside):
    """Plans the next step while one is computed. rows: of each plan, by slot. num_alone: steps
    beside which none was planned."""

    limits: ClassVar = {"plans_in_flight": 2}

    def __init__(self, running: int, proposer: Repeats, control: Control | None = None) -> None:
        self._plans: deque[StepPlan] = deque()
        self.rows: list[list[int]] = []
        self.num_alone = 0
        super().__init__(running, proposer, control)

    def turn(self) -> None:
        while len(self._plans) < 2 and (plan := self.scheduler.schedule(self.now_ms)) is not None:
            self._plans.append(plan)
            self.rows.append(plan.slots.tolist())
        self.num_alone += len(self._plans) < 2
        self.compute(self._plans.popleft())


@pytest.mark.parametrize("prediction", [RIGHT, USELESS, UNRELATED])
def test_a_model_that_loses_time_is_limited_beside_a_prediction(prediction: list[int]) -> None:
    """A pass takes twice what its token saves, and is priced with a fifth of that."""
    model = LateModel(true_ms=2.0 * Case.step_ms, num_behind=0)
    case = Beside(8, model)
    case.predict(prediction)
    for _ in range(200):
        case.turn()
    began_ms, num_steps = model.drafting_ms, 500
    for _ in range(num_steps):
        case.turn()
    assert model.drafting_ms - began_ms <= 0.04 * num_steps * Case.step_ms
    assert "predicts" in case.scheduler._requests.sequences


@pytest.mark.parametrize("prediction", [RIGHT, USELESS])
def test_with_two_plans_no_request_waits_for_a_model_that_does_not_pay(
    prediction: list[int],
) -> None:
    case = TwoPlans(2, Model(pass_ms=50.0))
    case.drafts_ms = 0.5
    case.predict(prediction)
    for _ in range(100):
        case.turn()
    case.rows.clear()
    case.num_alone = 0
    for _ in range(400):
        case.turn()
    assert case.num_alone <= 0.1 * 400
    assert sum(row.count(0) for row in case.rows) >= 0.9 * len(case.rows)
    waits = sum(2 not in row for row in case.rows)
    if prediction is RIGHT:  # its drafts pay, so that it waits for each
        assert waits >= 0.3 * len(case.rows)
    else:
        assert waits <= 0.1 * len(case.rows)


class Wrong(Beside):
    """A step with drafts takes twice as long."""

    drafts_ms = 1.0


@pytest.mark.parametrize("num_beside", [1, 4])
def test_a_useless_prediction_has_few_drafts(num_beside: int) -> None:
    """Whatever the control makes of them: those that lose time end."""
    proposer = Repeats(finds=False)
    case = Wrong(num_beside, proposer, Eager(5, MAX_DRAFTS))
    case.predict(USELESS, uses_proposer=False)
    case.num_drafts = 0
    for _ in range(1000):
        case.turn()
    assert 0 < case.num_drafts <= 60 * MAX_DRAFTS


def test_drafts_of_a_proposer_that_gain_go_on_beside_a_useless_prediction() -> None:
    case = Beside(4, Repeats(finds=True), Eager(5, MAX_DRAFTS))
    case.drafts_ms = 0.2
    case.predict(USELESS, uses_proposer=False)
    for _ in range(100):
        case.turn()
    case.num_drafts = 0
    for _ in range(100):
        case.turn()
    assert case.num_drafts >= 0.9 * 100 * 4 * MAX_DRAFTS
    balance = case.source._predictions.balance
    assert not balance.allows_drafts or balance._steps < 12.0


class Counted(Beside):
    counts = True


@pytest.mark.parametrize(("prediction", "most"), [(USELESS, 16), (UNRELATED, 4)])
def test_a_useless_prediction_costs_the_host_little(prediction: list[int], most: int) -> None:
    plain = Counted(1, None)
    plain.predict([], uses_proposer=False)
    case = Counted(1, Repeats(finds=False), AdaptiveControl(2, MAX_DRAFTS))
    case.drafts_ms = 0.5
    case.predict(prediction)
    for one in (case, plain):
        one.calls_per_turn(200)
    assert case.calls_per_turn(500) <= plain.calls_per_turn(500) + most


@pytest.mark.parametrize("is_late", [False, True])
def test_a_prediction_that_comes_during_a_rest_is_tried_at_once(*, is_late: bool) -> None:
    """Also where its request first waits for a slot."""
    case = Beside(1, Repeats(finds=True), FixedControl(0))
    if is_late:
        case.add([4, TOKEN, TOKEN], max_total_tokens=LENGTH)
    for _ in range(400):  # rests are as long as they become
        case.turn()
    case.source._control._num_drafts = np.int32(MAX_DRAFTS)
    case.predict(RIGHT, uses_proposer=False)
    case.num_drafts = 0
    if is_late:
        case.turn()
        case.scheduler.abort("r2")
    for _ in range(8):
        case.turn()
    assert case.num_drafts >= MAX_DRAFTS
    assert case.source._control.rests.left


def test_while_all_rest_no_hook_of_a_step_is_called() -> None:
    case = Beside(1, Repeats(finds=False), FixedControl(0))
    case.predict(USELESS)
    num_resting = 0
    for number in range(400):
        case.turn()
        assert case.scheduler._drafts is not None
        num_resting += number >= 200 and case.scheduler._drafts.is_resting
    assert num_resting >= 140  # of 200


def alone(prediction: list[int], proposer: Repeats) -> Beside:
    """Return a case in which one request brings a prediction, and none asks the proposer."""
    case = Wrong(1, proposer)
    case.predict(prediction, uses_proposer=False)
    case.turn()
    case.scheduler.abort("r1")
    return case


def test_a_rest_of_predictions_keeps_no_request_from_the_proposer() -> None:
    proposer = Repeats(finds=True)
    case = alone(USELESS, proposer)
    balance = case.source._predictions.balance
    while balance.allows_drafts:
        balance.drafted(-64.0, 10.0)
    for _ in range(8):
        case.turn()
    assert case.scheduler._drafts is not None
    assert case.scheduler._drafts.is_resting
    assert not proposer.asked
    case.add([3, TOKEN, TOKEN], max_total_tokens=LENGTH)
    for _ in range(40):
        case.turn()
    assert proposer.asked


def test_nor_does_one_that_begins_while_such_a_request_waits_for_a_slot() -> None:
    proposer = Repeats(finds=True)
    case = alone(USELESS, proposer)
    case.predict(USELESS, uses_proposer=False, name="other")
    case.turn()
    case.add([3, TOKEN, TOKEN], max_total_tokens=LENGTH)
    balance = case.source._predictions.balance
    while balance.allows_drafts:
        balance.drafted(-64.0, 10.0)
    for _ in range(8):
        case.turn()
    assert not proposer.asked
    case.scheduler.abort("other")
    for _ in range(40):
        case.turn()
    assert proposer.asked


def test_a_preempted_request_with_a_prediction_is_waited_for() -> None:
    """No rest without hooks begins until it is back, and asks."""
    case = Beside(1, Repeats(finds=False), FixedControl(0))
    case.predict(USELESS)
    rows = case.scheduler._drafts
    assert rows is not None
    while not rows.is_resting:
        case.turn()
    assert not rows._may_predict
    ids = ["" if one is None else one.request.request_id for one in rows._sequences]
    slot = ids.index("predicts")
    sequence, rows._batch.sequences[slot] = rows._batch.sequences[slot], None
    rows._enter_slots()
    assert rows._may_predict
    rows._batch.sequences[slot] = sequence

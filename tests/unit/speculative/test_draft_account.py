"""Accounts of drafts: the proposer's and that of predictions, and how a step's gain is shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.scheduler.interfaces import DraftCost
from quire.speculative.control import AdaptiveControl, Control, FixedControl
from quire.speculative.draft_account import UNTIL_EARNED, PredictedShares
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.ngram import NgramProposer
from quire.speculative.rests import ASK_SHARE, NoRests
from tests.unit.speculative.test_drafter import (
    MAX_DRAFTS,
    NUM_SLOTS,
    Case,
    CountedModel,
    ScriptedProposer,
    ints,
    of_none,
    resting,
)

BOTH = np.array([0, 1])
LIMITS = ints(MAX_DRAFTS, MAX_DRAFTS)


def beside(
    proposer: object, control: Control | None = None, *, text: tuple[int, ...] = (1, 2, 3)
) -> Case:
    """Return a case of which slot 1 brings a prediction."""
    case = Case(proposer, control or AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, list(text), 3)
    case.begin(1, list(text), 3, prediction_ids=ints(30, 31, 32, 33))
    return case


def alone(text: tuple[int, ...] = (1, 2, 3)) -> Case:
    """Return a case of which slot 1 brings a prediction, and asks for nothing else."""
    case = Case(ScriptedProposer(), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    of_prediction = ints(30, 31, 32, 33)
    case.begin(1, list(text), 3, prediction_ids=of_prediction, uses_proposer=False)
    return case


def in_debt(balance: DraftBalance | None) -> DraftBalance:
    """Let drafts lose time until none are made."""
    assert balance is not None
    while balance.allows_drafts:
        balance.drafted(-8.0, 10.0)
    return balance


@pytest.mark.parametrize("proposer", [ScriptedProposer(), CountedModel()])
def test_while_a_proposer_is_in_debt_only_predictions_are_asked(proposer: ScriptedProposer) -> None:
    case = beside(proposer)
    in_debt(case.drafter._control.balance)
    assert not case.drafter.rest_steps
    assert case.drafter.would_propose(case.tokens, BOTH, LIMITS).tolist() == [False, True]
    assert not case.drafter.skips_step(case.tokens, of_none)
    assert case.propose(0, 1) == [[], [30]]
    assert not proposer.asked
    case.drafter.end(1)
    assert case.drafter.rest_steps == UNTIL_EARNED
    assert case.drafter.skips_step(case.tokens, of_none)


def test_while_predictions_are_in_debt_their_requests_ask_the_proposer() -> None:
    case = Case(NgramProposer(NUM_SLOTS), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(1, [1, 2, 5, 1, 2], 5, prediction_ids=ints(30, 31, 32))
    in_debt(case.drafter._predictions.balance)
    assert case.drafter.rest_steps == 0
    assert not case.drafter.skips_step(case.tokens, of_none)
    assert case.propose(1)[0][:1] == [5]
    assert case.drafter.from_prediction is not None
    assert not case.drafter.from_prediction.any()
    in_debt(case.drafter._control.balance)
    assert case.drafter.rest_steps == UNTIL_EARNED
    assert case.drafter.skips_step(case.tokens, of_none)
    assert not case.drafter.would_propose(case.tokens, BOTH[1:], LIMITS[1:]).any()


def test_a_prediction_that_is_always_wrong_is_asked_ever_more_seldom() -> None:
    """Its price is more than any draft gains. Steps are short, so that rests become long."""
    case = alone()
    dear = DraftCost(1.0, 1, 100.0 * np.arange(2), asked_ms=100.0 * ASK_SHARE)
    asked = []
    for number in range(400):
        if case.drafter.skips_step(case.tokens, of_none):
            continue
        asked.append(number)
        counts, _ = case.drafter.propose(case.tokens, BOTH[1:], LIMITS[1:], lambda: dear)
        assert not counts.any()
    assert 5 <= len(asked) <= 60
    assert len([number for number in asked if number >= 200]) <= len(asked) // 2 + 1


def test_a_prediction_that_matches_nowhere_is_looked_up_ever_more_seldom() -> None:
    case = alone((1, 2, 3, 4, 5, 6))
    calls: list[int] = []
    may_find = case.prediction.may_find
    case.prediction.may_find = lambda tokens: (  # type: ignore[method-assign]
        calls.append(1) or may_find(tokens)
    )
    case.drafter._choice.step_ms = 0.2
    assert all(case.drafter.skips_step(case.tokens, of_none) for _ in range(640))
    assert len(calls) <= 60


def test_a_request_with_another_prediction_is_a_reason_to_look() -> None:
    case = alone((1, 2, 3, 4, 5, 6))
    case.drafter._choice.step_ms = 0.2
    for _ in range(200):
        case.drafter.skips_step(case.tokens, of_none)
    case.drafter.end(1)
    case.begin(1, [1, 2, 3], 3, prediction_ids=ints(30, 31), uses_proposer=False)
    assert not case.drafter.skips_step(case.tokens, of_none)
    assert case.propose(1) == [[30]]


def test_a_long_match_with_the_prediction_ends_its_rest() -> None:
    case = alone()
    rests = case.drafter._predictions.rests
    for _ in range(8):
        rests.note_choice(pays=False, step_ms=0.1, asked_ms=1.0)
    left = rests.left
    for position, token in enumerate((30, 31), start=3):
        case.tokens.put(BOTH[1:], ints(position), ints(token))
    rests.until_look = 0
    assert not case.drafter.skips_step(case.tokens, lambda: BOTH[1:])
    assert left > 1
    assert rests.left == 0


def test_the_gain_of_a_step_is_shared_by_accepted_drafts_and_its_time_by_drafts() -> None:
    """Of a step that takes 2 ms longer for 8 drafts, of which 3 save 1 ms each."""
    shares = PredictedShares.of(np.array([False, True]), ints(2, 6), ints(2, 1))
    assert shares is not None
    assert shares.gained_ms(1.0, 2.0) == pytest.approx(1.0 - 6 * 0.25)
    assert PredictedShares.of(np.array([False, False]), ints(2, 6), ints(2, 1)) is None
    none = PredictedShares.of(np.array([True, False]), ints(2, 6), ints(0, 0))
    assert none is not None
    assert none.gained_ms(-2.0, 2.0) == pytest.approx(-0.5)


def test_each_account_has_its_own_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[str, float]] = []
    case = beside(ScriptedProposer())
    case.drafter._control.probes = False
    own, predictions = case.drafter._control.balance, case.drafter._predictions.balance
    names = {id(own): "own", id(predictions): "predictions"}
    monkeypatch.setattr(
        DraftBalance,
        "drafted",
        lambda self, gained_ms, *_: noted.append((names[id(self)], round(gained_ms, 6))),
    )
    case.drafter._note_predicted(BOTH, np.array([False, True]))
    case.drafter.verified(BOTH, ints(1, 3), ints(1, 0))
    case.drafter.note_step(10.0, 1.0, 0.0, added_ms=2.0)
    assert noted == [("predictions", -1.5), ("own", 2.5)]
    noted.clear()
    case.drafter.verified(BOTH[1:], ints(3), ints(2))
    case.drafter.note_step(10.0, 1.0, 0.0, added_ms=2.0)
    assert noted == [("predictions", 1.0)]
    noted.clear()
    case.drafter.verified(BOTH[:1], ints(2), ints(2))
    case.drafter.note_step(10.0, 1.0, 0.0, added_ms=2.0)
    assert noted == [("own", 1.0)]


class Tries(AdaptiveControl):
    """Takes all drafts, as a trial where it `tries`."""

    tries = False

    def limits(self, slots: Any, limits: Any, cost: Any, kinds: Any = None) -> Any:
        self.probes = self.tries
        return limits


def test_a_trial_is_no_loss_though_drafts_of_the_next_plan_were_chosen_since() -> None:
    case = beside(ScriptedProposer(), control := Tries(NUM_SLOTS, MAX_DRAFTS))
    own, predictions = control.balance, case.drafter._predictions.balance
    assert own is not None
    assert predictions is not None
    for tries, slot, balance, other in ((True, 0, own, predictions), (False, 1, predictions, own)):
        before = balance._steps, other._steps
        control.tries = tries
        assert case.propose(slot)[0]
        control.tries = not tries
        assert case.propose(1 - slot)[0]
        case.drafter.verified(BOTH[slot : slot + 1], ints(1), ints(0))
        case.drafter.note_step(10.0, -5.0, 0.0, added_ms=5.0)
        assert balance._steps == before[0] - 0.5 * (not tries)
        assert other._steps == before[1]


def test_drafts_of_which_no_request_is_left_are_verified() -> None:
    case = beside(ScriptedProposer(), Tries(NUM_SLOTS, MAX_DRAFTS))
    case.propose(0, 1)
    case.drafter.verified(BOTH[:0], ints(), ints())
    assert not case.drafter.num_errors


def test_steps_without_drafts_earn_trials_of_predictions_too() -> None:
    case = beside(ScriptedProposer())
    balance = in_debt(case.drafter._predictions.balance)
    case.drafter.note_step(10.0, None, 0.0)
    assert case.drafter.notes_plain_steps
    for _ in range(2000):
        case.drafter.note_step(10.0, None, 0.0)
    assert balance.allows_drafts
    assert not case.drafter.notes_plain_steps


def test_where_no_drafts_rest_predictions_do_not_either() -> None:
    case = Case(ScriptedProposer(), FixedControl(MAX_DRAFTS, NoRests()))
    assert isinstance(case.drafter._predictions.rests, NoRests)
    assert case.drafter._predictions.balance is None


def test_steps_without_drafts_earn_the_time_for_a_text_that_cannot_be_afforded() -> None:
    """They are noted from the step on in which it was too long, and no more once it is earned."""
    case = Case(model := CountedModel(), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    assert case.propose(0) == [[7]]
    case.drafter.note_step(10.0, 1.0, 1.0)
    assert not case.drafter.notes_plain_steps
    model._behind_ms = 180.0
    assert case.propose(0) == [[]]
    assert case.drafter.rest_steps == UNTIL_EARNED
    num_noted = 0
    while case.drafter.notes_plain_steps:
        case.drafter.note_step(10.0, None, 0.0)
        num_noted += 1
    assert num_noted > 100
    assert case.propose(0) == [[7]]
    case.drafter.note_step(10.0, 30.0, 1.0)
    assert not case.drafter.notes_plain_steps


def test_a_model_that_can_compute_nothing_is_asked_again_soon_but_once() -> None:
    """Heads may lack hidden states after a rest, which the next step leaves behind."""
    case = Case(model := CountedModel(), FixedControl(0))
    case.begin(0, [1, 2, 3], 3)
    rests = case.drafter._control.rests

    def lengths() -> list[int]:
        found = []
        for _ in range(5):
            rests.left = 0
            assert case.propose(0) == [[]]
            found.append(rests.left)
        return found

    assert lengths() == [1, 2, 4, 8, 10]
    model.possible = lambda tokens, slots, limits: 0 * limits  # type: ignore[method-assign]
    assert lengths() == [0, 10, 0, 10, 0]
    rests.note_choice(pays=True, step_ms=10.0, asked_ms=0.0)
    assert not rests.has_missed


@pytest.mark.parametrize(("timed_ms", "longest"), [(0.0, 0), (20.0, 4), (0.5, 160)])
def test_where_nothing_could_ever_be_computed_rests_are_as_long_as_steps_say(
    timed_ms: float, longest: int
) -> None:
    """All requests may be longer than a draft model's context, so that the control is not asked."""
    case = Case(model := CountedModel(), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    model.possible = lambda tokens, slots, limits: 0 * limits  # type: ignore[method-assign]
    case.begin(0, [1, 2, 3], 3)
    case.drafter.plain_ms = timed_ms
    rests = case.drafter._control.rests
    found = []
    for _ in range(40):
        rests.left = 0
        assert case.propose(0) == [[]]
        found.append(rests.left)
    assert max(found) == longest


class TriesOne(FixedControl):
    """Takes all drafts, of which those of slot `tried_slot` are to learn."""

    def __init__(self, tried_slot: int) -> None:
        super().__init__(MAX_DRAFTS)
        self.tried_slot = tried_slot


@pytest.mark.parametrize("tried", [-1, 0, 1])
def test_drafts_that_are_tried_beside_others_are_none_that_pay(tried: int) -> None:
    text = (1, 2, 5, 6, 7, 1, 2)
    case = beside(NgramProposer(NUM_SLOTS), TriesOne(tried), text=text)
    case.tokens.admit(1, ints(1, 2, 3, 30, 31), 3)
    assert case.propose(0, 1) == [[5, 6, 7], [32, 33]]
    accounts = (case.drafter._own, case.drafter._predictions)
    assert [one.rests.last > 0 for one in accounts] == [tried == 0, tried == 1]


@pytest.mark.parametrize(("tried", "shorter"), [(-1, True), (0, True), (1, False)])
def test_a_draft_that_is_tried_beside_those_of_a_long_match_shortens_no_rest(
    tried: int, *, shorter: bool
) -> None:
    """Only drafts of a long match pay then, which ends a rest anyway."""
    case = Case(NgramProposer(NUM_SLOTS), TriesOne(tried))
    case.begin(0, [*range(1, 13), 5, *range(1, 13)], 3)
    case.begin(1, [1, 2, 5, 6, 7, 1, 2], 3)
    rests = case.drafter._control.rests
    rests._kept = 16
    assert case.propose(0, 1) == [[5, 1, 2], [5, 6, 7]]
    assert (rests._kept < 16) == shorter


def test_a_trial_is_none_of_the_drafts_in_flight_without_predictions_either() -> None:
    """While a plan is computed, the control chooses for the next one."""
    case = Case(ScriptedProposer(), control := Tries(NUM_SLOTS, MAX_DRAFTS))
    for slot in range(2):
        case.begin(slot, [1, 2, 3], 3)
    assert control.balance is not None
    for tries in (False, True):
        before = control.balance._steps
        for slot, control.tries in ((0, tries), (1, not tries)):
            assert case.propose(slot)[0]
        case.drafter.verified(BOTH[:1], ints(1), ints(0))
        case.drafter.note_step(10.0, -5.0, 0.0)
        assert control.balance._steps == before - 0.5 * (not tries)
    case.drafter.verified(BOTH[1:], ints(1), ints(0))
    assert not case.drafter._has_trials


def test_steps_that_pass_unasked_shorten_a_rest_as_others_do() -> None:
    single, at_once = resting(), resting()
    for num_steps in (1, 2):
        for _ in range(num_steps):
            assert single.drafter.skips_step(single.tokens, of_none)
        at_once.drafter.rested(num_steps)
        one, other = single.drafter._control.rests, at_once.drafter._control.rests
        assert (one.left, one.until_look) == (other.left, other.until_look)
        assert one.until_look > 0
    at_once.drafter.rested(1000)
    assert at_once.drafter.rest_steps == 0


def test_beside_many_requests_a_few_new_ones_are_no_reason_to_try() -> None:
    case = Case(ScriptedProposer(), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    balance = in_debt(case.drafter._control.balance)
    balance.drafted(-20.0, 10.0)
    found = [balance.steps_to_earn]
    for _ in range(7):  # beside two others
        case.drafter.note_arrivals(1, 3)
        found.append(balance.steps_to_earn)
        if len(found) == 4:
            balance._until_change = 0
            balance.drafted(-20.0, 10.0)
            found.append(balance.steps_to_earn)
    first, *one, third, again, fourth, fifth, sixth, seventh = found
    assert one == [first, first]  # so few are no reason
    assert third < first
    assert again == fourth == fifth > sixth == seventh

"""How long a proposer can pause that takes part in steps without being asked."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.scheduler.speculation.plain_steps import PlainSteps
from quire.speculative.control import Control, FixedControl
from quire.speculative.draft_balance import MAX_STEPS
from quire.speculative.draft_heads import HeadProposer
from quire.speculative.eagle import EagleProposer
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.medusa import MedusaProposer
from quire.speculative.proposer import PausingProposer
from quire.speculative.rests import NoRests
from tests.unit.scheduler.test_draft_effort import MAX_DRAFTS, Case, InDebt, Int32s, Model

NUM_TURNS = 3000


class Pausing(Model, PausingProposer):
    """A model of which no draft pays. rests: steps that were computed until a rest was noted, and
    its steps; asks: steps until it was asked. ends, asked: the last steps of rests, and those in
    which it was asked, as plans count them."""

    may_begin_late = True

    def __init__(self) -> None:
        super().__init__(pass_ms=50.0)
        self.case: Case | None = None
        self.rests: list[tuple[int, int]] = []
        self.asks: list[int] = []
        self.ends: list[int] = []
        self.asked: list[int] = []

    def note_rest(self, step: int, num_steps: int) -> None:
        self.rests.append((self.num_turns, num_steps))
        self.ends.append(step + num_steps)

    def possible(self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s) -> Int32s:
        self.asks.append(self.num_turns)
        if self.case is not None:
            self.asked.append(self.case.scheduler._requests.in_flight.step + 1)
        return limits

    @property
    def num_turns(self) -> int:
        return 0 if self.case is None else self.case.num_rows // 2


def run(proposer: Pausing, control: Control | None = None) -> Case:
    """Return a case of two long requests after many steps."""
    case = Case(2, proposer, control, step_ms=0.2)
    case.counts, case.num_rows = False, 0
    proposer.case = case
    proposer.rests.clear()
    proposer.ends.clear()
    proposer.asks.clear()
    proposer.asked.clear()
    for _ in range(NUM_TURNS):
        case.turn()
    return case


def test_the_rest_that_was_noted_last_ends_when_drafts_are_asked_for() -> None:
    proposer = Pausing()
    run(proposer)
    assert 2 <= len(proposer.asks) <= NUM_TURNS // 64
    for asked in proposer.asks:
        before = [(turn, num) for turn, num in proposer.rests if turn <= asked]
        assert not before or before[-1][1] == 0
    long = [(turn, num) for turn, num in proposer.rests if num > 100]
    assert long
    for turn, num_steps in long:
        after = [asked for asked in proposer.asks if asked > turn]
        assert not after or abs(after[0] - (turn + num_steps)) <= 2


def test_rests_are_said_to_end_in_the_step_before_the_next_ask() -> None:
    proposer = Pausing()
    run(proposer)
    asks = list(zip(proposer.asks, proposer.asked, strict=True))
    num_long = 0
    for (turn, num_steps), end in zip(proposer.rests, proposer.ends, strict=True):
        after = [step for asked, step in asks if asked > turn]
        if num_steps > 100 and after:
            num_long += 1
            assert abs(after[0] - end) <= 2
    assert num_long


def test_a_rest_in_debt_is_about_as_long_as_was_said() -> None:
    proposer = Pausing()
    case = InDebt(2, proposer, step_ms=0.2)
    case.counts = False
    for _ in range(64):
        case.turn()
    balance = case.lose()
    balance._steps = -MAX_STEPS / 2
    case.num_rows = 0
    proposer.case = case
    proposer.rests.clear()
    num_steps = 0
    while not balance.allows_drafts:
        case.turn()
        num_steps += 1
    assert num_steps >= 1000
    early = [turn + num for turn, num in proposer.rests if turn < 100]
    assert early
    assert all(abs(end - num_steps) <= 64 for end in early)


def test_a_request_that_begins_alone_ends_a_pause_before_its_prompt() -> None:
    proposer = Pausing()
    case = run(proposer)
    while case.scheduler._drafts is None or not case.scheduler._drafts.is_resting:
        case.turn()
    for number in (1, 2):
        case.scheduler.abort(f"r{number}")
    proposer.rests.clear()
    case.add([1, 7, 7], max_total_tokens=400)
    assert [num for _, num in proposer.rests] == [0]


def test_a_request_that_begins_beside_paused_ones_begins_alone() -> None:
    proposer = Pausing()
    case = run(proposer)
    while case.scheduler._drafts is None or not case.scheduler._drafts.is_resting:
        case.turn()
    for number in (1, 2):
        case.scheduler.hold(f"r{number}", is_held=True)
    assert case.scheduler.schedule(case.now_ms) is None
    proposer.rests.clear()
    case.add([1, 7, 7], max_total_tokens=400)
    assert [num for _, num in proposer.rests] == [0]


def test_a_request_has_no_drafts_in_the_step_that_admits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though all but its last token is cached: for the runner, its slot is still the last one's, of
    which hidden states are there."""
    monkeypatch.setattr(PlainSteps, "begin_if_due", lambda *_, **__: False)
    proposer = Pausing()
    case = Case(1, proposer, FixedControl(MAX_DRAFTS, NoRests()))
    case.counts = False
    for _ in range(2):
        case.scheduler.abort(f"r{case.num_added}")
        case.add([*range(20, 20 + 2 * 16 + 1)], max_total_tokens=60)
        proposer.asks.clear()
        plan = case.scheduler.schedule(case.now_ms)
        assert plan is not None
        assert len(plan.admissions) == 1
        assert not proposer.asks
        case.compute(plan)
        case.turn()
        assert proposer.asks
    assert plan.counts.tolist() == [1]


class Failing(Pausing):
    def note_rest(self, step: int, num_steps: int) -> None:
        raise ValueError("cannot pause")


def test_one_that_cannot_pause_costs_its_requests_their_drafts_and_no_step() -> None:
    case = run(Failing())
    stats = case.scheduler.stats()
    assert stats.draft_proposer_errors_total == 2
    assert stats.draft_errors_total == 0
    assert len(case.scheduler.schedule(case.now_ms).slots) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [EagleProposer, MedusaProposer])
def test_heads_need_hidden_states_some_steps_before_the_end_of_a_rest(
    kind: type[HeadProposer],
) -> None:
    ring = HiddenStateRing(8, 2, 2)
    heads = object.__new__(kind)
    heads._ring = ring
    heads.note_rest(2, 1000)
    num_paused, step = 0, 3
    while not ring.keeps(step + num_paused, is_decode=True):
        num_paused += 1
    assert num_paused == 1000 - kind.kept_steps
    heads.note_rest(1001, 1000)
    heads.note_rest(1001, 0)
    assert ring.keeps(1002, is_decode=True)
    heads.note_rest(1002, kind.kept_steps)
    assert ring.keeps(1003, is_decode=True)

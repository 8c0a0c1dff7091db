"""Long matches that are looked for while drafts rest: for which requests, and the host's work.

What is looked at is compared with the rows of the step's plan, work is counted in calls.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.records import StepPlan
from quire.base.token_table import TokenTable
from quire.speculative.control import AdaptiveControl, FixedControl
from quire.speculative.proposer import LONG_MATCH, Drafts
from quire.speculative.rests import LOOK_MS
from tests.unit.scheduler.test_draft_effort import MAX_DRAFTS, Case, Repeats


class Looks(Repeats):
    """Notes of which slots it is asked for long matches, and the lengths of all; finds one, but
    for none of these."""

    knows_matches = True

    def __init__(self) -> None:
        super().__init__(finds=True)
        self.looked: list[list[int]] = []

    def finds_long(self, tokens: TokenTable, slots: NDArray[np.intp] | None) -> bool:
        if slots is not None:
            self.looked.append(sorted(slots.tolist()))
        return slots is None


class LooksInVain(Looks):
    """Finds no long match in any slot."""

    num_looks = 0

    def finds_long(self, tokens: TokenTable, slots: NDArray[np.intp] | None) -> bool:
        assert slots is None, "which slots can have drafts is of no interest"
        self.num_looks += 1
        return False


class Matches(Repeats):
    """Finds drafts in every step. are_long: they follow long matches."""

    knows_matches, are_long = True, False

    def finds_long(self, tokens: TokenTable, slots: NDArray[np.intp] | None) -> bool:
        return self.are_long and (slots is None or len(slots) > 0)

    def propose(
        self, tokens: TokenTable, slots: NDArray[np.intp], limits: NDArray[np.int32], drafts: Drafts
    ) -> None:
        super().propose(tokens, slots, limits, drafts)
        drafts.matches[:] = LONG_MATCH if self.are_long else 1


class TwoPlans(Case):
    """Plans the next step while one is computed. drafts_ms: of each step with drafts."""

    counts, drafts_ms = False, 0.3
    limits: ClassVar = {"plans_in_flight": 2}

    def __init__(self, running: int, proposer: Repeats) -> None:
        self._plans: deque[StepPlan] = deque()
        super().__init__(running, proposer, AdaptiveControl(running, MAX_DRAFTS))

    @property
    def rest_left(self) -> int:
        return self.scheduler._drafts._source._control.rests.left  # type: ignore[no-any-return]

    def turn(self) -> None:
        while len(self._plans) < 2 and (plan := self.scheduler.schedule(self.now_ms)) is not None:
            self._plans.append(plan)
        self.compute(self._plans.popleft())


class ShortSteps(Case):
    """Prompts get a few tokens a step beside requests that generate. last: the last plan."""

    counts, spare = False, 3
    limits: ClassVar = {"tpot_target_ms": 0.01}
    last: StepPlan

    def _counted(self, call: Any) -> Any:
        found = super()._counted(call)
        if isinstance(found, StepPlan):
            self.last = found
        return found

    def able(self, limits: dict[int, int]) -> tuple[list[int], list[int], list[int]]:
        """Return which slots could have drafts in the last plan, which had a prompt, and which had
        the last token before their limit."""
        plan, able, prompts, last = self.last, [], [], []
        rows = (plan.slots, plan.starts, plan.counts, plan.sample_counts)
        for slot, start, count, num_sampled in zip(*(row.tolist() for row in rows), strict=True):
            if count > 1 or not num_sampled:
                prompts.append(slot)
            elif start + count + 1 >= limits[slot]:
                last.append(slot)
            else:
                able.append(slot)
        return sorted(able), prompts, last


def test_long_matches_are_looked_for_where_drafts_could_follow_them() -> None:
    proposer = Looks()
    case = ShortSteps(2, proposer, FixedControl(0), step_ms=4.0)
    for _ in range(100):  # rests are as long as they become
        case.turn()
    num_looks = num_prompts = num_last = 0
    for number in range(600):
        if not number % 10:  # most end soon, beside prompts that take some steps
            length = 300 if not number % 40 else 12
            case.add([20 + number % 70] * length, max_total_tokens=length + 5 + number % 7)
        limits = {one.slot: one.limit for one in case.scheduler._requests.sequences.values()}
        proposer.looked.clear()
        case.turn()
        if not proposer.looked:
            continue
        [looked] = proposer.looked
        limits |= {one.slot: one.limit for one in case.scheduler._requests.sequences.values()}
        able, prompts, last = case.able(limits)
        assert looked == able
        num_looks, num_prompts = num_looks + 1, num_prompts + len(prompts)
        num_last += len(last)
    assert min(num_looks, num_prompts, num_last) >= 5


@pytest.mark.parametrize("running", [1, 4])
def test_a_long_match_ends_a_rest_where_plans_overlap(running: int) -> None:
    """The row it is found for waits for its last token, so that the step's plan has none."""
    proposer = Matches(finds=True)
    case = TwoPlans(running, proposer)
    case.accepts = False
    for _ in range(1000):
        if case.rest_left >= 60:
            break
        case.turn()
    assert case.rest_left >= 60
    case.accepts = proposer.are_long = True
    case.num_drafts = 0
    for _ in range(int(LOOK_MS / case.step_ms) + 4):
        case.turn()
    assert case.num_drafts >= running * MAX_DRAFTS
    for _ in range(20):  # nor does the rest begin again
        case.num_drafts = 0
        case.turn()
        case.turn()
        assert case.num_drafts


@pytest.mark.parametrize(("step_ms", "steps_per_look", "calls"), [(1.0, 16, 5.0), (3.0, 5, 12.5)])
def test_looking_for_long_matches_in_vain_costs_little(
    step_ms: float, steps_per_look: int, calls: float
) -> None:
    plain, proposer = Case(16, None).calls_per_turn(512), LooksInVain()
    case = Case(16, proposer, FixedControl(0), step_ms=step_ms)
    case.calls_per_turn(300)  # rests are as long as they become
    proposer.num_looks = 0
    assert case.calls_per_turn(512) <= plain + calls
    assert 512 / (2 * steps_per_look) <= proposer.num_looks <= 512 / steps_per_look

"""The control: as many drafts as pay, by counts and predicted costs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.speculative.control import (
    FIRST_PROBE_STEPS,
    INFORMED_TRIALS,
    MAX_FAILURES,
    PROBE_SHARE,
    AdaptiveControl,
    Passes,
    StepCost,
    best_lengths,
)
from quire.speculative.pass_times import PassTimes
from quire.speculative.plain_counts import (
    FADE,
    LONG_MATCHES,
    NUM_KINDS,
    OF_TEXT,
    PREDICTED,
    Trials,
    upper_bounds,
)

MAX_DRAFTS = 4
SLOT = np.array([1])


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def cost(share: float, num_rows: int = 1) -> StepCost:
    """Return the cost of a step in which a draft adds this share of the step's time per row."""
    return StepCost(10.0 * num_rows, num_rows, np.full(num_rows, 10.0 * share))


def chosen(control: AdaptiveControl, share: float) -> int:
    return int(control.limits(SLOT, ints(MAX_DRAFTS), cost(share))[0])


def verify(control: AdaptiveControl, accepted: int, times: int, drafted: int = MAX_DRAFTS) -> None:
    for _ in range(times):
        control.verified(SLOT, ints(drafted), ints(accepted))


def test_drafts_that_are_accepted_are_made_and_others_not() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    lengths = []
    for _ in range(3):  # nothing is known: try, one position after the other
        lengths.append(chosen(control, 0.2))
        verify(control, lengths[-1], 1, lengths[-1])
    assert lengths == [1, 3, MAX_DRAFTS]
    verify(control, MAX_DRAFTS, 20)
    assert chosen(control, 0.5) == MAX_DRAFTS
    verify(control, 1, 40)
    assert chosen(control, 0.3) == 1
    verify(control, 0, 40)
    assert chosen(control, 0.3) == 0


def test_a_collapse_of_acceptance_is_noticed_within_a_few_steps() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    verify(control, MAX_DRAFTS, 200)
    drafted = []
    for _ in range(30):
        drafted.append(chosen(control, 0.2))
        if drafted[-1]:
            verify(control, 0, 1, drafted[-1])
    assert drafted[0] == MAX_DRAFTS
    assert drafted[-1] == 0
    assert sum(drafted) <= 60


def test_a_collapse_shortens_drafts_though_further_ones_are_not_tried_any_more() -> None:
    """A draft takes a tenth of a step, so that the first one pays for long."""
    control = AdaptiveControl(1, 8)
    slot, limits = np.zeros(1, np.intp), ints(8)
    for _ in range(64):
        control.verified(slot, limits, limits)
    drafted = []
    for _ in range(40):
        drafted.append(int(control.limits(slot, limits, cost(0.1))[0]))
        if drafted[-1]:
            control.verified(slot, ints(drafted[-1]), ints(0))
    assert drafted[0] == 8
    assert sum(drafted[8:]) <= 2 * 32
    control.verified(slot, ints(1), ints(1))
    for _ in range(4):
        control.verified(slot, limits, limits)
    assert int(control.limits(slot, limits, cost(0.1))[0]) == 8  # it is over


def test_rejected_drafts_are_tried_again_seldom() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    verify(control, 0, 60)
    num_drafts = 0
    for _ in range(1000):
        num = chosen(control, 0.1)
        num_drafts += num
        if num:
            verify(control, 0, 1, num)
    assert num_drafts >= 1
    assert 0.1 * num_drafts / 1000 <= 0.02  # of the time of the steps


def test_a_new_request_begins_with_the_experience_of_all() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    verify(control, 0, 200)
    control.begin(1, predicts=True)
    assert chosen(control, 0.5) == 0
    predicted = np.array([PREDICTED])  # of which nothing is known
    assert control.limits(SLOT, ints(MAX_DRAFTS), cost(0.5), predicted).tolist() == [1]


def test_where_requests_differ_each_is_tried_and_where_they_are_alike_few_are() -> None:
    """Of 24 requests half of the drafts are right: those of every second request, or every second
    draft of all."""
    lengths = {}
    for kind in ("differ", "alike"):
        control, tried = AdaptiveControl(2, MAX_DRAFTS), 0
        for number in range(24):
            control.begin(1, predicts=False)
            for at in range(12):
                verify(control, (number if kind == "differ" else at) % 2, 1, 1)
        control.begin(1, predicts=False)
        for _ in range(20):
            num = chosen(control, 0.55)  # half of them are not worth it
            tried += num > 0
            if num:
                verify(control, 0, 1, 1)
        lengths[kind] = tried
    assert 1 <= lengths["differ"] <= 8
    assert lengths["alike"] == 0


def test_without_a_cost_the_last_one_counts() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    assert control.limits(SLOT, ints(3), None).tolist() == [3]
    verify(control, 0, 60)
    chosen(control, 0.5)
    assert control.limits(SLOT, ints(3), None).tolist() == [0]


@pytest.mark.parametrize(
    ("chances", "limits", "share", "lengths"),
    [
        ([[0.9, 0.8, 0.7]], [3], 0.1, [3]),
        ([[0.9, 0.8, 0.7]], [2], 0.1, [2]),
        ([[0.9, 0.8, 0.7]], [3], 2.0, [0]),
        ([[0.9, 0.3, 0.1]], [3], 0.5, [1]),
        ([[0.9, 0.8, 0.7], [0.1, 0.0, 0.0]], [3, 3], 0.3, [3, 0]),
        ([[0.5, 0.4, 0.1]], [0], 0.1, [0]),
    ],
)
def test_drafts_are_added_while_each_raises_the_rate(
    chances: list[list[float]], limits: list[int], share: float, lengths: list[int]
) -> None:
    found, _ = best_lengths(np.array(chances), ints(*limits), cost(share, len(limits)))
    assert found.tolist() == lengths


def test_the_best_lengths_yield_most_tokens_per_time() -> None:
    """Against all lengths of two requests, without the margin and the share that is unsure."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        chances = np.cumprod(rng.uniform(0.2, 1.0, (2, 3)), axis=1)
        price = StepCost(10.0, 2, rng.uniform(0.5, 8.0, 2))

        def rate(lengths: tuple[int, int], chances=chances, price=price) -> float:
            tokens = sum(chances[row, :num].sum() for row, num in enumerate(lengths))
            extra_ms = sum(num * price.draft_ms[row] for row, num in enumerate(lengths))
            return (price.step_tokens + tokens) / (price.step_ms + extra_ms)

        best = max(rate((one, two)) for one in range(4) for two in range(4))
        found, _ = best_lengths(chances, ints(3, 3), price)
        assert rate((int(found[0]), int(found[1]))) >= 0.955 * best


@pytest.mark.parametrize(
    ("once", "row", "lengths"),
    [
        (0.0, 0.0, [3, 2]),
        (0.3, 0.0, [3, 3]),  # at the lower rate more are worth it
        (0.0, 1.0, [3, 0]),  # a row must gain what it costs by itself
        (4.0, 0.0, [0, 0]),  # and all of them what the step costs
        (0.0, 9.0, [0, 0]),
    ],
)
def test_what_drafts_cost_whatever_their_number_must_be_gained(
    once: float, row: float, lengths: list[int]
) -> None:
    """In times of a plain step of two rows."""
    chances = np.array([[0.95, 0.9, 0.85], [0.4, 0.3, 0.2]])
    price = StepCost(10.0, 2, np.full(2, 0.5), once_ms=10.0 * once, row_ms=10.0 * row / 2)
    assert best_lengths(chances, ints(3, 3), price)[0].tolist() == lengths


def test_no_drafts_where_the_host_takes_as_long_as_they_save() -> None:
    """A step of 0.4 ms, drafts that are right as often as not, and a host that takes 0.3 ms."""
    chances = np.cumprod(np.full((1, 4), 0.5), axis=1)
    cheap = StepCost(0.4, 1, np.full(1, 0.03))
    assert best_lengths(chances, ints(4), cheap)[0].tolist() == [3]
    assert best_lengths(chances, ints(4), cheap._replace(once_ms=0.3))[0].tolist() == [0]
    slow = StepCost(20.0, 1, np.full(1, 1.5), once_ms=0.3)  # the same host with a larger model
    assert best_lengths(chances, ints(4), slow)[0].tolist() == [3]


def test_bounds_are_above_the_mean_and_tighten() -> None:
    prior = (np.array([0.5]), 2.0, 1.0)
    few = upper_bounds(Trials(np.array([[4.0]]), np.array([[2.0]])), *prior)
    many = upper_bounds(Trials(np.array([[64.0]]), np.array([[32.0]])), *prior)
    assert 0.5 < many[0, 0] < few[0, 0] < 1.0


def test_passes_of_a_draft_model_are_paid_by_the_requests_that_share_them() -> None:
    both, one = np.array([True, True]), np.array([True, False])
    chances = np.array([[0.9, 0.8, 0.7], [0.9, 0.1, 0.1]])

    def lengths(pass_ms: list[float], rows: NDArray[np.bool_]) -> list[int]:
        price = StepCost(10.0, 2, np.full(2, 0.5), Passes(np.array(pass_ms), rows))
        return best_lengths(chances, ints(3, 3), price)[0].tolist()

    assert lengths([0.0, 0.0, 0.0], both) == [3, 1]
    # A pass costs as much for one request as for two: worth it only where both take part.
    assert lengths([0.0, 5.0, 5.0], both) == [1, 1]
    assert lengths([0.0, 1.0, 1.0], both) == [3, 1]
    # Drafts that are found without a pass are not charged for one.
    assert lengths([0.0, 50.0], one) == [0, 1]


def test_times_of_passes_fade_to_the_best_and_outliers_count_little() -> None:
    times = PassTimes(16)
    assert times.table(3).tolist() == [0, 0, 0, 0]
    times.note(1, 4.0)
    times.note(1, 1000.0)
    assert times.table(2)[1] == pytest.approx(4.5, rel=0.01)
    times.note(16, 20.0)
    assert 4.4 < times.table(16)[4] < times.table(16)[16] == 20.0
    for _ in range(5000):
        times.table(1)
    assert times.table(1)[1] == pytest.approx(4.0, rel=0.01)
    times.note(16, 10.0)
    times.settle()
    assert times.table(16)[16] == 10.0


def test_where_a_single_draft_never_pays_longer_ones_are_tried() -> None:
    """A step with drafts takes the host as long as 1.5 steps, and each draft a tenth of one."""
    added_ms = np.array([0.0, *(1.5 + 0.1 * num for num in range(MAX_DRAFTS))])
    dear = StepCost(1.0, 1, np.zeros(1), added_ms=added_ms)
    control = AdaptiveControl(1, MAX_DRAFTS)
    control.begin(0, predicts=False)
    first = control.limits(np.zeros(1, np.intp), ints(MAX_DRAFTS), dear)
    assert control.probes
    assert first.tolist() == [MAX_DRAFTS]
    lengths = [
        int(control.limits(np.zeros(1, np.intp), ints(MAX_DRAFTS), dear)[0]) for _ in range(2000)
    ]
    tried_steps = sum(1.5 + 0.1 * (length - 1) for length in lengths if length)
    assert 0.0 < tried_steps <= FIRST_PROBE_STEPS + 2000 * PROBE_SHARE


@pytest.mark.parametrize("right", range(NUM_KINDS))
def test_the_kinds_of_drafts_of_a_request_are_counted_apart(right: int) -> None:
    """Those of one kind are right."""
    control, kinds = AdaptiveControl(2, MAX_DRAFTS), np.arange(NUM_KINDS)[:, None]
    control.begin(1, predicts=True)
    for _ in range(30):
        for kind in kinds:
            drafted = control.limits(SLOT, ints(MAX_DRAFTS), cost(0.3), kind)
            accepted = MAX_DRAFTS * (kind[0] == right)
            control.verified(SLOT, drafted, np.minimum(drafted, np.int32(accepted)))
    found = [control.limits(SLOT, ints(MAX_DRAFTS), cost(0.3), kind)[0] for kind in kinds]
    assert found == [MAX_DRAFTS * (kind == right) for kind in range(NUM_KINDS)]


def test_of_a_slot_that_has_another_request_nothing_is_known_of_any_kind() -> None:
    control, kinds = AdaptiveControl(2, MAX_DRAFTS), np.arange(NUM_KINDS)[:, None]
    control.begin(1, predicts=True)
    for kind in kinds:
        for _ in range(20):
            control.limits(SLOT, ints(MAX_DRAFTS), cost(0.3), kind)
            verify(control, 0, 1)
    assert control._failures[1::2].all()
    control.begin(1, predicts=True)
    assert not control._failures.any()


def test_verified_drafts_of_predictions_say_nothing_of_a_draft_model() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    control.begin(1, predicts=True)
    for kind, is_informed in ((PREDICTED, False), (OF_TEXT, True)):
        control.limits(SLOT, ints(MAX_DRAFTS), cost(0.1), np.array([kind]))
        verify(control, MAX_DRAFTS, 2 * int(INFORMED_TRIALS))
        assert control.is_informed == is_informed


def test_drafts_of_a_first_long_match_are_all_tried() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    control.begin(1, predicts=False)
    found = control.limits(SLOT, ints(MAX_DRAFTS), cost(0.2), np.array([LONG_MATCHES]))
    assert found.tolist() == [MAX_DRAFTS]


def test_a_request_that_is_tried_beside_others_is_named() -> None:
    control, both = AdaptiveControl(2, MAX_DRAFTS), np.arange(2)
    for slot in both.tolist():
        control.begin(slot, predicts=False)
    price = StepCost(10.0, 2, np.zeros(2), added_ms=0.3 * np.arange(2.0))
    for _ in range(30):
        control.limits(both, ints(MAX_DRAFTS, MAX_DRAFTS), price)
        control.verified(both, ints(MAX_DRAFTS, MAX_DRAFTS), ints(MAX_DRAFTS, 0))
    named = []
    for _ in range(60):
        lengths = control.limits(both, ints(MAX_DRAFTS, MAX_DRAFTS), price)
        assert lengths[0] == MAX_DRAFTS
        assert (control.tried_slot == 1) == (lengths[1] == 1)
        named.append(control.tried_slot)
        control.verified(both[:1], ints(MAX_DRAFTS), ints(MAX_DRAFTS))
    assert set(named) == {-1, 1}


def test_what_was_learned_of_drafts_long_ago_is_no_knowledge() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    verify(control, 0, int(INFORMED_TRIALS) + 4)
    assert control.is_informed
    later = cost(2.0)._replace(num_steps=4)
    lasts = []
    for _ in range(400):
        control.limits(SLOT, ints(0), later)
        lasts.append(control.is_informed)
    assert lasts[2]
    assert not lasts[-1]
    assert control._num_tried == pytest.approx((INFORMED_TRIALS + 4) * FADE ** (4 * 400))


def test_where_no_draft_pays_the_least_tried_request_is_tried_next() -> None:
    control, all_slots = AdaptiveControl(3, MAX_DRAFTS), np.arange(3)
    price = StepCost(10.0, 3, np.zeros(3), added_ms=4.0 * np.arange(2.0))
    for _ in range(60):
        control.verified(all_slots, ints(1, 1, 1), ints(0, 0, 0))
    tried = []
    for _ in range(4000):
        lengths = control.limits(all_slots, ints(1, 1, 1), price)
        if lengths.any():
            (slot,) = lengths.nonzero()[0].tolist()
            tried.append(slot)
            control.verified(all_slots[slot : slot + 1], ints(1), ints(0))
    assert len(tried) >= 9
    assert [tried[:9].count(slot) for slot in range(3)] == [3, 3, 3]


def test_trials_after_drafts_that_paid_come_ever_more_seldom() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    price = StepCost(10.0, 1, np.zeros(1), added_ms=2.0 * np.arange(2.0))
    assert control.balance is not None
    for _ in range(64):
        control.balance.drafted(9.0, 10.0)
        control.limits(SLOT, ints(MAX_DRAFTS), price)
        control.verified(SLOT, ints(MAX_DRAFTS), ints(MAX_DRAFTS))
    at: list[int] = []
    for step in range(3000):
        if control.limits(SLOT, ints(1), price)[0]:
            at += [step] * control.probes
            control.verified(SLOT, ints(1), ints(0))
    gaps = np.diff(at)
    assert len(gaps) >= 8
    assert gaps[0] <= 0.2 * gaps[-1]
    assert abs(gaps[-1] - 0.2 / PROBE_SHARE) <= 2  # a draft takes a fifth of a step


def test_after_a_right_draft_half_of_many_wrong_ones_count() -> None:
    control = AdaptiveControl(2, MAX_DRAFTS)
    chosen(control, 0.1)
    verify(control, 0, 2 * MAX_FAILURES)
    found = []
    for _ in range(3):
        found.append(int(control._failures[SLOT[0]]))
        verify(control, 1, 1)
    assert found == [MAX_FAILURES, MAX_FAILURES // 2, MAX_FAILURES // 4]

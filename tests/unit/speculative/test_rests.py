"""Rests between the steps in which drafts are asked for."""

from __future__ import annotations

import pytest

from quire.speculative.rests import (
    ASK_SHARE,
    FORGOTTEN_STEPS,
    LOOK_STEPS,
    MANY_MISSES,
    MAX_LOOK_STEPS,
    MAX_MISS_STEPS,
    MAX_REST_MS,
    MIN_REST_MS,
    MISS_PART,
    MORE_MISSES,
    STEPS_PER_PLAIN,
    DraftRests,
)

STEP_MS = 1.0
ASKED_MS = 128 * STEP_MS * ASK_SHARE  # a rest has 128 steps at most


def rest(rests: DraftRests) -> int:
    """Take the steps until the control is asked; return how many there were."""
    num, rests.left = rests.left, 0
    return num


def resting() -> DraftRests:
    """Return rests of which the present one is as long as they become."""
    rests = DraftRests()
    for _ in range(9):
        rests.note_choice(pays=False, step_ms=STEP_MS, asked_ms=ASKED_MS)
    return rests


@pytest.mark.parametrize(
    ("step_ms", "asked_ms", "lengths"),
    [
        (1.0, 100.0 * ASK_SHARE, [1, 2, 4, 8, 16, 32, 64, 100, 100]),
        (10.0, 100.0 * ASK_SHARE, [1, 2, 4, 8, 10, 10]),
        (50.0, 100.0 * ASK_SHARE, [1, 2, 4, 4, 4]),
        (20.0, 100.0, [1, 2, 4, 8, int(MAX_REST_MS / 20.0)]),
        (20.0, 0.0, [1, 2, 4, int(MIN_REST_MS / 20.0), 4]),  # it is not known yet
    ],
)
def test_rests_double_until_asking_takes_a_small_share(
    step_ms: float, asked_ms: float, lengths: list[int]
) -> None:
    rests, found = DraftRests(), []
    for _ in lengths:
        rests.note_choice(pays=False, step_ms=step_ms, asked_ms=asked_ms)
        found.append(rest(rests))
    assert found == lengths


def test_rests_that_end_early_in_vain_become_rarer() -> None:
    rests, found = resting(), []
    for _ in range(40):
        rests.end_early()
        found.append(rest(rests))
        rests.note_choice(pays=False, step_ms=STEP_MS, asked_ms=ASKED_MS)
    early = [num for num, left in enumerate(found) if not left]
    assert early == [*(0, 2), *range(5, 40, 3)]
    rests.note_choice(pays=True, step_ms=STEP_MS, asked_ms=ASKED_MS)
    for left in (0, 64, 0):
        rests.note_choice(pays=False, step_ms=STEP_MS, asked_ms=ASKED_MS)
        rests.end_early()
        assert min(rest(rests), 64) == left


def test_of_the_first_two_rests_in_turn_one_ends_early() -> None:
    rests = resting()
    rests.left -= 10
    rests.end_early()
    assert (rests.left, rests.num_steps) == (0, 11)
    for left in (128, 0):
        rests.note_choice(pays=False, step_ms=STEP_MS, asked_ms=ASKED_MS)
        rests.end_early()
        assert rest(rests) == left
    rests.note_choice(pays=True, step_ms=STEP_MS, asked_ms=ASKED_MS)
    assert (rest(rests), rests.last, rests.num_steps) == (0, 0, 1)


def test_drafts_that_were_tried_and_right_end_a_rest() -> None:
    rests = resting()
    rests.left -= 10
    rests.note_success()
    assert (rests.left, rests.num_steps) == (0, 11)
    rests.note_choice(pays=False, step_ms=STEP_MS, asked_ms=ASKED_MS)
    rests.left = FORGOTTEN_STEPS - 1
    rests.note_success()
    assert rests.left == FORGOTTEN_STEPS - 1, "that is short enough to remember it"
    rests.end_early()
    assert rests.left == 0, "it counts as none that a new request has ended"


def test_rests_after_lookups_in_vain_may_all_end_early() -> None:
    rests = resting()
    rest(rests)
    for num in (1, 2):
        rests.note_miss(STEP_MS)
        rests.end_early()
        assert (rests.left, rests.num_steps) == (0, 129 + num)
    rests.note_choice(pays=False, step_ms=STEP_MS, asked_ms=ASKED_MS)
    rests.end_early()
    assert (rests.left, rests.num_steps) == (0, 1)


def test_a_step_in_which_drafts_pay_halves_the_rest_after_it() -> None:
    rests = resting()
    for num, length in ((2, 64), (1, 64), (7, 1)):
        for _ in range(num):
            rests.note_choice(pays=True, step_ms=STEP_MS, asked_ms=ASKED_MS)
        rests.note_choice(pays=False, step_ms=STEP_MS, asked_ms=ASKED_MS)
        assert rest(rests) == length


def test_lookups_that_find_nothing_rest_too() -> None:
    rests = resting()
    rest(rests)
    for _ in range(3):
        rests.note_miss(STEP_MS)
        assert rest(rests) == 128 // MISS_PART
    assert rests.num_steps == 129 + 3 * (1 + 128 // MISS_PART)
    for _ in range(8):
        rests.note_choice(pays=True, step_ms=STEP_MS, asked_ms=ASKED_MS)
    for _ in range(MANY_MISSES - 1):  # a text that is repeated may go on soon
        rests.note_miss(0.1)
        assert not rests.left
    rests.note_miss(0.1)
    assert rests.left == MAX_MISS_STEPS
    rests.forget_misses()
    assert (rests.left, rests.num_steps) == (0, MANY_MISSES + 1)
    rests.note_miss(0.1)
    assert not rests.left


@pytest.mark.parametrize(
    ("step_ms", "steps"), [(0.1, [31, 31, 31]), (2.0, [4, 8, 16]), (5.0, [1, 2, 4]), (9.0, [0] * 3)]
)
def test_rests_after_lookups_in_vain_become_longer(step_ms: float, steps: list[int]) -> None:
    rests = DraftRests()
    for _ in range(MANY_MISSES - 1):
        rests.note_miss(step_ms)
    for num in (*steps, steps[-1]):
        for _ in range(MORE_MISSES):
            rests.note_miss(step_ms)
            assert rest(rests) == num
    rests.forget_misses()
    rests.note_miss(step_ms)
    assert not rests.left


def test_one_step_in_some_with_drafts_is_plain() -> None:
    rests, plain = DraftRests(), 0
    for _ in range(1 + 2 * STEPS_PER_PLAIN + 3):
        plain += rests.takes_plain_step()
        rests.note_choice(pays=True, step_ms=1.0, asked_ms=0.0)
    assert plain == 3


def steps_until_look(rests: DraftRests) -> int:
    """Take the steps until something is looked for; return how many there were."""
    num = rests.quiet
    rests.left -= num
    rests.until_look -= num
    return num


def looking(step_ms: float = 0.1) -> DraftRests:
    """Return a long rest in which long matches are looked for."""
    rests = DraftRests(looks=True)
    for _ in range(12):
        rests.note_choice(pays=False, step_ms=step_ms, asked_ms=ASKED_MS)
    return rests


def test_a_long_match_is_looked_for_less_often_each_time() -> None:
    rests, found = looking(), []
    for _ in range(7):
        found.append(steps_until_look(rests))
        rests.note_look(finds=False)
    assert found == [LOOK_STEPS, 8, 16, 32, 64, MAX_LOOK_STEPS, MAX_LOOK_STEPS]
    rests.note_choice(pays=True, step_ms=0.1, asked_ms=ASKED_MS, are_long=True)
    rests.note_choice(pays=False, step_ms=0.1, asked_ms=ASKED_MS)
    assert steps_until_look(rests) == LOOK_STEPS


def test_a_long_match_ends_a_rest_and_shortens_no_later_one() -> None:
    rests = looking()
    kept = rests.last
    steps_until_look(rests)
    rests.note_look(finds=True)
    assert not rests.left
    assert rests.num_steps == LOOK_STEPS + 1
    for _ in range(9):
        rests.note_choice(pays=True, step_ms=0.1, asked_ms=ASKED_MS, are_long=True)
    rests.note_choice(pays=False, step_ms=0.1, asked_ms=ASKED_MS)
    assert rests.left == kept


def test_long_matches_of_which_no_draft_pays_are_looked_for_less_often() -> None:
    rests, found = looking(), []
    for _ in range(5):
        found.append(steps_until_look(rests))
        rests.note_look(finds=True)
        rests.note_choice(pays=False, step_ms=0.1, asked_ms=ASKED_MS)
    longest = int(128 * STEP_MS / 0.1)  # as asking takes so long
    times = [min(times * MAX_LOOK_STEPS, longest) for times in (2, 4, 8, 16)]
    assert found == [LOOK_STEPS, *times]
    rests.note_choice(pays=True, step_ms=0.1, asked_ms=ASKED_MS)
    rests.note_choice(pays=False, step_ms=0.1, asked_ms=ASKED_MS)
    assert steps_until_look(rests) == LOOK_STEPS


def test_lookups_that_find_nothing_rest_no_longer_than_until_a_look() -> None:
    rests = looking()
    rests.note_choice(pays=True, step_ms=0.1, asked_ms=ASKED_MS, are_long=True)
    rests.note_miss(0.1)
    assert rests.quiet == rests.left == LOOK_STEPS


def test_without_repetition_lookups_rest_as_long_as_without_looks() -> None:
    with_looks, without = DraftRests(looks=True), DraftRests()
    for rests in (with_looks, without):
        for _ in range(MANY_MISSES):
            rests.left = 0
            rests.note_miss(0.1)
    assert with_looks.quiet == without.left == MAX_MISS_STEPS


@pytest.mark.parametrize("step_ms", [9.0, 20.0])
def test_in_long_steps_too_looks_in_vain_become_rarer(step_ms: float) -> None:
    rests, found = looking(step_ms), []
    for _ in range(4000):
        found.append(steps_until_look(rests))
        if rests.left:
            rests.note_look(finds=True)
        rests.note_choice(pays=False, step_ms=step_ms, asked_ms=ASKED_MS)
    longest = int(128 * STEP_MS / step_ms)  # as asking takes so long
    assert found[:3] == [1, 2, 4][: len(found[:3])]
    assert found[-1] == longest
    assert rests._look_times <= longest


def test_a_look_says_nothing_where_other_drafts_were_chosen_from() -> None:
    rests = looking()
    for _ in range(3):
        steps_until_look(rests)
        rests.note_look(finds=True)
        rests.note_choice(pays=False, step_ms=0.1, asked_ms=ASKED_MS, has_long=False)
    assert steps_until_look(rests) == LOOK_STEPS

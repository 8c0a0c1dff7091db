"""Rests between the steps in which drafts are asked for."""

from __future__ import annotations

import pytest

from quire.speculative.rests import MAX_REST_STEPS, STEPS_PER_PLAIN, DraftRests


def rest(rests: DraftRests) -> int:
    """Take the steps until the control is asked; return how many there were."""
    num, rests.left = rests.left, 0
    return num


@pytest.mark.parametrize(
    ("step_ms", "lengths"),
    [
        (0.1, [1, 2, 4, 8, 16, 32, 64, 128, 192, 192]),
        (2.0, [1, 2, 4, 8, 16, 32, 40, 40]),
        (50.0, [1, 2, 4, 4, 4, 4, 4, 4]),
        (0.0, [1, 2, 4, 8, 16, 32, 64, 128, MAX_REST_STEPS, MAX_REST_STEPS]),
    ],
)
def test_rests_double_up_to_about_as_many_milliseconds(step_ms: float, lengths: list[int]) -> None:
    rests, found = DraftRests(), []
    for _ in lengths:
        rests.note_choice(pays=False, step_ms=step_ms)
        found.append(rest(rests))
    assert found == lengths


def test_of_two_rests_in_turn_one_ends_early() -> None:
    rests = DraftRests()
    for _ in range(9):
        rests.note_choice(pays=False, step_ms=0.1)
    rests.left -= 10
    rests.end_early()
    assert (rests.left, rests.num_steps) == (0, 11)
    rests.note_choice(pays=False, step_ms=0.1)
    rests.end_early()
    assert rest(rests) == MAX_REST_STEPS
    rests.note_choice(pays=False, step_ms=0.1)
    rests.end_early()
    assert rest(rests) == 0
    rests.note_choice(pays=True, step_ms=0.1)
    assert (rest(rests), rests.last, rests.num_steps) == (0, 0, 1)


def test_a_step_in_which_drafts_pay_halves_the_rest_after_it() -> None:
    rests = DraftRests()
    for _ in range(9):
        rests.note_choice(pays=False, step_ms=0.1)
    for num, length in ((2, MAX_REST_STEPS // 2), (1, MAX_REST_STEPS // 2), (7, 1)):
        for _ in range(num):
            rests.note_choice(pays=True, step_ms=0.1)
        rests.note_choice(pays=False, step_ms=0.1)
        assert rest(rests) == length


def test_one_step_in_some_with_drafts_is_plain() -> None:
    rests, plain = DraftRests(), 0
    for _ in range(1 + 2 * STEPS_PER_PLAIN + 3):
        plain += rests.takes_plain_step()
        rests.note_choice(pays=True, step_ms=1.0)
    assert plain == 3

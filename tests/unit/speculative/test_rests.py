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
        (0.1, [1, 2, 4, 8, 16, 32, 64, 64]),
        (2.0, [1, 2, 4, 8, 12, 12, 12, 12]),
        (50.0, [1, 2, 4, 4, 4, 4, 4, 4]),
        (0.0, [1, 2, 4, 8, 16, 32, MAX_REST_STEPS, MAX_REST_STEPS]),
    ],
)
def test_rests_double_up_to_about_as_many_milliseconds(step_ms: float, lengths: list[int]) -> None:
    rests, found = DraftRests(), []
    for _ in lengths:
        rests.note_choice(pays=False, step_ms=step_ms)
        found.append(rest(rests))
    assert found == lengths


def test_a_request_that_begins_alone_is_tried_once_and_rests_go_on() -> None:
    rests = DraftRests()
    for _ in range(8):
        rests.note_choice(pays=False, step_ms=0.1)
    rests.begin(is_alone=True)
    assert not rests.left
    rests.note_choice(pays=False, step_ms=0.1)
    assert rest(rests) == 32
    rests.note_choice(pays=False, step_ms=0.1)
    rests.begin(is_alone=False)
    assert rest(rests) == 8
    rests.note_choice(pays=True, step_ms=0.1)
    assert rest(rests) == 0
    assert rests.last == 0


def test_one_step_in_some_with_drafts_is_plain() -> None:
    rests, plain = DraftRests(), 0
    for _ in range(1 + 2 * STEPS_PER_PLAIN + 3):
        plain += rests.takes_plain_step()
        rests.note_choice(pays=True, step_ms=1.0)
    assert plain == 3

"""Sizes of the benchmark of prefill and decode engines: prompts that fit the time."""

from __future__ import annotations

import pytest

from bench.disaggregation import MIN_PROMPT, fitting, total_s


@pytest.mark.parametrize(
    ("alone_s", "wanted"),
    [
        (0.05, (8192, 4)),  # all of it
        (0.5, (8192, 2)),  # fewer prompts come first
        (1.0, (4096, 2)),
        (5.0, (1024, 2)),
        (100.0, (MIN_PROMPT, 2)),  # the shortest, whatever it takes
    ],
)
def test_prompts_are_fewer_and_shorter_where_they_take_long(
    alone_s: float, wanted: tuple[int, int]
) -> None:
    found = fitting(alone_s, 300.0, 8192, 4)
    assert found == wanted
    if found[0] > MIN_PROMPT:
        assert total_s(alone_s, *found) <= 300.0


def test_a_prompt_of_any_length_is_one_that_was_asked_for() -> None:
    assert fitting(1000.0, 1.0, 256, 1) == (256, 1)
    assert fitting(0.0, 1.0, 100, 3) == (100, 3)

"""Values in error messages: JSON's words, bounded, and nothing huge written out."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.show import MAX_SHOWN_CHARS, show


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        (float("inf"), "Infinity"),
        (-3, "-3"),
        ("it's", '"it\'s"'),
        ("猫", '"猫"'),
        ("a\nb\ud800", '"a\\nb\\ud800"'),
        ({"a": [False, None]}, '{"a": [false, null]}'),
        ([], "[]"),
        ({}, "{}"),
        ([[[[1]]]], "[[[[...]]]]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, ...]"),
        ((1, "b"), '[1, "b"]'),
        (1 << 4000, "a number of 4001 bits"),
    ],
)
def test_values_are_shown_in_the_words_of_json(value: Any, shown: str) -> None:
    assert show(value) == shown


class Watched(list[Any]):
    """A list that cannot be written out or walked to its end."""

    def __repr__(self) -> str:
        raise AssertionError("written out")

    def __iter__(self) -> Any:
        raise AssertionError("walked")


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10_000_000,
        Watched([Watched([1]) for _ in range(100)]),
        {str(key): "y" * 1000 for key in range(100_000)},
        [{"k" * 1_000_000: ["z" * 1_000_000]}],
    ],
)
def test_what_is_huge_is_cut_before_it_is_written(value: Any) -> None:
    assert len(show(value)) <= MAX_SHOWN_CHARS
    assert "..." in show(value)


def test_what_is_nested_without_end_is_shown_too() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert show(nested) == "[[[[...]]]]"

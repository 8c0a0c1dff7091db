"""Values in error messages: as JSON, shortened, and without writing out huge ones."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.show import MAX_SHOWN_CHARS, show
from tests.cases import each_case


@each_case(
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
def test_values_are_shown_as_json(value: Any, shown: str) -> None:
    assert show(value) == shown


class Watched(list[Any]):
    """A list that fails if it is written out or iterated to its end."""

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
def test_huge_values_are_shortened_before_they_are_written(value: Any) -> None:
    assert len(show(value)) <= MAX_SHOWN_CHARS
    assert "..." in show(value)


def test_endlessly_nested_values_are_shown() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert show(nested) == "[[[[...]]]]"

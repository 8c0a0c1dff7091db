"""Cases of one item (tests/cases.py) run and fail as the items of `parametrize` would."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from tests.cases import ONLY, each_case


def recorded(seen: list[str]) -> object:
    """Return a folded test that notes its cases, and fails in three of them."""

    @each_case("last", [1, 2])
    @each_case("a, b", [("x", None), ("y", 0.5)])
    @each_case("kind", [dict, "text"])
    def test(fixture: str, kind: object, a: str, b: object, last: int) -> None:
        seen.append(f"{fixture} {kind} {a} {b} {last}")
        if (a, last) == ("y", 2):
            raise ValueError(f"{a}{last}")
        if (kind, a, last) == ("text", "x", 1):
            pytest.fail("as asked")

    return test


def test_all_cases_run_and_those_that_fail_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ONLY, raising=False)
    seen: list[str] = []
    test = recorded(seen)
    assert callable(test)
    assert list(inspect.signature(test).parameters) == ["fixture"]
    with pytest.raises(ExceptionGroup) as caught:
        test(fixture="given")
    # The lowest decorator varies last, as pytest orders items.
    assert seen[:3] == [
        "given <class 'dict'> x None 1",
        "given <class 'dict'> x None 2",
        "given <class 'dict'> y 0.5 1",
    ]
    assert len(seen) == 8
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 of 8 cases failed:"
    assert [line.strip() for line in lines[1:4]] == [
        "dict-y-0.5-2",
        "text-x-None-1",
        "text-y-0.5-2",
    ]
    kinds = [type(error) for error in caught.value.exceptions]
    assert kinds == [ValueError, AssertionError, ValueError]
    assert caught.value.exceptions[0].__notes__ == ["case dict-y-0.5-2"]


def test_a_case_that_skips_fails_instead_of_skipping_the_others() -> None:
    seen = []

    @each_case("number", range(3))
    def test(number: int) -> None:
        seen.append(number)
        if number == 1:
            pytest.skip("not here")

    with pytest.raises(ExceptionGroup) as caught:
        test()
    assert "a case cannot skip alone: not here" in str(caught.value.exceptions[0])
    assert seen == [0, 1, 2]

    @each_case("number", range(3))
    def all_skip(number: int) -> None:
        pytest.skip(f"not here: {number}")

    with pytest.raises(pytest.skip.Exception, match="not here: 0"):
        all_skip()


def test_cases_are_chosen_by_a_part_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    test = recorded(seen)
    assert callable(test)
    monkeypatch.setenv(ONLY, "dict-x")
    test(fixture="given")
    assert len(seen) == 2
    monkeypatch.setenv(ONLY, "none of these")
    with pytest.raises(AssertionError, match="no case has 'none of these' in its name"):
        test(fixture="given")


@each_case("text, more", [("a", "b"), ("c", "d")], ids=["first", "second"])
@each_case("number", range(3), ids=lambda number: f"n{number}")
@pytest.mark.parametrize("other", ["a", "b"])
def test_items_and_cases_may_be_mixed(number: int, text: str, more: str, other: str) -> None:
    assert number < 3
    assert text < more
    assert other in "ab"


@each_case("number", range(3))
def test_each_case_has_its_own_folder_and_patches(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    assert "QUIRE_TEST_NUMBER" not in os.environ
    monkeypatch.setenv("QUIRE_TEST_NUMBER", str(number))


def test_marks_between_axes_are_kept() -> None:
    @each_case("last", [1, 2])
    @pytest.mark.parametrize("other", ["a", "b"])
    @each_case("first", [1, 2])
    @pytest.mark.parity
    def test(first: int, other: str, last: int) -> None:
        raise NotImplementedError

    assert [mark.name for mark in test.pytestmark] == ["parity", "parametrize"]

"""Many cases of a test in one item: `each_case` stands where `pytest.mark.parametrize` would.

An item costs milliseconds: each process of pytest-xdist collects it, and reports its setup, its
call and its teardown. Tables with hundreds of cases, each of about that time or less, take one.
Knows no test. Always holds: all cases run, in the order of pytest's items; those that fail are
listed by the names that pytest would give them, the first of them with their tracebacks. With
QUIRE_CASE=NAME only cases with NAME in their names run. Each case has a `tmp_path` and a
`monkeypatch` of its own.

Not for tests with other fixtures that a case changes, nor for tests that skip: a case that skips
fails, unless all do.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

ONLY = "QUIRE_CASE"
NUM_SHOWN = 3
Test = Callable[..., None]
Case = tuple[str, dict[str, Any]]
Names = Callable[[Any], object] | Sequence[str]


def each_case(
    names: str | Sequence[str], values: Iterable[Any], ids: Names | None = None
) -> Callable[[Test], Test]:
    """Run the test with each of the values of an argument, or of several, as parametrize does.

    names: of the arguments; several in a tuple, or with commas. ids: the names of rows, or
    what names a value.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    arguments = tuple(names)
    rows = [(value,) if len(arguments) == 1 else tuple(value) for value in values]
    named = [
        (_name_of(arguments, row, place, ids), dict(zip(arguments, row, strict=True)))
        for place, row in enumerate(rows)
    ]

    def decorate(test: Test) -> Test:
        body, axes = getattr(test, "each_case", (test, ()))
        folded = _folded(body, (*axes, named))
        if marks := getattr(test, "pytestmark", None):  # also those between two axes
            folded.pytestmark = marks  # type: ignore[attr-defined]
        return folded

    return decorate


def _folded(body: Test, axes: tuple[list[Case], ...]) -> Test:
    """Return a test of all combinations; the first axis, of the lowest decorator, varies last."""

    @functools.wraps(body)
    def test(**fixtures: Any) -> None:
        only, num_run = os.environ.get(ONLY, ""), 0
        failed, skipped = list[tuple[str, Exception]](), list[tuple[str, Exception]]()
        for parts in itertools.product(*axes):
            name = "-".join(part for part, _ in parts)
            if only not in name:
                continue
            num_run += 1
            case = fixtures | {key: value for _, values in parts for key, value in values.items()}
            try:
                with _own_fixtures(case, str(num_run)):
                    body(**case)
            except Exception as error:  # noqa: BLE001
                failed.append((name, error))
            except pytest.fail.Exception as error:  # no Exception, so that it passes handlers
                failed.append((name, AssertionError(str(error))))
            except pytest.skip.Exception as error:
                skipped.append((name, AssertionError(f"a case cannot skip alone: {error}")))
        if skipped and len(skipped) == num_run:
            pytest.skip(str(skipped[0][1]).partition(": ")[2])
        failed += skipped
        if failed:
            for name, error in failed:
                error.add_note(f"case {name}")
            listed = "".join(f"\n  {name}" for name, _ in failed)
            raise ExceptionGroup(
                f"{len(failed)} of {num_run} cases failed:{listed}\n",
                [error for _, error in failed[:NUM_SHOWN]],
            )
        assert num_run, f"no case has {only!r} in its name"

    folded = {name for axis in axes for _, values in axis[:1] for name in values}
    signature = inspect.signature(body)
    left = [one for name, one in signature.parameters.items() if name not in folded]
    test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    del test.__wrapped__  # type: ignore[attr-defined]
    test.place_as = body  # type: ignore[attr-defined]  # where pytest says that the test is
    test.each_case = (body, axes)  # type: ignore[attr-defined]
    return test


@contextmanager
def _own_fixtures(case: dict[str, Any], number: str) -> Iterator[None]:
    """Replace the fixtures of a test by those of a case."""
    if "tmp_path" in case:
        case["tmp_path"] = case["tmp_path"] / number
        case["tmp_path"].mkdir()
    with pytest.MonkeyPatch.context() as patches:
        if "monkeypatch" in case:
            case["monkeypatch"] = patches
        yield


def _name_of(arguments: Sequence[str], row: Sequence[object], place: int, ids: Names | None) -> str:
    """Return the name of a row of values, as pytest writes it in an item's name."""
    if ids is not None and not callable(ids):
        return ids[place]
    return "-".join(
        _value_name(argument, value, place, ids)
        for argument, value in zip(arguments, row, strict=True)
    )


def _value_name(
    argument: str, value: object, place: int, name: Callable[[Any], object] | None
) -> str:
    given = None if name is None else name(value)
    if given is not None:
        return str(given)
    if isinstance(value, (str, int, float, complex, bool, Enum)) or value is None:
        return str(value)
    return getattr(value, "__name__", f"{argument}{place}")

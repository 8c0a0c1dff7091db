"""Checks of single values: what a caller gave, as the type a field has, or an error that teaches.

Knows no field by name: the name is an argument and appears in the error. NumPy's numbers are
numbers; booleans and texts are not. Always holds: what comes back is one of Python's own values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

MAX_TOKEN_ID = 2**31 - 1


def listed(
    name: str,
    value: Any,
    *,
    most: int | None = None,
    what: str = "entries",
    allowed: str = "a list",
) -> tuple[Any, ...]:
    """Any iterable but a text or a mapping, as a tuple of at most `most`."""
    if type(value) is not tuple and (
        isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable)
    ):
        raise InvalidParameter(f"{name} is {show(value)}; {allowed} is allowed", param=name)
    entries = tuple(value)
    if most is not None and len(entries) > most:
        raise InvalidParameter(
            f"{name} has {len(entries)} {what}; at most {most} are allowed", param=name
        )
    return entries


def whole(name: str, value: Any, low: int, high: int, *, is_entry: bool = False) -> int:
    """Return the value as an int. is_entry: of a list, which errors say."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not low <= found <= high:
        place = f"{name} holds" if is_entry else f"{name} is"
        raise InvalidParameter(
            f"{place} {show(value)}; a whole number from {low} to {high} is allowed", param=name
        )
    return found


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Return the value as a float."""
    found = math.nan
    if type(value) is float:
        found = value
    elif isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            found = float(value)
    # NaN fails every comparison.
    if not ((low < found if open_low else low <= found) and found <= high):
        least = f"above {low}" if open_low else f"from {low}"
        raise InvalidParameter(
            f"{name} is {show(value)}; a finite number {least} to {high} is allowed", param=name
        )
    return found


def token_ids(name: str, value: Any, *, most: int) -> tuple[int, ...]:
    """At most `most` token ids; whether the model has them is not known here."""
    entries = listed(name, value, most=most, what="ids")
    if not entries:
        return entries
    # Long lists, checked anew wherever a record arrives, are nearly always fine.
    if set(map(type, entries)) == {int} and min(entries) >= 0 and max(entries) <= MAX_TOKEN_ID:
        return entries
    return tuple(whole(name, id_, 0, MAX_TOKEN_ID, is_entry=True) for id_ in entries)


def texts(name: str, value: Any, *, most: int, max_chars: int) -> tuple[str, ...]:
    """At most `most` texts of 1 to `max_chars` characters; one text alone is a list of one."""
    texts_of = (value,) if isinstance(value, str) else value
    entries = listed(name, texts_of, most=most, what="strings", allowed="a string or a list")
    for text in entries:
        if not isinstance(text, str) or not 0 < len(text) <= max_chars:
            raise InvalidParameter(
                f"{name} holds {show(text)}; each entry must be a string of 1 to "
                f"{max_chars} characters",
                param=name,
            )
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidParameter(
                f"{name} holds {text!a}, with a lone surrogate: half of a character, which "
                "no text can hold; send whole characters",
                param=name,
            )
    return entries

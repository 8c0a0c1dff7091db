"""Ids of items: those of a response's items have its digits, so that an item is found by its id.

response  resp_0123456789abcdef01234567
item      msg_0123456789abcdef01234567o2   the third item of its output
          fco_0123456789abcdef01234567i0   the first item of its input
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RESPONSE_PREFIX = "resp_"
PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
_ITEM = re.compile(r"[a-z]{2,3}_([0-9a-f]{24})([io])([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item is: at an index of the output or the input of a response."""

    response_id: str
    is_output: bool
    index: int


def item_id(kind: str, response_id: str, index: int, *, is_output: bool) -> str:
    """Return the id of an item of this type."""
    digits = response_id.removeprefix(RESPONSE_PREFIX)
    return f"{PREFIXES[kind]}{digits}{'o' if is_output else 'i'}{index}"


def place_of(id_: str) -> ItemPlace | None:
    """Return where the item with this id is; None if no response has such an id."""
    found = _ITEM.fullmatch(id_)
    if found is None:
        return None
    return ItemPlace(RESPONSE_PREFIX + found[1], found[2] == "o", int(found[3]))

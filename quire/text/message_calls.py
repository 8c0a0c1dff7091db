"""Validate the tool calls of a conversation's messages.

A call names a function; its arguments are the text of a JSON object, or the object itself. Whether
the request offers that function is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show


def check_calls(place: str, calls: Any) -> None:
    """Check the calls of a message; `place` is where it has them. Raises InvalidParameter."""
    fine = isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)
    if not fine:
        raise InvalidParameter(
            f"{place} is {show(calls)}; a list of objects is allowed", param="messages"
        )
    for index, call in enumerate(calls):
        _check_call(f"{place}[{index}]", call)


def _check_call(place: str, call: Mapping[str, Any]) -> None:
    """Check a call of a function by name; some clients send arguments as an object."""
    if call.get("type", "function") != "function":
        raise InvalidParameter(
            f'{place}.type is {show(call["type"])}; "function" is allowed', param="messages"
        )
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidParameter(
            f"{place}.function is {show(function)}; an object with the function's name is needed",
            param="messages",
        )
    arguments = function.get("arguments", "")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        raise InvalidParameter(
            f"{place}.function.arguments is {show(arguments)}; the text of a JSON object is "
            "allowed",
            param="messages",
        )

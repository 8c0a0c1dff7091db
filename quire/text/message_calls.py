"""Validate the tool calls of a conversation's messages, and their results.

A call names a function; its arguments are the text of a JSON object, or the object itself. (Text
that is no JSON is accepted: clients send a model's broken call back, with the error, so that it
tries again.) A result belongs to an earlier call. Whether the request offers that function is not
known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

_MAX_NAMED = 4  # ids in an error


def check_calls(place: str, calls: Any) -> None:
    """Check the calls of a message; `place` is where it has them. Raises InvalidParameter."""
    fine = isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)
    if not fine:
        raise InvalidParameter(
            f"{place} is {show(calls)}; a list of objects is allowed", param="messages"
        )
    for index, call in enumerate(calls):
        check_call(f"{place}[{index}]", call)


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that each message of a tool answers an earlier call. Raises InvalidParameter.

    The id of the call may be left out if one call is open, or if calls have no ids: results then
    come in the order of the calls. messages: with calls that `check_calls` has accepted.
    """
    calls = _Calls()
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            calls.answer(f"messages[{at}]", message.get("tool_call_id"))
        elif message["role"] == "assistant":
            calls.add(message.get("tool_calls") or ())


class _Calls:
    """The calls of a conversation so far. Those without an id are None."""

    def __init__(self) -> None:
        self._seen: dict[str | None, None] = {}  # in their order
        self._open: list[str | None] = []

    def add(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Add the calls of a message; calls before it that are not answered are not open now."""
        if calls:
            self._open = [call.get("id") or None for call in calls]
            self._seen.update(dict.fromkeys(self._open))

    def answer(self, place: str, id_: Any) -> None:
        """Take the result of a call."""
        if not isinstance(id_, str | None):
            raise InvalidParameter(
                f"{place}.tool_call_id is {show(id_)}; the id of a call is allowed, a text",
                param="messages",
            )
        if not self._seen:
            raise InvalidParameter(
                f"{place} is the result of a tool, and no earlier message of the assistant has "
                "tool_calls; send the assistant's message with the call before it",
                param="messages",
            )
        if id_ in self._open:
            self._open.remove(id_)
        elif id_ and id_ not in self._seen and None not in self._seen:
            known = ", ".join(show(one) for one in list(self._seen)[:_MAX_NAMED])
            raise InvalidParameter(
                f"{place}.tool_call_id is {show(id_)}, and no earlier message has a call with that "
                f"id (there are {known}); give the id of the call that this result is of",
                param="messages",
            )
        elif not id_ and None not in self._seen:
            self._answer_without_id(place)

    def _answer_without_id(self, place: str) -> None:
        if len(self._open) == 1:
            self._open.clear()
            return
        found = f"{len(self._open)} calls are open" if self._open else "no call is open"
        raise InvalidParameter(
            f"{place}.tool_call_id is missing, and {found}; give the id of the call that this "
            "result is of",
            param="messages",
        )


def check_call(place: str, call: Mapping[str, Any]) -> None:
    """Check a call of a function by name; some clients send arguments as an object.

    place: its path. Raises InvalidParameter.
    """
    if call.get("type", "function") != "function":
        raise InvalidParameter(
            f'{place}.type is {show(call["type"])}; "function" is allowed', param="messages"
        )
    if not isinstance(call.get("id"), str | None):
        raise InvalidParameter(
            f"{place}.id is {show(call['id'])}; a text is allowed", param="messages"
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

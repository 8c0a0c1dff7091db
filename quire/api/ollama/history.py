"""Convert messages of Ollama's chats to the messages that chat templates read.

thinking, tool_calls and tool_name become reasoning_content, tool_calls and name of OpenAI's form.
Always holds: a key that would change the prompt is converted, or refused with its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.generation.conversation import MAX_MESSAGES
from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.text.message_calls import check_calls

ROLES = ("system", "user", "assistant", "tool")
_FORM = '{"role": "user", "content": "..."}'
_OF_ROLE = {"assistant": ("thinking", "tool_calls"), "tool": ("tool_name", "tool_call_id")}
_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}


def history_of(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a request. Raises InvalidParameter with the path of what is wrong."""
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        found = f"a list of {len(messages)}" if isinstance(messages, list) else show(messages)
        raise _fault(f"messages is {found}; a list of up to {MAX_MESSAGES} {_FORM} is allowed")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(messages)]


def _message(place: str, message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    role = role.lower() if isinstance(role, str) else role  # as Ollama reads it
    if role not in ROLES:
        raise _fault(
            f"{place} is {show(message)}; an object such as {_FORM} is allowed, with a role of "
            f"{', '.join(ROLES)}"
        )
    keys = ("role", "content", *_OF_ROLE.get(role, ()))
    converted: dict[str, Any] = {"role": role, "content": ""}
    for key, value in message.items():
        if key == "role" or value is None or (key in ("images", "tool_calls") and value == []):
            continue
        if value == "" and key in _NAMES:
            continue
        if key == "images":
            raise _fault(f"{place}.images is not empty; the model reads text only: leave it out")
        if key not in keys:
            raise _fault(
                f"{place} has {show(key)}; {', '.join(keys)} are the keys of a message of the "
                f"role {role}"
            )
        if key == "tool_calls":
            converted[key] = _calls(f"{place}.{key}", value)
        elif not isinstance(value, str):
            raise _fault(f"{place}.{key} is {show(value)}; a text is allowed")
        else:
            converted[_NAMES.get(key, key)] = value
    return converted


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form, without their place in the answer."""
    check_calls(place, calls)
    return [_call(f"{place}[{at}]", call) for at, call in enumerate(calls)]


def _call(place: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    if not isinstance(arguments, dict | None):
        raise _fault(f"{place}.function.arguments is {show(arguments)}; an object is allowed")
    said = {"name": function.get("name"), "arguments": arguments or {}}
    if not isinstance(said["name"], str):
        raise _fault(f"{place}.function is {show(function)}; an object with a name is needed")
    id_ = call.get("id")
    if not isinstance(id_, str | None):
        raise _fault(f"{place}.id is {show(id_)}; a text is allowed")
    return {**({"id": id_} if id_ else {}), "type": "function", "function": said}


def _fault(message: str) -> InvalidParameter:
    return InvalidParameter(message, param="messages")

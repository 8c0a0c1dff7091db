"""Read what messages of OpenAI's chats have beside text and tool_calls: refusals, and the older
form of calls (`function_call`, answered by a message of the role `function`).

Both become what templates read: text, tool_calls and the role tool. Knows no template and no HTTP.
Always holds: what the model said before is in the message that is returned, or is refused by path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.text.message_calls import check_call


def assistant_message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the assistant with its refusal as content and its call in tool_calls.

    place: its path. Raises InvalidParameter.
    """
    if message.get("audio") is not None:
        raise _fault(
            f"{place}.audio is {show(message['audio'])}; the model reads text only: send the "
            "transcript as content"
        )
    if isinstance(message.get("content"), list | tuple):
        parts = [_as_text(f"{place}.content", part) for part in message["content"]]
        message = {**message, "content": parts}
    if message.get("refusal") is not None:
        message = _with_refusal(place, message)
    if message.get("function_call") is not None:
        message = _with_call(place, message)
    if message.get("content") is None and not message.get("tool_calls"):
        return {**message, "content": ""}
    return message  # with tool calls, templates expect no content


def function_result(place: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the role function as the result of a tool. Raises InvalidParameter."""
    name = message.get("name")
    if not isinstance(name, str) or not name:
        found = "missing" if name is None else show(name)
        raise _fault(f"{place}.name is {found}; the name of the function is needed")
    content = message.get("content")
    return {**message, "role": "tool", "content": "" if content is None else content}


def _with_refusal(place: str, message: dict[str, Any]) -> dict[str, Any]:
    refusal = message["refusal"]
    if not isinstance(refusal, str):
        raise _fault(f"{place}.refusal is {show(refusal)}; a text is allowed")
    if not message.get("content"):
        return {**message, "content": refusal or message.get("content")}
    if refusal:
        raise _fault(
            f"{place} has both content and refusal, and a template reads one text; give one of "
            "them, or both as parts of content"
        )
    return message


def _with_call(place: str, message: dict[str, Any]) -> dict[str, Any]:
    call, path = message["function_call"], f"{place}.function_call"
    if message.get("tool_calls"):
        raise _fault(f"{place} has both tool_calls and function_call; write all as tool_calls")
    if not isinstance(call, Mapping):
        raise _fault(f"{path} is {show(call)}; an object with name and arguments is allowed")
    check_call(path, {"function": call})
    others = {name: value for name, value in message.items() if name != "function_call"}
    return {**others, "tool_calls": [{"type": "function", "function": dict(call)}]}


def _as_text(path: str, part: Any) -> Any:
    """Return a part with a refusal as text; others as they are."""
    if not isinstance(part, Mapping) or part.get("type") != "refusal":
        return part
    if not isinstance(part.get("refusal"), str):
        raise _fault(
            f'{path} holds a part {show(part)}; {{"type": "refusal", "refusal": "..."}} is allowed'
        )
    return {"type": "text", "text": part["refusal"]}


def _fault(message: str) -> InvalidParameter:
    return InvalidParameter(message, param="messages")

"""Validate the messages of a conversation.

Content is text or a list of text parts; the role developer becomes system; other keys of a message
are passed to the template unchanged. Knows no template, no tokens and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.text.assistant_messages import assistant_message, function_result
from quire.text.message_calls import check_calls, check_results

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_FORMS = {"assistant": assistant_message, "function": function_result}
_EXAMPLE = '{"role": "user", "content": "Hello"}'
_PART = '{"type": "text", "text": "..."}'


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages as a template takes them. Raises InvalidParameter naming the message."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidParameter(
            f"messages is {_found(messages)}; a list of at least one message is needed, such as "
            f"[{_EXAMPLE}]",
            param="messages",
        )
    checked = [_checked(at, message) for at, message in enumerate(messages)]
    if any(message["role"] == "tool" for message in checked):
        check_results(checked)
    return checked


def _found(value: Any) -> str:
    return "missing" if value is None else show(value)


def _checked(at: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter(
            f"messages[{at}] is {show(message)}; an object such as {_EXAMPLE} is allowed",
            param="messages",
        )
    role = message.get("role")
    if role not in ROLES:
        raise InvalidParameter(
            f"messages[{at}].role is {_found(role)}; allowed: {', '.join(ROLES)}", param="messages"
        )
    checked = {**message, "role": "system" if role == "developer" else role}
    if message.get("tool_calls") is not None:
        check_calls(f"messages[{at}].tool_calls", message["tool_calls"])
    if role in _OTHER_FORMS:
        checked = _OTHER_FORMS[role](f"messages[{at}]", checked)
    content = checked.get("content")
    if content is None and role == "assistant":  # beside its calls
        return checked
    if isinstance(content, list | tuple):
        for part in content:
            _check_part(at, part)
    elif not isinstance(content, str):
        raise InvalidParameter(
            f"messages[{at}].content is {_found(content)}; a text is allowed, or a list of parts "
            f"such as {_PART}",
            param="messages",
        )
    return checked


def _check_part(at: int, part: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidParameter(
            f"messages[{at}].content holds a part {show(part)}; the model reads text only: parts "
            f"of the form {_PART} are allowed",
            param="messages",
        )

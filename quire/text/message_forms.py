"""Convert messages to the forms that a chat template can take, found out by trial renderings.

Content in parts is joined to text for templates that do not read parts. Tool call arguments, which
OpenAI's clients send as JSON text, are parsed if the template writes objects itself. The last
message is left open to be continued. Knows no tokens and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.base.errors import InvalidParameter, TokenizerError
from quire.base.show import show
from quire.text.compiled_template import CompiledTemplate

_PROBE = "quire-probe"
# Marks the end of an open message. Its trailing space shows whether the template keeps white space
# there; its private-use characters do not occur in ordinary text.
_OPEN_END = "\ue0f7open end\ue0f7 "


def takes_parts(template: CompiledTemplate, variables: Mapping[str, Any]) -> bool:
    """Return whether a template reads the text of content parts."""
    content = [{"type": "text", "text": _PROBE}]
    return _finds_probe(template, variables, [{"role": "user", "content": content}])


def takes_argument_objects(template: CompiledTemplate, variables: Mapping[str, Any]) -> bool:
    """Return whether a tool call's arguments must be objects in messages, not JSON text.

    Templates that write them with `tojson` would quote a text again.
    """
    return _finds_probe(template, variables, _with_tool_call({_PROBE: 1}))


def takes_argument_text(template: CompiledTemplate, variables: Mapping[str, Any]) -> bool:
    """Return whether a tool call's arguments may be a text that the template writes unchanged.

    This fails for templates that iterate over an object's entries.
    """
    return _finds_probe(template, variables, _with_tool_call(_PROBE))


def _finds_probe(
    template: CompiledTemplate, variables: Mapping[str, Any], messages: list[dict[str, Any]]
) -> bool:
    """Return whether a template extracts _PROBE from its object instead of printing it."""
    nothing: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
    try:
        text = template.render({**variables, "messages": messages, **nothing})
    except (InvalidParameter, TokenizerError):
        return False
    return _PROBE in text and f"'{_PROBE}'" not in text and '"text"' not in text


def _with_tool_call(arguments: object) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def argument_objects(
    template: CompiledTemplate,
    variables: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    """Return messages with JSON text of arguments parsed, if the template needs objects.

    Arguments written by a model may be invalid JSON and come back so: they stay text if the
    template can write text. Raises InvalidParameter if it cannot.
    """
    if not takes_argument_objects(template, variables):
        return messages

    def takes_text() -> bool:
        return takes_argument_text(template, variables)

    return [_with_objects(at, message, takes_text) for at, message in enumerate(messages)]


def _with_objects(
    at: int, message: Mapping[str, Any], takes_text: Callable[[], bool]
) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    place = f"messages[{at}].tool_calls"
    return {
        **message,
        "tool_calls": [
            _with_object(call, f"{place}[{i}]", takes_text) for i, call in enumerate(calls)
        ],
    }


def _with_object(call: Any, place: str, takes_text: Callable[[], bool]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments) if arguments.strip() else {}
        json.dumps(value, ensure_ascii=False).encode()  # JSON can escape lone surrogates
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return {**call, "function": {**function, "arguments": value}}
    if not takes_text():
        raise InvalidParameter(
            f"{place}.function.arguments is {show(arguments)}, which is not the text of a JSON "
            "object; this model's template needs one",
            param="messages",
        )
    return call


def with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text parts joined by line breaks."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidParameter(
                f"a message has a content part of type {str(kind)[:40]!r}; this model takes parts "
                'of the form {"type": "text", "text": "..."}',
                param="messages",
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def render_open(template: CompiledTemplate, values: dict[str, Any]) -> str:
    """Return the text up to the end of the last message's content."""
    messages = values["messages"]
    content = messages[-1].get("content") if messages else None
    said, opened = _opened(content)
    last = {**messages[-1], "content": opened} if messages else {}
    text = template.render({**values, "messages": [*messages[:-1], last]})
    mark = _OPEN_END.strip()
    if said.strip() not in text or mark not in text:
        raise InvalidParameter(
            f"continue_final_message is true, but chat template {template.name!r} does not write "
            "the content of the last message as it is, so the text cannot be cut where it ends; "
            "leave continue_final_message out",
            param="continue_final_message",
        )
    at = text.rindex(mark)
    if text.startswith(_OPEN_END, at):
        return text[:at]
    return text[:at].rstrip()  # the template strips the end of a message


def _opened(content: Any) -> tuple[str, Any]:
    """Return the last text of a message's content, and the content with the mark after it."""
    if isinstance(content, str):
        return content, content + _OPEN_END
    parts = list(content) if isinstance(content, list | tuple) else []
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], dict) and isinstance(parts[at].get("text"), str):
            said = parts[at]["text"]
            parts[at] = {**parts[at], "text": said + _OPEN_END}
            return said, parts
    raise InvalidParameter(
        "continue_final_message is true, but the last message has no text to continue; give it "
        "content",
        param="continue_final_message",
    )

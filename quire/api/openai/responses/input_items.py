"""Check the items of `input`: messages, calls, outputs of calls, reasoning.

Every item that is returned has its type and is of the form that OpenAI documents; a text as input
is one message of the user. Always holds: an item, a part or a key that would change the prompt is
accepted, or refused with its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.generation.conversation import MAX_MESSAGES
from quire.api.generation.foreign_fields import BREAKPOINT, check_options
from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.output_parsers.parsed_answer import PHASES

Item = dict[str, Any]

_EXAMPLE = '{"role": "user", "content": "Hello"}'
_ROLES = ("user", "assistant", "system", "developer")
# The keys of each type of item. Of those with a value here, only this value is accepted.
_OF_EVERY_ITEM: Mapping[str, Any] = {"type": ..., "id": ..., "status": ...}
_CALL: Mapping[str, Any] = {"call_id": ..., "name": ..., "arguments": ..., "parsed_arguments": ...}
_DIRECT = {"caller": {"type": "direct"}}
_KEYS: Mapping[str, Mapping[str, Any]] = {
    "message": {**_OF_EVERY_ITEM, "role": ..., "content": ..., "phase": ...},
    "function_call": {**_OF_EVERY_ITEM, **_CALL, "namespace": ..., **_DIRECT},
    "function_call_output": {
        **_OF_EVERY_ITEM,
        **{"call_id": ..., "name": ..., "namespace": ..., "output": ...},
        **_DIRECT,
    },
    "reasoning": {**_OF_EVERY_ITEM, "summary": ..., "content": ..., "encrypted_content": ...},
    "item_reference": {"type": ..., "id": ...},
}
# Keys of parts that have no effect on the prompt.
_OF_TEXT = {"type", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint"}
_OF_USER, _OF_ASSISTANT = {"input_text": "text"}, {"output_text": "text", "refusal": "refusal"}
_MEDIA = ("input_image", "input_file", "input_audio")


def checked_items(given: Any, *, may_be_empty: bool = False) -> list[Item]:
    """Return the items of `input`. Raises InvalidParameter with the path of what is wrong.

    may_be_empty: the request continues a conversation.
    """
    if may_be_empty and (given is None or given == []):
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        found = "missing" if given is None else show(given)
        raise fault(
            f"input is {found}; a text is allowed, or a list of at least one item, such as "
            f"[{_EXAMPLE}]"
        )
    if len(given) > MAX_MESSAGES:
        raise fault(f"input has {len(given)} items; at most {MAX_MESSAGES} are allowed")
    return [_item(f"input[{at}]", item) for at, item in enumerate(given)]


def fault(message: str, param: str = "input") -> InvalidParameter:
    """Return the error of an item."""
    return InvalidParameter(message, param=param)


def texts_of(parts: Any) -> list[str]:
    """Return the texts of a content that was checked."""
    if isinstance(parts, str):
        return [parts]
    return [str(part.get("text", part.get("refusal"))) for part in parts or ()]


def _item(path: str, item: Any) -> Item:
    if not isinstance(item, dict):
        raise fault(f"{path} is {show(item)}; an object such as {_EXAMPLE} is allowed")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise fault(
            f"{path}.type is {show(kind)}; {', '.join(_KEYS)} are allowed: this server has no "
            "tools of its own, and so no items of such tools"
        )
    keys = _KEYS[kind]
    for key, value in item.items():
        if value is None:
            continue
        if key not in keys:
            raise fault(
                f"{path} has {show(key)}, which an item of type {kind} does not have here; leave "
                "it out"
            )
        if keys[key] is not ... and value != keys[key]:
            raise fault(
                f"{path}.{key} is {show(value)}, which is not supported; {show(keys[key])} is, or "
                "leave it out"
            )
    checked = {key: value for key, value in item.items() if value is not None}
    checked["type"] = kind
    for key in ("id", "status"):
        if not isinstance(item.get(key), str | None):
            raise fault(f"{path}.{key} is {show(item[key])}; a text is allowed")
    _CHECKS[kind](path, checked)
    return checked


def _text(path: str, item: Mapping[str, Any], key: str, words: str = "a text") -> str:
    value = item.get(key)
    if not isinstance(value, str) or (words != "a text" and not value):
        found = "missing" if value is None else show(value)
        raise fault(f"{path}.{key} is {found}; {words} is needed")
    return value


def _message(path: str, item: Item) -> None:
    role = item.get("role")
    if role not in _ROLES:
        found = "missing" if role is None else show(role)
        raise fault(f"{path}.role is {found}; {', '.join(_ROLES)} are allowed")
    if item.get("phase", PHASES[0]) not in PHASES:
        raise fault(f"{path}.phase is {show(item['phase'])}; {' and '.join(PHASES)} are allowed")
    _content(
        f"{path}.content", item.get("content"), _OF_ASSISTANT if role == "assistant" else _OF_USER
    )


def _content(path: str, content: Any, kinds: Mapping[str, str]) -> None:
    """Check a text, or a list of parts of these types. kinds: the key of each with its text."""
    if isinstance(content, str):
        return
    form = f'{{"type": "{next(iter(kinds))}", "text": "..."}}'
    if not isinstance(content, list):
        found = "missing" if content is None else show(content)
        raise fault(f"{path} is {found}; a text is allowed, or a list of parts such as {form}")
    for at, part in enumerate(content):
        place = f"{path}[{at}]"
        if not isinstance(part, dict):
            raise fault(f"{place} is {show(part)}; a part such as {form} is allowed")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            why = "; the model reads text only" if kind in _MEDIA else ""
            raise fault(
                f"{place}.type is {show(kind)}; {' and '.join(kinds)} "
                f"{'is' if len(kinds) == 1 else 'are'} allowed here{why}"
            )
        for key in part.keys() - _OF_TEXT - {kinds[kind]}:
            if part[key] is not None:
                raise fault(
                    f"{place} has {show(key)}, which a part of type {kind} does not have here; "
                    "leave it out"
                )
        point = part.get("prompt_cache_breakpoint")
        if point is not None:
            check_options(f"{place}.prompt_cache_breakpoint", point, BREAKPOINT, param="input")
        _text(place, part, kinds[kind])


def _call(path: str, item: Item) -> None:
    _text(path, item, "call_id", "the id of the call")
    _text(path, item, "name", "the name of a function")
    if "namespace" in item:
        _text(path, item, "namespace", "the name of a namespace")
    _text(path, item, "arguments")


def _output(path: str, item: Item) -> None:
    _text(path, item, "call_id", "the id of a call")
    if "name" in item:
        _text(path, item, "name", "the name of the call's function")
    if "namespace" in item:
        _text(path, item, "namespace", "the name of a namespace")
    _content(f"{path}.output", item.get("output"), _OF_USER)


def _reasoning(path: str, item: Item) -> None:
    item.setdefault("summary", [])  # which items have when they are returned
    for key, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = item.get(key, [])
        if not isinstance(parts, list):
            raise fault(f"{path}.{key} is {show(parts)}; a list of parts is allowed")
        _content(f"{path}.{key}", parts, {kind: "text"})
    if "encrypted_content" in item:
        _text(path, item, "encrypted_content")


def _reference(path: str, item: Item) -> None:
    _text(path, item, "id", "the id of an item")


_CHECKS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
    "item_reference": _reference,
}

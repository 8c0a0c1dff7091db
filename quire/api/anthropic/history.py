"""Convert `system` and `messages` of the Messages API to the messages that chat templates read.

Text, tool_use, tool_result and thinking blocks become the content, tool_calls, tool messages and
reasoning_content of OpenAI's form. Consecutive messages of a role are one turn, as in Anthropic's
API. A system message among them stays in its place, and so does a mid_conv_system block.
redacted_thinking is left out: only Anthropic can decrypt it. Always holds: a block or a key that
would change the prompt is converted, or refused with its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

_TTLS = ("5m", "1h")
# Of a cached prefix; coding agents send it. A prefix is found by all requests of a tenant.
SCOPES = ("global", "organization")
_TEXT = '{"type": "text", "text": "..."}'
_CALLER = {"type": "direct"}
# The keys of each type of block; of those with a value here, only this value is accepted.
_KEYS: Mapping[str, Mapping[str, Any]] = {
    "text": {"text": ..., "cache_control": ..., "citations": []},
    "tool_use": {"id": ..., "name": ..., "input": ..., "cache_control": ..., "caller": _CALLER},
    "tool_result": {"tool_use_id": ..., "content": ..., "is_error": ..., "cache_control": ...},
    "mid_conv_system": {"content": ..., "cache_control": ...},
    "thinking": {"thinking": ..., "signature": ...},
    "redacted_thinking": {"data": ...},
}
# Anthropic has twice as many; a body with more arrays and objects than that is refused unread.
MAX_MESSAGES = 50_000
_OF_ROLE = {
    "system": ("text",),
    "user": ("text", "tool_result", "mid_conv_system"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
_ERROR = "Error: "

Block = tuple[str, dict[str, Any]]  # its path, and the block


@dataclass(frozen=True, slots=True)
class History:
    """Messages in OpenAI's form. continues: the last one is the beginning of the answer."""

    messages: list[dict[str, Any]]
    continues: bool


def history_of(system: Any, messages: Any) -> History:
    """Return the messages of a request. Raises InvalidParameter with the path of what is wrong."""
    turns = _turns(messages)
    said = _said(system, turns)
    role, blocks = turns[-1]
    if role == "assistant" and (not blocks or blocks[-1][1]["type"] != "text"):
        raise _fault(
            "messages ends with a message of the assistant, which the answer continues, and that "
            "message does not end with text; end with a message of the user"
        )
    return History(said, role == "assistant")


def beginning_of(system: Any, messages: Any) -> list[dict[str, Any]]:
    """Return the messages of the beginning of a request, which may end after any block."""
    return _said(system, _turns(messages))


def _said(system: Any, turns: list[tuple[str, list[Block]]]) -> list[dict[str, Any]]:
    names: dict[str, str] = {}  # of tools, by the id of the call
    said = [{"role": "system", "content": text} for text in _system(system)]
    for role, blocks in turns:
        if role == "system":
            said.append({"role": role, "content": _content(blocks)})
        else:
            said += _assistant(blocks, names) if role == "assistant" else _user(blocks, names)
    return said


def check_cache_control(path: str, value: Any) -> None:
    """Check a breakpoint of the cache."""
    if value is None:
        return
    if (
        not isinstance(value, dict)
        or value.get("type") != "ephemeral"
        or value.get("ttl") not in (None, *_TTLS)
        or value.get("scope") not in (None, *SCOPES)
        or value.keys() - {"type", "ttl", "scope"}
    ):
        raise InvalidParameter(
            f'{path} is {show(value)}; {{"type": "ephemeral"}} is allowed, with a ttl of '
            f"{' or '.join(map(json.dumps, _TTLS))}",
            param=path.partition("[")[0].partition(".")[0],
        )


def _fault(message: str, param: str = "messages") -> InvalidParameter:
    return InvalidParameter(message, param=param)


def _system(system: Any) -> list[Any]:
    """Return the content of the system message, if there is one."""
    if system is None or system in ("", []):
        return []
    if isinstance(system, str):
        return [system]
    return [_content(_blocks("system", system, ("text",), "system"))]


def _turns(messages: Any) -> list[tuple[str, list[Block]]]:
    """Return the blocks of each turn, with their roles."""
    if not isinstance(messages, list) or not messages:
        found = "missing" if messages is None else show(messages)
        raise _fault(
            f"messages is {found}; a list of at least one message is needed, such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    if len(messages) > MAX_MESSAGES:
        raise _fault(f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed")
    turns: list[tuple[str, list[Block]]] = []
    for at, message in enumerate(messages):
        place = f"messages[{at}]"
        if not isinstance(message, dict):
            raise _fault(f"{place} is {show(message)}; an object with role and content is allowed")
        role = message.get("role")
        if not isinstance(role, str) or role not in _OF_ROLE:
            raise _fault(f"{place}.role is {show(role)}; user, assistant and system are allowed")
        for key in message.keys() - {"role", "content"}:
            if message[key] is not None:
                raise _fault(f"{place} has {show(key)}; role and content are allowed")
        blocks = _blocks(f"{place}.content", message.get("content"), _OF_ROLE[role], "messages")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _blocks(path: str, content: Any, allowed: tuple[str, ...], param: str) -> list[Block]:
    """Return the blocks of a content, checked; a string is one block of text."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        found = "missing" if content is None else show(content)
        raise _fault(
            f"{path} is {found}; a text is allowed, or a list of blocks such as {_TEXT}", param
        )
    return [
        (f"{path}[{at}]", _block(f"{path}[{at}]", block, allowed, param))
        for at, block in enumerate(content)
    ]


def _block(path: str, block: Any, allowed: tuple[str, ...], param: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise _fault(f"{path} is {show(block)}; a block such as {_TEXT} is allowed", param)
    kind = block.get("type")
    if kind not in allowed:
        why = "; the model reads text only" if kind in ("image", "document") else ""
        raise _fault(
            f"{path}.type is {show(kind)}; {', '.join(allowed)} "
            f"{'is' if len(allowed) == 1 else 'are'} allowed here{why}",
            param,
        )
    keys = _KEYS[kind]
    for key, value in block.items():
        if key == "type" or value is None:
            continue
        if key not in keys:
            raise _fault(
                f"{path} has {show(key)}, which a block of type {kind} does not have here; "
                "leave it out",
                param,
            )
        if keys[key] is not ... and value != keys[key]:
            raise _fault(
                f"{path}.{key} is {show(value)}, which is not supported; {show(keys[key])} is, "
                "or leave it out",
                param,
            )
    check_cache_control(f"{path}.cache_control", block.get("cache_control"))
    if kind == "text":
        _text(path, block, "text", param)
    return block


def _text(path: str, block: Mapping[str, Any], key: str, param: str = "messages") -> str:
    value = block.get(key)
    if not isinstance(value, str):
        found = "missing" if value is None else show(value)
        raise _fault(f"{path}.{key} is {found}; a text is needed", param)
    return value


def _content(blocks: list[Block]) -> Any:
    """Return the content of blocks of text: a text, or several as parts."""
    if len(blocks) == 1:
        return blocks[0][1]["text"]
    return [{"type": "text", "text": block["text"]} for _, block in blocks] or ""


def _user(blocks: list[Block], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a message for each result and system block, and one for the texts between them."""
    texts: list[Block] = []
    for path, block in blocks:
        if block["type"] == "text":
            texts.append((path, block))
            continue
        if texts:
            yield {"role": "user", "content": _content(texts)}
            texts = []
        if block["type"] == "mid_conv_system":
            given = _blocks(f"{path}.content", block.get("content"), ("text",), "messages")
            yield {"role": "system", "content": _content(given)}
        else:
            yield _result(path, block, names)
    if texts or not blocks:
        yield {"role": "user", "content": _content(texts)}


def _result(path: str, block: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the message of a tool's result; the content of an error says so."""
    id_ = _text(path, block, "tool_use_id")
    if id_ not in names:
        raise _fault(
            f"{path}.tool_use_id is {show(id_)}, and no earlier message has a tool_use block with "
            "that id; send the assistant's message with it"
        )
    given, is_error = block.get("content"), block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise _fault(f"{path}.is_error is {show(is_error)}; true or false is allowed")
    blocks = [] if given is None else _blocks(f"{path}.content", given, ("text",), "messages")
    content = _content(blocks)
    if is_error and isinstance(content, str):
        content = _ERROR + content
    elif is_error:
        content[0]["text"] = _ERROR + content[0]["text"]
    return {"role": "tool", "tool_call_id": id_, "name": names[id_], "content": content}


def _assistant(blocks: list[Block], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn: one, or a further one for blocks that follow a call."""
    texts: list[Block] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []

    def message() -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": _content(texts)}
        if thoughts:
            said["reasoning_content"] = said["reasoning"] = "\n".join(thoughts)
        if calls:
            said["tool_calls"] = list(calls)
            said["content"] = said["content"] or None
        return said

    for path, block in blocks:
        if calls and block["type"] != "tool_use":
            yield message()
            texts, thoughts, calls = [], [], []
        match block["type"]:
            case "text":
                texts.append((path, block))
            case "thinking":
                if thought := _text(path, block, "thinking"):  # "" if its display was omitted
                    thoughts.append(thought)
                if not isinstance(block.get("signature"), str | None):
                    _text(path, block, "signature")
            case "redacted_thinking":
                _text(path, block, "data")
            case _:
                calls.append(_call(path, block, names))
    yield message()


def _call(path: str, block: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    id_, name = _text(path, block, "id"), _text(path, block, "name")
    given = block.get("input")
    if not name or not isinstance(given, dict):
        key, value = ("input", given) if name else ("name", name)
        words = "an object" if name else "the name of a tool"
        raise _fault(f"{path}.{key} is {show(value)}; {words} is needed")
    names[id_] = name
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": id_, "type": "function", "function": function}

"""Convert checked items to the messages that chat templates read.

Reasoning, text and calls that follow each other are one message of the assistant. Reasoning is
read from `content`, or from the `encrypted_content` of this server, which is its text in base64;
of other servers' reasoning items nothing can be read, so they are left out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

from quire.api.openai.responses.input_items import Item, fault, texts_of
from quire.api.openai.responses.namespaces import full_name
from quire.base.show import show
from quire.output_parsers.parsed_answer import PHASES

_OWN = "quire:"  # before the base64 of a text


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Raises InvalidParameter for an output without call."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    turn, names = _Turn(), dict[str, str]()
    for item in items:
        kind = item["type"]
        if kind == "function_call":
            names[item["call_id"]] = full_name(item)
        of_assistant = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        if not of_assistant or turn.is_full_for(item):
            messages += turn.end()
            turn = _Turn()
        if of_assistant:
            turn.add(item)
        else:
            messages.append(_other(item, names))
    return [*messages, *turn.end()]


def sealed(text: str) -> str:
    """Return the encrypted_content of reasoning: an encoding, which keeps nothing secret."""
    return _OWN + base64.b64encode(text.encode(errors="surrogatepass")).decode()


def _unsealed(content: str) -> str:
    """Return the text in an encrypted_content; "" if it is not of this server."""
    if not content.startswith(_OWN):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_OWN), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


class _Turn:
    """One message of the assistant, made of its items."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._content: Any = None
        self._phase: str | None = None
        self._calls: list[dict[str, Any]] = []

    def is_full_for(self, item: Item) -> bool:
        """Return whether an item begins another message."""
        if item["type"] == "function_call":
            return False
        if self._phase == PHASES[0] and item.get("phase") == PHASES[1]:
            return bool(self._calls)
        return bool(self._calls) or self._content is not None

    def add(self, item: Item) -> None:
        if item["type"] == "reasoning":
            texts = texts_of(item.get("content")) or [_unsealed(item.get("encrypted_content", ""))]
            self._thoughts += [text for text in texts if text]
        elif item["type"] == "message":
            content = _content(item["content"])
            self._content = content if self._content is None else _both(self._content, content)
            self._phase = item.get("phase")
        else:
            function = {"name": full_name(item), "arguments": item["arguments"]}
            self._calls.append({"id": item["call_id"], "type": "function", "function": function})

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the message, if there is one."""
        if self._content is None and not self._calls and not self._thoughts:
            return
        message = {"role": "assistant", "content": self._content}
        if self._phase is not None:  # as other keys of messages, for templates that read it
            message["phase"] = self._phase
        if self._thoughts:
            message["reasoning_content"] = message["reasoning"] = "\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = self._content or None
        elif self._content is None:
            message["content"] = ""
        yield message


def _other(item: Item, names: dict[str, str]) -> dict[str, Any]:
    """Return the message of an item that is not of the assistant."""
    if item["type"] == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": _content(item["content"])}
    id_ = item["call_id"]
    if id_ not in names:
        raise fault(
            f"an item of type function_call_output has the call_id {show(id_)}, and no earlier "
            "item is a function_call with it; send that item, or the previous_response_id of the "
            "response that has it"
        )
    if "name" in item and full_name(item) != names[id_]:
        raise fault(
            f"an item of type function_call_output has the name {show(item['name'])}, and the "
            f"function_call with its call_id the name {show(names[id_])}; leave the name out"
        )
    return {
        "role": "tool",
        "tool_call_id": id_,
        "name": names[id_],
        "content": _content(item["output"]),
    }


def _both(commentary: Any, answer: Any) -> Any:
    """Return two contents as one, as chats have it."""
    if isinstance(commentary, str) and isinstance(answer, str):
        return f"{commentary}\n{answer}"
    listed = [
        [{"type": "text", "text": one}] if isinstance(one, str) else one
        for one in (commentary, answer)
    ]
    return [*listed[0], *listed[1]]


def _content(content: Any) -> Any:
    """Return a content as templates take it: a text, or several as parts."""
    texts = texts_of(content)
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]

"""Content blocks of an answer: thinking, text, tool_use, as events of a stream and whole.

A whole answer is the events of its blocks joined, so both have the same blocks. Thinking is signed
with a digest of its text, which may be left out; requests that send it back are not checked for it.
Keys that have no meaning here are null, for clients that read them. Arguments of a call
that are not a JSON object are returned as {"INVALID_JSON": text}, the form that Anthropic
recommends.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from quire.output_parsers.parsed_answer import AnswerPiece

INVALID_JSON = "INVALID_JSON"
Event = dict[str, Any]

_BLOCKS: dict[str, Event] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},  # the AI SDK takes no citations: null
}
# Of a call: the model itself makes it, and tools are not in sets.
_CALL: Event = {"type": "tool_use", "caller": {"type": "direct"}, "toolset_name": None}
# The type of a delta, and its key that has the text.
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "arguments": ("input_json_delta", "partial_json"),
}


class BlockEvents:
    """The events of the content blocks of one answer. call_id: returns the id of a call.
    hides_thinking: blocks of thinking have their signature only."""

    def __init__(self, call_id: Callable[[int], str], *, hides_thinking: bool = False) -> None:
        self._call_id = call_id
        self._hides_thinking = hides_thinking
        self._index = -1
        self._kind = ""  # of the open block; "" between blocks
        self._digest = hashlib.sha256()

    def of_pieces(self, pieces: Iterable[AnswerPiece]) -> Iterator[Event]:
        """Yield the events of more pieces of the answer."""
        for piece in pieces:
            if piece.kind == "call":
                named = {"id": self._call_id(piece.call), "name": piece.text, "input": {}}
                yield from self._open("arguments", {**_CALL, **named})
                continue
            if piece.kind != self._kind:
                yield from self._open(piece.kind, dict(_BLOCKS[piece.kind]))
            if piece.kind == "reasoning":
                self._digest.update(piece.text.encode(errors="surrogatepass"))
                if self._hides_thinking:
                    continue
            yield self._delta(piece.kind, piece.text)

    def of_text(self, text: str) -> Event | None:
        """Return the event of more text; None if no block of text is open."""
        return self._delta("content", text) if self._kind == "content" else None

    def close(self) -> Iterator[Event]:
        """Yield the events that end the open block."""
        if self._kind == "reasoning":
            signature = base64.b64encode(self._digest.digest()).decode()
            yield self._event({"type": "signature_delta", "signature": signature})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _open(self, kind: str, block: Event) -> Iterator[Event]:
        yield from self.close()
        self._kind, self._index = kind, self._index + 1
        self._digest = hashlib.sha256()
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, text: str) -> Event:
        name, key = _DELTAS[kind]
        return self._event({"type": name, key: text})

    def _event(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def joined_blocks(events: Iterable[Event]) -> list[Event]:
    """Return the blocks that the events of a whole answer make."""
    blocks: list[Event] = []
    texts: dict[str, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts = {}
        elif event["type"] == "content_block_delta":
            for key, text in event["delta"].items():
                if key != "type":
                    texts.setdefault(key, []).append(text)
        else:
            whole = {key: "".join(parts) for key, parts in texts.items()}
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = _input(whole.get("partial_json", ""))
            else:
                blocks[-1] |= whole
    return blocks


def _input(arguments: str) -> Any:
    """Return the arguments of a call; numbers keep the digits that the model wrote."""
    if not arguments.strip():
        return {}
    try:
        is_object = isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, ValueError, RecursionError):
        is_object = False
    return msgspec.Raw(arguments.encode()) if is_object else {INVALID_JSON: arguments}

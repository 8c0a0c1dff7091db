"""The output of a response: reasoning, messages and calls, as events and as items.

`items` has what the events make, so a whole answer has the items of the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.api.openai.responses.history import sealed
from quire.api.openai.responses.item_ids import item_id
from quire.output_parsers.parsed_answer import AnswerPiece

Event = dict[str, Any]
_TYPES = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
# The events of a text, by the kind of its pieces.
_EVENTS = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class OutputItems:
    """The output of one response. call_id: returns the id of a call. seals: reasoning gets
    encrypted_content. namespaces: of functions in one, namespace and name by full name."""

    def __init__(
        self,
        response_id: str,
        call_id: Callable[[int], str],
        *,
        seals: bool,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._response_id = response_id
        self._call_id = call_id
        self._seals = seals
        self._namespaces = namespaces
        self._kind = self._phase = ""  # of the open item; "" between items
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def of_pieces(
        self, pieces: Iterable[AnswerPiece], logprobs: Sequence[Any] = ()
    ) -> Iterator[Event]:
        """Yield the events of more pieces of the answer. logprobs: of the tokens of the first
        piece that is content."""
        for piece in pieces:
            if piece.kind == "call":
                namespace, name = self._namespaces.get(piece.text, (None, piece.text))
                named = {"call_id": self._call_id(piece.call), "name": name, "arguments": ""}
                if namespace is not None:
                    named["namespace"] = namespace
                yield from self._open("call", named)
                continue
            kind = "call" if piece.kind == "arguments" else piece.kind
            text = piece.text
            if kind != self._kind or piece.phase != self._phase:
                more: dict[str, Any] = (
                    {"role": "assistant"} if kind == "content" else {"summary": []}
                )
                if piece.phase:
                    more["phase"] = piece.phase
                yield from self._open(kind, {**more, "content": []}, piece.phase)
            if piece.phase and not any(self._texts):
                text = text.lstrip()  # white space before a paragraph is between messages here
            self._texts.append(text)
            delta: dict[str, Any] = {"delta": text}
            if kind == "content":
                delta["logprobs"] = list(logprobs)
                self._logprobs += logprobs
                logprobs = ()
            yield self._event(f"{_EVENTS[kind]}.delta", **delta)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Yield the events that end the open item."""
        if not self._kind:
            return
        item, kind, text = self.items[-1], self._kind, "".join(self._texts)
        if kind == "call":
            item["arguments"] = text
            yield self._event(f"{_EVENTS[kind]}.done", name=item["name"], arguments=text)
        else:
            part = self._part(text, self._logprobs)
            item["content"] = [part]
            more = {"logprobs": self._logprobs} if kind == "content" else {}
            yield self._event(f"{_EVENTS[kind]}.done", text=text, **more)
            yield self._event("response.content_part.done", part=part)
        if kind == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        item["status"] = status
        self._kind = ""
        yield self._of_item("response.output_item.done")

    def _open(self, kind: str, fields: dict[str, Any], phase: str = "") -> Iterator[Event]:
        yield from self.close()
        self._kind, self._phase, self._texts, self._logprobs = kind, phase, [], []
        name = _TYPES[kind]
        id_ = item_id(name, self._response_id, len(self.items), is_output=True)
        self.items.append({"id": id_, "type": name, "status": "in_progress", **fields})
        yield self._of_item("response.output_item.added")
        if kind != "call":
            yield self._event("response.content_part.added", part=self._part("", []))

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _of_item(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _event(self, kind: str, **fields: Any) -> Event:
        at = {} if self._kind == "call" else {"content_index": 0}
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, **at, **fields}

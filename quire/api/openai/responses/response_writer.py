"""Write an answer as a response, whole or as events.

A stream is response.created and response.in_progress before the first text, the events of the
items (output_items.py), and response.completed or response.incomplete with the usage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from quire.api.generation.answer_json import drafts_json
from quire.api.generation.chat_output import ChatOutputParser
from quire.api.generation.choice_streams import Choice, PromptState
from quire.api.generation.usage import Usage
from quire.api.openai.logprobs import chat_logprobs
from quire.api.openai.responses.output_items import OutputItems
from quire.base.records import FinishReason
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText
from quire.output_parsers.parsed_answer import AnswerPiece

# The codes of failed responses, by the type of the error.
FAILURES = {
    "rate_limit_error": "rate_limit_exceeded",
    "invalid_request_error": "invalid_prompt",
    "server_error": "server_error",
}


class ResponseWriter:
    """Write one answer. frame: the fields of the response that are known before the answer.

    parser: None if the answer has neither reasoning nor calls. logprobs: texts have those of their
    tokens. seals, namespaces: as of OutputItems.
    """

    def __init__(
        self,
        frame: dict[str, Any],
        parser: ChatOutputParser | None,
        *,
        logprobs: bool = False,
        seals: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self._parser = None if parser is None else parser.choice(0)
        self._frame = frame
        self._status = "queued" if frame["background"] else "in_progress"
        self._has_logprobs = logprobs
        self._items = OutputItems(
            frame["id"], self._call_id, seals=seals, namespaces=namespaces or {}
        )
        self._waiting: list[tuple[str, TokenText]] = []  # texts and tokens that no piece has yet
        self._num_chars = 0
        self._begun = self._running = False
        self.final: dict[str, Any] | None = None  # the response once it has ended

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the response."""
        choice = choices[0][0]
        self._frame["seed"] = choice.seed
        for _ in self._events(choice.text, choice.token_chars, choice.logprobs, ends=True):
            pass
        self._end(choice.finish_reason)
        return self._ended(usage)

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the first events, unless they were yielded before."""
        if not self._begun:
            self._begun = True
            yield {"type": "response.created", "response": self.snapshot()}
            if self._status == "queued":
                yield {"type": "response.queued", "response": self.snapshot()}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the first events before the first text, and the events of the items."""
        self._frame["seed"] = delta.seed
        yield from self.begin()
        if not self._running:
            self._running, self._status = True, "in_progress"
            yield {"type": "response.in_progress", "response": self.snapshot()}
        ends = delta.finish_reason is not None
        yield from self._events(delta.text, delta.token_chars, delta.logprobs, ends=ends)
        if ends:
            yield from self._end(delta.finish_reason)

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """Return None: the last events repeat the text, so each delta is read."""
        return None

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Not used: the route has no field that asks for progress."""
        raise NotImplementedError

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return nothing: the route has no field that asks for continuous usage."""
        return {}

    def of_usage(self, usage: Usage) -> dict[str, Any]:
        """Return the last event."""
        return {"type": f"response.{self._status}", "response": self._ended(usage)}

    def snapshot(self) -> dict[str, Any]:
        """Return the response as it is now."""
        output = [dict(item) for item in self._items.items]
        return {**self._frame, "status": self._status, "output": output}

    def fail(self, error: dict[str, Any]) -> dict[str, Any]:
        """Return the response after an error, given as its body has it."""
        for _ in self._items.close("incomplete"):
            pass
        self._status = "failed"
        kept = {name: error[name] for name in ("message", "param", "type")}
        self._frame["error"] = {"code": FAILURES[error["type"]], **kept}
        return self.snapshot()

    def cancel(self) -> dict[str, Any]:
        """Return the response after a cancellation."""
        for _ in self._items.close("incomplete"):
            pass
        self._status = "cancelled"
        return self.snapshot()

    def _events(
        self, text: str, token_chars: Sequence[int], tokens: Sequence[TokenText], *, ends: bool
    ) -> Iterator[dict[str, Any]]:
        if not self._has_logprobs:
            yield from self._items.of_pieces(self._pieces(text, token_chars, ends=ends))
            return
        for part, token in self._parts(text, tokens):
            if token is not None:
                self._waiting.append((part, token))
            for piece in self._pieces(part, token_chars):
                yield from self._items.of_pieces([piece], self._logprobs_of(piece))
            token_chars = ()
        for piece in self._pieces("", (), ends=True) if ends else ():
            yield from self._items.of_pieces([piece], self._logprobs_of(piece))

    def _logprobs_of(self, piece: AnswerPiece) -> list[Any]:
        """Return the log-probabilities of a piece of content; drop the tokens before it."""
        if piece.kind != "content":
            return []
        waiting, said = "".join(text for text, _ in self._waiting), piece.text
        if said not in waiting:  # a line break before a paragraph is not of the model
            said = said.removeprefix("\n")
        begin = max(waiting.rfind(said), 0)
        at, found, rest = 0, list[TokenText](), list[tuple[str, TokenText]]()
        for text, token in self._waiting:
            if at >= begin + len(said):
                rest.append((text, token))
            elif at + max(len(text), 1) > begin:
                found.append(token)
            at += len(text)
        self._waiting = rest
        return list(chat_logprobs(found)["content"])

    def _parts(self, text: str, tokens: Sequence[TokenText]) -> list[tuple[str, TokenText | None]]:
        """Return the text of each token, so that reasoning and content have their own tokens."""
        begin, self._num_chars = self._num_chars, self._num_chars + len(text)
        starts = [min(max(token.start_chars - begin, 0), len(text)) for token in tokens]
        parts: list[tuple[str, TokenText | None]] = [(text[: [*starts, len(text)][0]], None)]
        for token, (at, end) in zip(tokens, pairwise([*starts, len(text)]), strict=True):
            parts.append((text[at:end], token))
        return parts

    def _pieces(
        self, text: str, token_chars: Sequence[int], *, ends: bool = False
    ) -> list[AnswerPiece]:
        if self._parser is not None:
            return self._parser.pieces(text, token_chars, ends=ends)
        return [AnswerPiece("content", text)] if text else []

    def _call_id(self, index: int) -> str:
        assert self._parser is not None, "only a parser finds calls"
        return self._parser.call_id(index)

    def _end(self, reason: FinishReason | None) -> Iterator[dict[str, Any]]:
        """Set the status, and return the events that end the last item."""
        at_length = reason is FinishReason.LENGTH
        self._status = "incomplete" if at_length else "completed"
        if at_length:
            self._frame["incomplete_details"] = {"reason": "max_output_tokens"}
        return iter([*self._items.close(self._status)])

    def _ended(self, usage: Usage) -> dict[str, Any]:
        """Return the response after its end."""
        reasoning_tokens = 0 if self._parser is None else self._parser.reasoning_tokens
        self._frame["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,  # see usage_json
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens, **drafts_json(usage)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._status == "completed":
            self._frame["completed_at"] = int(time.time())
        self.final = self.snapshot()
        return self.final

"""Write an answer in the form of Ollama's API, whole or as lines.

A chat has its text in `message`, a completion in `response`; both have the counts and durations in
the last object. A tool call is one object: it is written when it is complete. Arguments that are
not a JSON object are written as {"INVALID_JSON": text}. Times are those of the engine; nothing here
loads a model, so load_duration is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.api.generation.answer_json import finite
from quire.api.generation.chat_output import ChatOutputParser
from quire.api.generation.choice_streams import Choice, PromptState
from quire.api.generation.generate import Envelope
from quire.api.generation.usage import Usage
from quire.base.records import FinishReason
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText
from quire.output_parsers.parsed_answer import AnswerPiece

INVALID_JSON = "INVALID_JSON"
_NS_PER_MS = 1e6


class AnswerWriter:
    """Write one answer.

    parser: None if the answer has neither reasoning nor calls. is_chat: the text is in `message`.
    num_top: alternatives of each token, None for no log-probabilities. prompt_ids: of `context`,
    which repeats them before those of the answer; None: it is not returned.
    """

    def __init__(
        self,
        envelope: Envelope,
        parser: ChatOutputParser | None,
        *,
        is_chat: bool,
        num_top: int | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        self._parser = None if parser is None else parser.choice(0)
        self._frame = {"model": envelope.model, "created_at": moment(envelope.created_s)}
        self._is_chat = is_chat
        self._num_top = num_top
        self._context = None if prompt_ids is None else [*prompt_ids]
        self._call: list[str] = []  # the name and the arguments of the call that is being written
        self._num_calls = 0
        self._reason: FinishReason | None = None
        self._seed: int | None = None

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choice = choices[0][0]
        pieces = self._pieces(choice.text, choice.token_chars, ends=True)
        parts = [*self._parts(pieces), *self._ended_call()]
        said: dict[str, Any] = {"content": ""}
        for part in parts:
            for key, value in part.items():
                said[key] = said[key] + value if key in said else value
        self._keep_end(choice.token_ids, choice.finish_reason, choice.seed)
        return {
            **self._frame,
            **self._said(said),
            **self._logprobs(choice.logprobs),
            **self._end(usage),
        }

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield a line for each part of the text."""
        ends = delta.finish_reason is not None
        self._keep_end(delta.token_ids, delta.finish_reason, delta.seed)
        pieces = self._pieces(delta.text, delta.token_chars, ends=ends)
        parts = [*self._parts(pieces), *(self._ended_call() if ends else ())]
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else {}
        for part in parts or ([{}] if logprobs else []):
            yield {**self._line(part), **logprobs}
            logprobs = {}

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """Return the line of more text; None if lines have more, or the text is parsed."""
        if self._parser is not None or self._num_top is not None or self._context is not None:
            return None
        return self._line({"content": text})

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Not used: the routes have no field that asks for progress."""
        raise NotImplementedError

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return nothing: the routes have no field that asks for continuous usage."""
        return {}

    def of_usage(self, usage: Usage) -> dict[str, Any]:
        """Return the last line."""
        return {**self._frame, **self._said({"content": ""}), **self._end(usage)}

    def _pieces(self, text: str, token_chars: Sequence[int], *, ends: bool) -> list[AnswerPiece]:
        if self._parser is not None:
            return self._parser.pieces(text, token_chars, ends=ends)
        return [AnswerPiece("content", text)] if text else []

    def _parts(self, pieces: Sequence[AnswerPiece]) -> Iterator[dict[str, Any]]:
        """Yield the parts of a message; a call follows its last piece."""
        for piece in pieces:
            if piece.kind == "arguments":
                self._call.append(piece.text)
                continue
            yield from self._ended_call()
            if piece.kind == "call":
                self._call = [piece.text]
            else:
                yield {"thinking" if piece.kind == "reasoning" else "content": piece.text}

    def _ended_call(self) -> Iterator[dict[str, Any]]:
        if not self._call:
            return
        assert self._parser is not None, "only a parser finds calls"
        (name, *texts), self._call = self._call, []
        function = {"index": self._num_calls, "name": name, "arguments": _arguments("".join(texts))}
        yield {"tool_calls": [{"id": self._parser.call_id(self._num_calls), "function": function}]}
        self._num_calls += 1

    def _line(self, part: dict[str, Any]) -> dict[str, Any]:
        return {**self._frame, **self._said({"content": "", **part}), "done": False}

    def _said(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a message, or those of a completion beside each other."""
        if self._is_chat:
            return {"message": {"role": "assistant", **part}}
        return {"response": part.pop("content"), **part}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        if self._num_top is None:
            return {}
        num_top = self._num_top
        return {
            "logprobs": [
                {**_token(one), "top_logprobs": [_token(other) for other in one.top[:num_top]]}
                for one in tokens
            ]
        }

    def _keep_end(
        self, token_ids: Sequence[int], reason: FinishReason | None, seed: int | None
    ) -> None:
        if self._context is not None:
            self._context += token_ids
        self._reason, self._seed = reason, seed

    def _end(self, usage: Usage) -> dict[str, Any]:
        context = {} if self._context is None else {"context": self._context}
        return {
            "done": True,
            "done_reason": "length" if self._reason is FinishReason.LENGTH else "stop",
            **context,
            **counts_json(usage),
            "seed": self._seed,
        }


def loaded_json(model: str, created_s: int, *, is_chat: bool, unloads: bool) -> dict[str, Any]:
    """Return the answer to a request without a prompt, which would load or unload the model."""
    empty: dict[str, Any] = {"response": ""}
    if is_chat:
        empty = {"message": {"role": "assistant", "content": ""}}
    reason = "unload" if unloads else "load"
    return {
        "model": model,
        "created_at": moment(created_s),
        **empty,
        "done": True,
        "done_reason": reason,
    }


def moment(time_s: int) -> str:
    """Return a time as Ollama's clients parse it."""
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def counts_json(usage: Usage) -> dict[str, int]:
    """Return the counts, and durations in nanoseconds."""
    timings = usage.timings
    first_ms = total_ms = prefill_ms = 0.0
    if timings is not None:
        total_ms, prefill_ms = timings.total_ms, timings.prefill_ms
        first_ms = total_ms if timings.first_token_ms is None else timings.first_token_ms
    return {
        "total_duration": _ns(total_ms),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(prefill_ms),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(total_ms - first_ms),
    }


def _ns(time_ms: float) -> int:
    return 0 if math.isnan(time_ms) else round(max(time_ms, 0.0) * _NS_PER_MS)


def _token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw)}


def _arguments(text: str) -> Any:
    """Return the arguments of a call; numbers keep the digits that the model wrote."""
    if not text.strip():
        return {}
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, ValueError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if is_object else {INVALID_JSON: text}

"""Server-sent events of one request, as bytes: numbered, one `data:` line each, `[DONE]` last.

An event's `id:` is the request's id and the event's number from 1, so whoever has read one knows
all that is needed to go on behind it. Knows no socket. Always holds: the same deltas give the same
bytes, whoever reads them and in how many parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from quire.api.generation.choice_streams import ChoiceStreams, Usage
from quire.api.http.errors import ResumeGone, error_body
from quire.base.errors import QuireError
from quire.base.show import show
from quire.engine.output.output_stream import TextDelta

HEARTBEAT = b": waiting\n\n"
MAX_ID_CHARS = 256
_MAX_DIGITS = 15


class Chunks(Protocol):
    """How an API writes the parts of a stream."""

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]: ...

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """The chunk of more text of a choice that has begun; None where others tell more."""

    def frame(self) -> dict[str, Any]:
        """The fields that every chunk has, without its choices."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The counts so far as the API writes them."""

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """The last chunk, with usage and timings; None where neither was asked for."""


def speeds_json(usage: Usage) -> dict[str, Any]:
    """Return `timings` beside `usage`, where it was asked for."""
    return {"timings": msgspec.to_builtins(usage.speeds)} if usage.speeds else {}


Put = Callable[[list[bytes], bool], Awaitable[None]]

# Events of deltas that waited together are handed over together, up to so many.
_MOST_TOGETHER = 64
# Stands for the text of a chunk while the bytes around it are found. No name of ours has a NUL.
_TEXT = "\0text\0"
_TEXT_JSON = msgspec.json.encode(_TEXT)
_text_json = msgspec.json.Encoder().encode


class Events:
    """Writes the events of one request.

    continuous_usage, continuous_timings: every chunk has them so far. reports_progress: events
    with prompt_progress precede the first chunk of each prompt.
    """

    def __init__(
        self,
        answers: ChoiceStreams,
        chunks: Chunks,
        request_id: str,
        *,
        continuous_usage: bool = False,
        continuous_timings: bool = False,
        reports_progress: bool = False,
    ) -> None:
        self._answers = answers
        self._continuous_usage = continuous_usage
        self._continuous_timings = continuous_timings
        # Prompts whose progress is not reported to the end.
        self._in_progress = set(range(len(answers.prompts))) if reports_progress else set()
        self._chunks = chunks
        self._prefix = f"id: {request_id}:".encode()
        self._number = 0
        # By prompt and choice: what stands before and behind the text of a chunk of nothing else.
        self._around: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    async def tell(self, put: Put) -> None:
        """Hand all events to `put`: those that are there together, with the last of all True."""
        held: list[bytes] = []
        try:
            async with aclosing(self._answers.deltas()) as deltas:
                async for prompt, delta in deltas:
                    # What tells of a whole prompt is long: beside the loop.
                    if delta.prompt_logprobs:
                        held += await asyncio.to_thread(self._of_delta, prompt, delta)
                    else:
                        held += self._of_delta(prompt, delta)
                    if len(held) >= _MOST_TOGETHER or not self._answers.more_waits:
                        together, held = held, []
                        await put(together, False)
        except QuireError:
            if held:
                await put(held, False)
            raise
        usage = self._chunks.of_usage(self._answers.usage)
        last = [] if usage is None else [self._event(msgspec.json.encode(usage))]
        await put([*held, *last, self._event(b"[DONE]")], True)

    def of_error(self, error: QuireError) -> bytes:
        """The event an error is told by."""
        return self._event(msgspec.json.encode(error_body(error)))

    def _of_delta(self, prompt: int, delta: TextDelta) -> list[bytes]:
        if delta.text and delta.finish_reason is None and not delta.prompt_logprobs:
            around = self._around.get((prompt, delta.index))
            if around is not None:
                return [self._event(around[0] + _text_json(delta.text) + around[1])]
        before = self._progress(prompt, delta) if self._in_progress else []
        if delta.prompt_progress is not None:
            return before
        chunks = [*self._chunks.of_delta(prompt, delta)]
        if self._continuous_usage or self._continuous_timings:
            more = self._so_far()
            chunks = [{**chunk, **more} for chunk in chunks]
        else:
            self._learn(prompt, delta.index)
        return [*before, *(self._event(msgspec.json.encode(chunk)) for chunk in chunks)]

    def _so_far(self) -> dict[str, Any]:
        usage = self._answers.usage
        return {
            **({"usage": self._chunks.usage(usage)} if self._continuous_usage else {}),
            **(speeds_json(usage) if self._continuous_timings else {}),
        }

    def _progress(self, prompt: int, delta: TextDelta) -> list[bytes]:
        """Return the event of how much of a prompt is computed; all of it before the first text."""
        if prompt not in self._in_progress:
            return []
        total, progress = len(self._answers.prompts[prompt].token_ids), delta.prompt_progress
        if progress is None:
            self._in_progress.discard(prompt)
            processed, time_ms = total, self._answers.prefill_ms
        else:
            processed, time_ms = progress.processed, progress.time_ms
        told = {
            "index": prompt,
            "total": total,
            "cache": delta.cached_tokens,
            "processed": processed,
            "time_ms": round(time_ms, 3),
        }
        frame = {**self._chunks.frame(), "choices": [], "prompt_progress": told}
        return [self._event(msgspec.json.encode(frame))]

    def _learn(self, prompt: int, index: int) -> None:
        """Find what stands around the text in the chunks of a choice, if that is all they tell."""
        if (prompt, index) not in self._around:
            chunk = self._chunks.of_text(prompt, index, _TEXT)
            if chunk is not None:
                before, _, behind = msgspec.json.encode(chunk).partition(_TEXT_JSON)
                self._around[prompt, index] = before, behind

    def _event(self, line: bytes) -> bytes:
        self._number += 1
        return b"%b%d\ndata: %b\n\n" % (self._prefix, self._number, line)


def place_of(event_id: str) -> tuple[str, int]:
    """(request id, number) of a Last-Event-ID. Raises ResumeGone where it is none of ours."""
    request_id, _, number = event_id.rpartition(":")
    is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
    if not request_id or not is_number or len(event_id) > MAX_ID_CHARS:
        raise ResumeGone(
            f"Last-Event-ID is {show(event_id)}; send the `id` of an event of the stream"
        )
    return request_id, int(number)

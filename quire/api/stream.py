"""Server-sent events: a request's chunks as they come, one `data:` line each, `[DONE]` at the end.

The response begins with the first chunk, so a request that cannot be served is still answered by a
status code. Writing waits while the socket is full: a slow reader holds back its own chunks (the
tokens wait as numbers in this process, at most max_tokens a choice) and nobody else's. An error
after the beginning is one event {"error": ...}; then the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.answers import Answers, Usage
from quire.api.errors import error_body
from quire.api.gone import Deadline, until_gone
from quire.api.serving import Serving
from quire.base.errors import QuireError
from quire.engine.output import TextDelta

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
# A reader that does not even take the last event within this time gets none.
_LAST_WORD_S = 1.0


class Chunks(Protocol):
    """How an API writes the parts of a stream."""

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]: ...

    def of_usage(self, usage: Usage) -> dict[str, Any] | None: ...


class EventStream(Response):
    """The streamed answers of one request."""

    def __init__(
        self,
        serving: Serving,
        answers: Answers,
        chunks: Chunks,
        headers: Mapping[str, str],
        deadline: Deadline,
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._serving = serving
        self._answers = answers
        self._chunks = chunks
        self._deadline = deadline
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(
                self._write_all(send),
                receive,
                over=self._serving.over,
                deadline=self._deadline,
            )
        except QuireError as error:
            if not self._started:
                raise
            self._serving.failed(error)
            await self._write_last(send, error)

    async def _write_all(self, send: Send) -> None:
        async with aclosing(self._answers.deltas()) as deltas:
            async for prompt, delta in deltas:
                await self._write(send, await self._events(prompt, delta))
        usage = self._chunks.of_usage(self._answers.usage)
        last = _DONE if usage is None else _event(usage) + _DONE
        await self._write(send, last, more=False)

    async def _events(self, prompt: int, delta: TextDelta) -> bytes:
        """A delta's chunks; those that tell of a whole prompt are long: beside the loop."""

        def events() -> bytes:
            return b"".join(_event(chunk) for chunk in self._chunks.of_delta(prompt, delta))

        return await asyncio.to_thread(events) if delta.prompt_logprobs else events()

    async def _write(self, send: Send, events: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if events or not more:
            await send({"type": "http.response.body", "body": events, "more_body": more})

    async def _write_last(self, send: Send, error: QuireError) -> None:
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self._write(send, _event(error_body(error)), more=False)
        except TimeoutError:
            return  # the reader does not read; the server closes the connection


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

"""Stream the events of a request to one connection, paced by its client.

`Events` turns deltas into the events of a dialect; `EventStream` writes them. The response begins
with the first event or heartbeat, so a request that fails at once still gets a status code. Writing
waits while the socket is full: a slow client delays only its own events, and the engine throttles
its request. A client that reads nothing for `stall_s` is cut. An error after the beginning is one
event; then the stream ends without its end marker. Knows no dialect. Always holds: the same deltas
give the same bytes, however they are grouped into writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.generation.choice_streams import Choice, ChoiceStreams, PromptState
from quire.api.generation.usage import Usage
from quire.api.http.dialect import Dialect
from quire.api.http.errors import SlowReader, report_of
from quire.api.http.request_io import Deadline, disconnect_of, run_until_disconnect
from quire.api.server_state import OpenRequest, ServerState
from quire.base.errors import QuireError
from quire.engine.output.output_stream import TextDelta

# Ask proxies not to buffer events.
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
# A client that does not accept the last event within this time does not get it.
_LAST_EVENT_S = 1.0
_CHECK_S = 1.0
# Maximum events in one write, of deltas that are available together.
_MAX_TOGETHER = 64
# Stands for the text of a chunk while the bytes around it are found. No name of ours has a NUL.
_TEXT = "\0text\0"
_TEXT_JSON = msgspec.json.encode(_TEXT)
_text_json = msgspec.json.Encoder().encode

Put = Callable[[list[bytes], bool], Awaitable[None]]


class Writer(Protocol):
    """Write one answer as the JSON objects of an API, whole or in chunks."""

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a delta."""

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """Return the chunk of a delta that has only text, of a choice that has begun; None if
        chunks depend on anything else."""

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Return the chunk that reports how much of a prompt is computed."""

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return the fields that every chunk gets if the request asks for continuous usage."""

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """Return the last chunk, with usage and timings; None if neither was requested."""


class Events:
    """Write the events of one request, numbered from 1.

    number: of the last event. continuous_usage: every chunk has the usage so far.
    reports_progress: events of prompt progress precede the first chunk of each prompt.
    """

    def __init__(
        self,
        answers: ChoiceStreams,
        writer: Writer,
        dialect: Dialect,
        request_id: str,
        *,
        continuous_usage: bool = False,
        reports_progress: bool = False,
    ) -> None:
        self.framing = dialect.framing(request_id)
        self._request_id = request_id
        self._answers = answers
        self._dialect = dialect
        self._continuous_usage = continuous_usage
        # Prompts with progress still to be reported.
        self._in_progress = set(range(len(answers.prompts))) if reports_progress else set()
        self._writer = writer
        self.number = 0
        # By prompt and choice: the bytes before and after the text of a chunk that has only text,
        # and the kind of its event.
        self._around: dict[tuple[int, int], tuple[bytes, bytes, str]] = {}

    async def write(self, put: Put) -> None:
        """Hand all events to `put`: those available together, and True with the last of all."""
        held: list[bytes] = []
        try:
            async with aclosing(self._answers.deltas()) as deltas:
                async for prompt, delta in deltas:
                    # Log-probabilities of a whole prompt take long to encode: in a thread.
                    if delta.prompt_logprobs:
                        held += await asyncio.to_thread(self._of_delta, prompt, delta)
                    else:
                        held += self._of_delta(prompt, delta)
                    if len(held) >= _MAX_TOGETHER or not self._answers.more_waits:
                        together, held = held, []
                        await put(together, False)
        except QuireError:
            if held:
                await put(held, False)
            raise
        usage = self._writer.of_usage(self._answers.usage)
        last = [] if usage is None else [self._event(usage)]
        end = self.framing.end(self._next_number())
        await put([*held, *last, *([end] if end else [])], True)

    def of_error(self, error: QuireError) -> bytes:
        """Return the event of an error that ends the stream."""
        _, body = self._dialect.error(report_of(error), self._request_id)
        return self.framing.error(self._next_number(), msgspec.json.encode(body))

    def _of_delta(self, prompt: int, delta: TextDelta) -> list[bytes]:
        if delta.text and delta.finish_reason is None and not delta.prompt_logprobs:
            around = self._around.get((prompt, delta.index))
            if around is not None:
                before_text, after_text, kind = around
                payload = before_text + _text_json(delta.text) + after_text
                return [self.framing.event(self._next_number(), payload, kind)]
        before = self._progress(prompt, delta) if self._in_progress else []
        if delta.prompt_progress is not None:
            return before
        chunks = [*self._writer.of_delta(prompt, delta)]
        if self._continuous_usage:
            more = self._writer.so_far(self._answers.usage)
            chunks = [{**chunk, **more} for chunk in chunks]
        elif (prompt, delta.index) not in self._around:
            self._learn(prompt, delta.index)
        return [*before, *map(self._event, chunks)]

    def _progress(self, prompt: int, delta: TextDelta) -> list[bytes]:
        """Return the event of prompt progress; of a complete prompt once, before its first text."""
        if prompt not in self._in_progress:
            return []
        total, progress = len(self._answers.prompts[prompt].token_ids), delta.prompt_progress
        if progress is None:
            self._in_progress.discard(prompt)
            timings = self._answers.timings
            processed, time_ms = total, 0.0 if timings is None else timings.prefill_ms
        else:
            processed, time_ms = progress.processed, progress.time_ms
        chunk = self._writer.of_progress(
            PromptState(
                index=prompt,
                total=total,
                cache=delta.cached_tokens,
                processed=processed,
                time_ms=round(time_ms, 3),
            )
        )
        return [self._event(chunk)]

    def _learn(self, prompt: int, index: int) -> None:
        """Find the bytes around the text in the chunks of a choice, if they have only text."""
        chunk = self._writer.of_text(prompt, index, _TEXT)
        if chunk is not None:
            before, _, after = msgspec.json.encode(chunk).partition(_TEXT_JSON)
            self._around[prompt, index] = before, after, chunk.get("type", "")

    def _event(self, chunk: dict[str, Any]) -> bytes:
        payload = msgspec.json.encode(chunk)
        return self.framing.event(self._next_number(), payload, chunk.get("type", ""))

    def _next_number(self) -> int:
        self.number += 1
        return self.number


class PacedResponse(Response):
    """Write events to one client, with heartbeats, and cut a client that does not read.

    cut: set to an error, it ends the writing.
    """

    def __init__(
        self,
        server_state: ServerState,
        headers: Mapping[str, str],
        media_type: str,
        heartbeat: bytes,
        cut: asyncio.Future[QuireError],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers}, media_type=media_type)
        del self.headers["content-length"]
        self._server_state = server_state
        self._heartbeat = heartbeat
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._write_chunk: Callable[[bytes], bool] | None = None
        self._lock = asyncio.Lock()
        self._started = self._ended = False
        self._blocked_since_s: float | None = None
        self._wrote_s = self._loop.time()
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        config = server_state.config
        self._check_s = min(_CHECK_S, config.heartbeat_s or _CHECK_S, config.stall_s / 2)

    def _watch(self, scope: Scope, send: Send) -> None:
        """Check the client regularly from now on, until `_unwatch`."""
        self._write_chunk = scope.get("quire.write")
        scope["quire.probe"] = lambda: self._probe(send)
        self._timer = self._loop.call_later(self._check_s, self._check, send)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()

    def _probe(self, send: Send) -> None:
        """Write a heartbeat now: a client that has closed its connection answers with a reset."""
        if self._started and self._blocked_since_s is None:
            self._send_heartbeat(send)

    def _check(self, send: Send) -> None:
        self._timer = self._loop.call_later(self._check_s, self._check, send)
        config, now_s = self._server_state.config, self._loop.time()
        if self._blocked_since_s is not None:
            blocked_s = now_s - self._blocked_since_s
            if blocked_s >= config.stall_s and not self._cut.done():
                self._cut.set_result(_slow_reader(blocked_s))
        elif config.heartbeat_s and now_s - self._wrote_s >= config.heartbeat_s:
            self._send_heartbeat(send)

    def _send_heartbeat(self, send: Send) -> None:
        if self._heartbeat:
            self._heartbeat_task = asyncio.ensure_future(self._write(send, self._heartbeat))

    def _write_now(self, events: bytes) -> bool:
        """Write events without waiting; return False if the response has not begun, another write
        is active, or the connection has no room. Skips the ASGI layers that `_write` goes through,
        which would be entered once a token."""
        write = self._write_chunk
        if write is None or not self._started or self._ended or self._lock.locked():
            return False
        if not write(events):
            return False
        self._wrote_s = self._loop.time()
        return True

    async def _write(self, send: Send, events: bytes, *, more: bool = True) -> None:
        async with self._lock:
            if self._ended:
                return
            self._blocked_since_s = self._loop.time()
            try:
                if not self._started:
                    self._started = True
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                    )
                if events or not more:
                    self._ended = not more
                    await send({"type": "http.response.body", "body": events, "more_body": more})
            finally:
                self._blocked_since_s = None
                self._wrote_s = self._loop.time()


class EventStream(PacedResponse):
    """The streamed answer of one request; it ends when its client disconnects."""

    def __init__(
        self,
        server_state: ServerState,
        events: Events,
        headers: Mapping[str, str],
        deadline: Deadline,
        request: OpenRequest,
    ) -> None:
        framing = events.framing
        super().__init__(server_state, headers, framing.media_type, framing.heartbeat, request.cut)
        self._events = events
        self._deadline = deadline
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(events: list[bytes], is_last: bool) -> None:
            together = b"".join(events)
            if is_last or not self._write_now(together):
                await self._write(send, together, more=not is_last)

        self._watch(scope, send)
        failure: QuireError | None = None
        try:
            await run_until_disconnect(
                self._events.write(put),
                disconnect_of(scope, receive),
                over=self._server_state.lifecycle.grace_over,
                deadline=self._deadline,
                cut=self._cut,
            )
        except QuireError as error:
            failure = error
            if not self._started:
                raise
            self._server_state.count_error(error)
            await self._write_last(scope, send, self._events.of_error(error))
        finally:
            self._unwatch()
            self._server_state.requests.end(self._request, failure)

    async def _write_last(self, scope: Scope, send: Send, event: bytes) -> None:
        try:
            async with asyncio.timeout(_LAST_EVENT_S):
                await self._write(send, event, more=False)
        except TimeoutError:  # the client does not read
            abort_connection(scope)


def abort_connection(scope: Scope) -> None:
    """Close the connection of a request without sending what is unsent."""
    abort = scope.get("quire.abort")
    if abort is not None:
        abort()


def _slow_reader(blocked_s: float) -> SlowReader:
    return SlowReader(
        f"the client read nothing for {blocked_s:.0f} s (--stall-seconds), so the stream was cut; "
        "read faster, or request less"
    )

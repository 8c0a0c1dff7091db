"""A request's events to one connection: paced by its reader, with a sign of life in silence.

The response begins with the first event, or with the first heartbeat, so a request that is refused
at once is still answered by a status code. Writing waits while the socket is full: a slow reader
holds back its own events and nobody else's, and its request stands aside in the engine where many
wait for it (engine/unread.py). Where it takes nothing for `stall_s` it is cut. An error after the
beginning is one event {"error": ...}; then the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.generation.request_registry import OpenRequest
from quire.api.http.cancellation import Deadline, disconnect_of, run_until_disconnect
from quire.api.http.errors import ReadElsewhere, ResumeGone, SlowReader
from quire.api.server_state import ServerState
from quire.api.streaming.resumable_stream import ResumableStream
from quire.api.streaming.sse import HEARTBEAT, Events
from quire.base.errors import QuireError

# Proxies that would gather events before they pass them on are asked not to.
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
# A reader that does not even take the last event within this time gets none.
_LAST_WORD_S = 1.0
_LOOK_S = 1.0


class _Paced(Response):
    """Writes to one reader, and looks after it: heartbeats, and an end where it does not read.

    cut: set to an error, it ends the writing.
    """

    def __init__(
        self, serving: ServerState, headers: Mapping[str, str], cut: asyncio.Future[QuireError]
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._serving = serving
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._write_chunk: Callable[[bytes], bool] | None = None
        self._turn = asyncio.Lock()
        self._started = self._ended = False
        self._blocked_since_s: float | None = None
        self._wrote_s = self._loop.time()
        self._beat: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _watch(self, send: Send) -> None:
        """Look after the reader from now on, until `_leave`."""
        self._timer = self._loop.call_later(self._look_s, self._look, send)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    @property
    def _look_s(self) -> float:
        config = self._serving.config
        return min(_LOOK_S, config.heartbeat_s or _LOOK_S, config.stall_s / 2)

    def _look(self, send: Send) -> None:
        self._timer = self._loop.call_later(self._look_s, self._look, send)
        config, now_s = self._serving.config, self._loop.time()
        if self._blocked_since_s is not None:
            blocked_s = now_s - self._blocked_since_s
            if blocked_s >= config.stall_s and not self._cut.done():
                self._cut.set_result(_too_slow(blocked_s))
        elif config.heartbeat_s and now_s - self._wrote_s >= config.heartbeat_s:
            self._beat = asyncio.ensure_future(self._write(send, HEARTBEAT))

    def _wrote_now(self, events: bytes) -> bool:
        """Write more events without waiting, where the response has begun, nobody is writing and
        the connection has room; as `_write` does it, without the layers between, which a stream
        would go through once a token."""
        write = self._write_chunk
        if write is None or not self._started or self._ended or self._turn.locked():
            return False
        if not write(events):
            return False
        self._wrote_s = self._loop.time()
        return True

    async def _write(self, send: Send, events: bytes, *, more: bool = True) -> None:
        async with self._turn:
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

    async def _write_last(self, scope: Scope, send: Send, event: bytes) -> None:
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self._write(send, event, more=False)
        except TimeoutError:  # the reader does not read: nothing can be said to it
            abort = scope.get("quire.abort")
            if abort is not None:
                abort()


class EventStream(_Paced):
    """The streamed answers of one request; they end when their reader leaves."""

    def __init__(
        self,
        serving: ServerState,
        events: Events,
        headers: Mapping[str, str],
        deadline: Deadline,
        live: OpenRequest,
    ) -> None:
        super().__init__(serving, headers, live.cut)
        self._events = events
        self._deadline = deadline
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(events: list[bytes], is_last: bool) -> None:
            together = b"".join(events)
            if is_last or not self._wrote_now(together):
                await self._write(send, together, more=not is_last)

        self._write_chunk = scope.get("quire.write")
        self._watch(send)
        failure: QuireError | None = None
        try:
            await run_until_disconnect(
                self._events.tell(put),
                disconnect_of(scope, receive),
                over=self._serving.over,
                deadline=self._deadline,
                cut=self._live.cut,
            )
        except QuireError as error:
            failure = error
            if not self._started:
                raise
            self._serving.failed(error)
            await self._write_last(scope, send, self._events.of_error(error))
        finally:
            self._leave()
            self._serving.live.end(self._live, failure)


class FollowStream(_Paced):
    """The events of a resumable request behind number `after`; it goes on when this reader leaves.

    resumes: the stream has begun before, so the response begins at once. Raises ResumeGone where
    those events are not kept.
    """

    def __init__(
        self,
        serving: ServerState,
        telling: ResumableStream,
        headers: Mapping[str, str],
        *,
        after: int = 0,
        resumes: bool = False,
    ) -> None:
        journal = telling.journal
        if not journal.first - 1 <= after <= journal.last:
            raise ResumeGone(
                f"the stream cannot go on behind event {after}: those behind {journal.first - 1} "
                f"up to {journal.last} are kept; ask again from the beginning"
            )
        super().__init__(serving, headers, asyncio.get_running_loop().create_future())
        self._telling = telling
        self._after = after
        self._resumes = resumes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._telling.attach(self._cut)
        self._write_chunk = scope.get("quire.write")
        self._watch(send)
        try:
            await run_until_disconnect(
                self._follow(send),
                disconnect_of(scope, receive),
                over=self._telling.never,
                deadline=Deadline(None),
                cut=self._cut,
            )
        except (SlowReader, ReadElsewhere) as error:
            # Not an event: the request goes on, and its events are what they are for any reader.
            if isinstance(error, SlowReader):
                self._serving.failed(error)
            abort = scope.get("quire.abort")
            if abort is not None:
                abort()
        finally:
            self._leave()
            self._telling.detach(self._cut)

    async def _follow(self, send: Send) -> None:
        journal, number = self._telling.journal, self._after
        if self._resumes and self._telling.refusal is None:
            await self._write(send, b"")
        while events := await journal.after(number):
            number = journal.last
            if not self._wrote_now(events):
                await self._write(send, events)
        refusal = self._telling.refusal
        if refusal is not None and not self._started:
            raise refusal
        await self._write(send, b"", more=False)


def _too_slow(blocked_s: float) -> SlowReader:
    return SlowReader(
        f"the stream's reader took nothing for {blocked_s:.0f} s (--stall-seconds), so it was cut; "
        "read on, or ask for less"
    )

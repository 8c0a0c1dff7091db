"""GET /admin/record: the requests of this server as lines of a recording, while it is read.

The client decides where they are stored, so the server writes no file and waits for no disk; one
that reads slowly loses requests, which are counted. Token ids are sent only if the server was
started with --record-content. With several API processes the one that gets the request records its
own requests and relays the lines of the others; without all of them there is no recording. Always
holds: the response ends when its client disconnects, when `seconds` are over and the requests of
that time have ended, or when the server stops; it breaks off if another process is lost; reading it
delays no shutdown.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from typing import cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.engine_protocol import Engine
from quire.api.generation.recorder import Recorder, RecordingEngine
from quire.api.http.request_io import (
    ClientDisconnected,
    Deadline,
    disconnect_of,
    run_until_disconnect,
)
from quire.api.server_state import ServerState
from quire.api.streaming.event_stream import abort_connection
from quire.api.workers.relay import SiblingExchange, SiblingGone
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base.errors import InvalidParameter, OverloadedError, ShuttingDown
from quire.base.show import show
from quire.engine.client.interleaving import interleaved
from quire.obs.recording import HEARTBEAT_S, IDLE_S, VERSION, RecordingHeader, encode_line

MEDIA_TYPE = "application/x-ndjson"
MAX_RECORDERS = 4
MAX_SECONDS = 7 * 24 * 3600.0
OpenOthers = Callable[[ExitStack], Awaitable[list[SiblingExchange]]]
_RETRY_AFTER_S = 10.0
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_KEY_HEADER, _CONTENT_HEADER, _SECONDS_HEADER = (
    "x-record-key",
    "x-record-content",
    "x-record-seconds",
)
_KEY_BYTES = 32
_MIN_BLOCK_TOKENS = 16
_FLAGS = {"true": True, "false": False}


class RecordRoutes:
    """The routes. siblings: the other API processes."""

    def __init__(self, server_state: ServerState, siblings: SiblingWorkers | None = None) -> None:
        self._server_state = server_state
        self._siblings = siblings

    async def get(self, request: Request) -> Response:
        """Record requests until the client disconnects. Raises InvalidParameter."""
        content, seconds = _options(request.query_params)
        if content and not self._server_state.config.record_content:
            raise InvalidParameter(
                "content is true, and this server records no token ids: start it with "
                "--record-content, or record lengths and times only",
                param="content",
            )
        card = self._server_state.engine().card
        key = secrets.token_bytes(_KEY_BYTES)
        recorder = self._recorder(key, content=content)
        header = RecordingHeader(
            quire_recording=VERSION,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            model=card.name,
            fingerprint=self._server_state.fingerprint(card),
            block_tokens=recorder.block_tokens,
            content=content,
        )
        options = {
            _KEY_HEADER: key.hex(),
            _CONTENT_HEADER: str(content).lower(),
            _SECONDS_HEADER: str(seconds),
        }

        async def open_others(closing: ExitStack) -> list[SiblingExchange]:
            if self._siblings is None:
                return []
            num_others = self._server_state.config.api_processes - 1
            return await self._siblings.record(options, num_others=num_others, closing=closing)

        first = encode_line(header)
        return _RecordingResponse(self._server_state, recorder, open_others, first, seconds)

    async def get_own(self, request: Request) -> Response:
        """Record the requests of this process for another one, on the private socket."""
        key = bytes.fromhex(request.headers[_KEY_HEADER])
        recorder = self._recorder(key, content=_FLAGS[request.headers[_CONTENT_HEADER]])
        seconds = float(request.headers[_SECONDS_HEADER])

        async def open_others(_: ExitStack) -> list[SiblingExchange]:
            return []

        return _RecordingResponse(self._server_state, recorder, open_others, b"", seconds)

    def _recorder(self, key: bytes, *, content: bool) -> Recorder:
        block_tokens = max(self._server_state.engine().card.block_size, _MIN_BLOCK_TOKENS)
        return Recorder(key=key, block_tokens=block_tokens, content=content)


def _options(query: Mapping[str, str]) -> tuple[bool, float]:
    """Return whether to record content, and for how many seconds. Raises InvalidParameter."""
    for name in query:
        if name not in ("content", "seconds"):
            raise InvalidParameter(
                f"{show(name)} is no parameter of this route; content and seconds are: leave the "
                "other out",
                param=name[:64],
            )
    content, seconds = query.get("content", "false"), query.get("seconds", str(MAX_SECONDS))
    if content not in _FLAGS:
        raise InvalidParameter(
            f"content is {show(content)}; true or false is allowed", param="content"
        )
    try:
        limit_s = float(seconds)
    except ValueError:
        limit_s = -1.0
    if not 0 < limit_s <= MAX_SECONDS:
        raise InvalidParameter(
            f"seconds is {show(seconds)}; a number above 0 and up to {MAX_SECONDS:g} is allowed",
            param="seconds",
        )
    return _FLAGS[content], limit_s


class _RecordingResponse(Response):
    """Streams the lines of a recorder, and of the other processes.

    Raises OverloadedError instead of a response where there are MAX_RECORDERS, or where another
    process does not record.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        server_state: ServerState,
        recorder: Recorder,
        open_others: OpenOthers,
        first: bytes,
        seconds: float,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._server_state = server_state
        self._recorder = recorder
        self._open_others = open_others
        self._first = first
        self._seconds = seconds
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        recorder, lifecycle = self._recorder, self._server_state.lifecycle

        def stop(_: asyncio.Future[None]) -> None:
            recorder.stop()

        with ExitStack() as closing:
            closing.enter_context(_attached(self._server_state, recorder))
            closing.callback(recorder.close)
            lifecycle.stopping.add_done_callback(stop)
            closing.callback(lifecycle.stopping.remove_done_callback, stop)
            try:
                await run_until_disconnect(
                    self._write(send, closing),
                    disconnect_of(scope, receive),
                    over=lifecycle.grace_over,
                    deadline=Deadline(None),
                )
            except (ClientDisconnected, ShuttingDown):  # how recordings end
                if not self._has_begun:
                    raise
            except SiblingGone as error:
                if not self._has_begun:
                    raise OverloadedError(
                        f"not every API process of this server records ({error}), so requests "
                        "would be missing; try again",
                        retry_after_s=_RETRY_AFTER_S,
                    ) from error
                self._server_state.log.warning("a recording was broken off", reason=str(error))
                abort_connection(scope)

    async def _write(self, send: Send, closing: ExitStack) -> None:
        async def write(body: bytes, *, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        exchanges = await self._open_others(closing)
        timer = asyncio.get_running_loop().call_later(self._seconds, self._recorder.stop)
        closing.callback(timer.cancel)
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._first:
            content = self._recorder.content
            self._server_state.log.event("requests are recorded", content=content)
        await write(self._first, more=True)
        runs = [self._recorder.lines(HEARTBEAT_S)]
        runs += [_whole_lines(exchange) for exchange in exchanges]
        together = runs[0] if len(runs) == 1 else interleaved(runs, max_queued=1)
        async with aclosing(together) as lines:
            async for some in lines:
                await write(some or b"\n", more=True)  # an empty line keeps the connection open
        await write(b"", more=False)


@contextmanager
def _attached(server_state: ServerState, recorder: Recorder) -> Iterator[None]:
    """Pass requests that arrive meanwhile to the recorder. Raises OverloadedError."""
    recorders = server_state.recorders
    if len(recorders) >= MAX_RECORDERS:
        raise OverloadedError(
            f"{MAX_RECORDERS} recordings of this server are active; end one first",
            retry_after_s=_RETRY_AFTER_S,
        )
    if not recorders:
        recording = RecordingEngine(server_state.engine(), recorders)
        server_state.serve_through(cast(Engine, recording))
    recorders.add(recorder)
    try:
        yield
    finally:
        recorders.remove(recorder)
        if not recorders:
            server_state.serve_through(None)


async def _whole_lines(exchange: SiblingExchange) -> AsyncGenerator[bytes, None]:
    """Yield the whole lines of another process, and its heartbeats. Raises SiblingGone."""
    rest, pieces = b"", exchange.pieces()
    while True:
        try:
            async with asyncio.timeout(IDLE_S):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise SiblingGone(f"an API process has sent nothing for {IDLE_S:g} s") from error
        if piece is None:
            return
        whole, newline, rest = (rest + piece).rpartition(b"\n")
        if newline:
            yield whole + newline

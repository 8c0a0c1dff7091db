"""GET /health/beats: signs of life of this process, and changes of its health as they come.

For routers: a connection that stays open, with a comment ten times a second and an event whenever
`/health` has another state, another API process of this server stops or goes on, or the engine
sends nothing for several times as long as usual, or goes on after that. A native thread writes the
comments, without the interpreter lock, so they come while the event loop is busy with a thousand
streams, and whatever the engine computes; they stop where the process stops. Where no thread can
write to the connection (TLS, another ASGI server), the event loop does. Knows no router. Always
holds: a draining or dead server ends the connection after its last event; a reader that does not
keep up misses comments and delays no other.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire._native import BeatWriter
from quire.api.http.parameterless import refuse_parameters
from quire.api.server_state import ServerState
from quire.api.workers.process_beats import ProcessBeats
from quire.base.errors import OverloadedError
from quire.engine.model_card import Health
from quire.routing.beat_gaps import AwakeTime, BeatGaps

BEAT_S = 0.1
# How often a change of the health is looked for.
_LOOK_S = 0.02
_BEAT = b":\n\n"
# Readers of one process; each is a connection that is never evicted.
MAX_READERS = 64
_LAST_STATES = ("draining", "dead")
# Time without a message after which an engine without a history of gaps counts as silent.
_MAX_SILENT_S = 2.0
# Times of messages are whole milliseconds.
_ROUNDED_S = 0.002


class EngineWatch:
    """Detects an engine process that is silent for several times its usual gap between messages.

    Time in which the event loop could not read messages does not count. Two checks in a row have to
    find it: messages that have arrived are read in between."""

    def __init__(self) -> None:
        self._time, self._gaps = AwakeTime(), BeatGaps()
        self._planned_s = self._sent_s = 0.0
        self._was_late = False

    def is_silent(self, health: Health, now_s: float) -> bool:
        """Return whether the engine is silent. To be called every _LOOK_S."""
        self._time.tick(self._planned_s or now_s, now_s)
        self._planned_s = now_s + _LOOK_S
        sent_s = now_s - health.silent_ms / 1000.0
        if sent_s - self._sent_s > _ROUNDED_S:
            self._sent_s = sent_s
            self._gaps.note(self._time.of(sent_s))
        quiet_s = self._time.of(now_s) - self._gaps.last_s
        is_late = health.silent_ms > 0 and quiet_s > self._gaps.limit_s(_MAX_SILENT_S)
        was_late, self._was_late = self._was_late, is_late
        return was_late and is_late


class BeatRoutes:
    """The route, and its readers. processes: those of a server with several."""

    def __init__(self, server_state: ServerState, processes: ProcessBeats | None = None) -> None:
        self._server_state = server_state
        self._processes = processes
        self._beats = BeatWriter(BEAT_S, _chunk(_BEAT))
        self._num_readers = 0

    async def get(self, request: Request) -> _BeatResponse | Response:
        """Begin to write beats. Raises OverloadedError for one reader too many."""
        await refuse_parameters(request)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._num_readers >= MAX_READERS:
            raise OverloadedError(
                f"{self._num_readers} connections read the beats of this server, and no more may; "
                "read /health instead",
                retry_after_s=1.0,
            )
        return _BeatResponse(self)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write to one reader until it leaves or the server ends."""
        self._num_readers += 1
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await self._serve(scope, send, gone)
        finally:
            self._num_readers -= 1
            gone.cancel()

    async def _serve(self, scope: Scope, send: Send, gone: asyncio.Future[None]) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        engine, loop = EngineWatch(), asyncio.get_running_loop()
        health = self._server_state.health()
        fields = _fields_of(health, self._stopped(), is_silent=False)
        await _send(send, _event_of(fields))  # the head is written, and not by the thread
        await asyncio.wait({gone}, timeout=_LOOK_S)
        if gone.done():  # and its socket is closed
            return
        writer = self._writer(scope, send)
        try:
            while not gone.done() and health.state not in _LAST_STATES:
                await asyncio.wait({gone}, timeout=_LOOK_S)
                health, before = self._server_state.health(), fields
                is_silent = engine.is_silent(health, loop.time())
                fields = _fields_of(health, self._stopped(), is_silent=is_silent)
                if _has_changed(before, fields):
                    await writer.write(_event_of(fields))
                else:
                    await writer.write_if_due()
        finally:
            writer.close()
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _stopped(self) -> tuple[int, ...]:
        return () if self._processes is None else self._processes.stopped

    def _writer(self, scope: Scope, send: Send) -> _Writer:
        """Return what writes to a connection: the thread, where it can write to its socket."""
        transport = scope.get("quire.transport")
        is_plain = scope.get("scheme") == "http" and scope.get("http_version") == "1.1"
        if transport is None or not is_plain or transport.get_write_buffer_size():
            return _LoopWriter(send)
        found = transport.get_extra_info("socket")
        if found is None or found.fileno() < 0:
            return _LoopWriter(send)
        return _ThreadWriter(self._beats, found.fileno())


class _BeatResponse:
    """The response, as an ASGI application."""

    def __init__(self, routes: BeatRoutes) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes.serve(scope, receive, send)


class _Writer(Protocol):
    async def write(self, event: bytes) -> None: ...

    async def write_if_due(self) -> None: ...

    def close(self) -> None: ...


class _ThreadWriter:
    """Writes through the thread. number: the descriptor of the connection."""

    def __init__(self, beats: BeatWriter, number: int) -> None:
        self._beats = beats
        self._socket = socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)  # a duplicate
        self._socket.setblocking(False)
        beats.add(self._socket.fileno())

    async def write(self, event: bytes) -> None:
        self._beats.write(self._socket.fileno(), _chunk(event))

    async def write_if_due(self) -> None:
        """Do nothing: the thread writes."""

    def close(self) -> None:
        self._beats.remove(self._socket.fileno())
        self._socket.close()


class _LoopWriter:
    """Writes from the event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time()

    async def write(self, event: bytes) -> None:
        await _send(self._send, event)

    async def write_if_due(self) -> None:
        if (now_s := self._loop.time()) >= self._due_s:
            self._due_s = now_s + BEAT_S
            await self.write(_BEAT)

    def close(self) -> None:
        """Nothing is held."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, piece: bytes) -> None:
    message: dict[str, Any] = {"type": "http.response.body", "body": piece, "more_body": True}
    await send(message)


def _fields_of(health: Health, stopped: tuple[int, ...], *, is_silent: bool) -> dict[str, Any]:
    """Return the fields of an event."""
    fields: dict[str, Any] = {"ok": health.ok, "state": health.state, "reason": health.reason}
    if stopped:
        fields["stopped_processes"] = stopped
    if is_silent:
        fields["silent_ms"] = health.silent_ms
    return fields


def _has_changed(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether an event is due; other reasons for the same state, and longer silences, are in
    /health."""
    return before.keys() != now.keys() or any(
        before.get(name) != now.get(name) for name in ("ok", "state", "stopped_processes")
    )


def _event_of(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(fields)


def _chunk(piece: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)

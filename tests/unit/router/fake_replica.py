"""Scripted replicas: HTTP servers in the test's event loop that stream, fail or stay silent.

A FakeReplica streams the tokens 100, 101, ... after the request's output_ids, one event and one
comment a token, as a server of Quire does with include_output_ids. Always holds: a story is in
virtual time, unless events of KV blocks come from threads, so what it finds depends on no load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from bench.router.virtual_time import run_virtual
from quire.api.http.dialect import Dialect, error_response
from quire.api.openai.dialect import OPENAI
from quire.base.errors import QuireError
from quire.base.log import Log
from quire.base.server_url import ServerUrl, server_url
from quire.router.admission import Admission
from quire.router.app import RouterApp
from quire.router.discovery import Unwatched
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.head_bounds import WRITER
from quire.router.prober import Prober
from quire.router.router_metrics import RouterMetrics
from quire.router.settings import RouterSettings

LENGTH = 12
# Of a turn of the loop: what happens later has a later time.
TICK_S = 2e-4


class FakeReplica:
    """fails_after: tokens of a stream after which the connection is cut; None: never. says: instead
    of the cut, the bytes of an error event. status, body: of a whole answer. silent_after: tokens
    after which nothing comes any more. answer: returns status and body of a request by method, path
    and fields, or None for the usual answer. gate: streams have their first token once it is set.
    names_fingerprint: whether streams have it in their head.
    event_end: of each event and comment; with a line break streams are lines, as Ollama's are.
    seed: that the first comment reports. num_choices: tokens are of one choice after the other.
    answer_id: in its cursors. health_gate: /health answers
    once it is set. has_beats: whether it sends beats, and then until its `beats` are cleared.
    process: the one of several that accepts connections now; 0: one only. ends_late_s: from the
    last event of a stream to the end of its body.
    """

    def __init__(self, fingerprint: str = "fp_a", *models: str) -> None:
        self.fingerprint = fingerprint
        self.models = models or ("box",)
        self.models_status = 200
        self.names_fingerprint = True
        self.answer: Callable[[str, str, dict[str, Any]], tuple[int, bytes] | None] = (
            lambda method, path, fields: None
        )
        self.gate: asyncio.Event | None = None
        self.whole_gate: asyncio.Event | None = None
        self.began = asyncio.Event()
        self.prompt_tokens: int | None = None
        self.fails_after: int | None = None
        self.says = b""
        self.silent_after: int | None = None
        self.ends_late_s = 0.0
        self.event_end = b"\n\n"
        self.seed: int | None = None
        self.num_choices = 1
        self.answer_id = f"gen-{'0' * 24}"
        self.length = LENGTH
        self.status = 200
        self.body = b'{"choices":[]}'
        self.health: dict[str, Any] = {"ok": True, "state": "ready", "reason": "", "pending": 0}
        self.health_gate: asyncio.Event | None = None
        self.steps_total = 1
        self.has_beats = False
        self.process = 0
        self.beats: asyncio.Event | None = None
        self.changes: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.requests: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.raw_answer: bytes | None = None
        self.num_closed = 0
        self.before_token: Callable[[int], None] = lambda count: None
        self.closes_idle = False
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._readers: list[asyncio.StreamReader] = []
        self.port = 0

    async def start(self) -> None:
        """Listen at a free port, or again at the former one. Twice is once."""
        if self._server is not None and self._server.is_serving():
            return
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self, *, cuts: bool = False) -> None:
        """Take no more connections. cuts: open ones end, too."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers if cuts else ():
            writer.transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_left(self) -> int:
        """Connections that the other end has closed."""
        return sum(one.at_eof() or one.exception() is not None for one in self._readers)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._readers.append(reader)
        if self.process:
            _name_process(writer, self.process)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.num_closed += 1
            self._writers.discard(writer)
            writer.close()
            await asyncio.sleep(0)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")),
            0,
        )
        raw = await reader.readexactly(length)
        method, path = head.split(b" ")[:2]
        if path.endswith(b"/health"):
            if self.health_gate is not None:
                await self.health_gate.wait()
            status = 200 if self.health["ok"] else 503
            _whole(writer, status, {**self.health, "steps_total": self.steps_total})
            return True
        if path == b"/health/beats":
            if not self.has_beats:
                _whole(writer, 404, {})
                return True
            return await self._beat(writer)
        if path == b"/v1/models":
            if self.models_status != 200:
                _whole(writer, self.models_status, {"error": {"message": "the engine is gone"}})
                return True
            entries = [
                {"id": model, "system_fingerprint": self.fingerprint, "max_model_len": 100}
                for model in self.models
            ]
            _whole(writer, 200, {"data": entries})
            return True
        self.heads.append(head)
        request = json.loads(raw or b"{}")
        self.requests.append(request)
        answered = self.answer(method.decode(), path.decode(), request)
        if answered is not None:
            _whole(writer, *answered)
            return True
        if self.raw_answer is not None:
            writer.write(self.raw_answer)
            await writer.drain()
            return False
        if self.status != 200 or not request.get("stream"):
            self.began.set()
            if self.whole_gate is not None:
                await self.whole_gate.wait()
            _whole(writer, self.status, self.body)
            return True
        return await self._stream(request, writer) and not self.closes_idle

    async def _beat(self, writer: asyncio.StreamWriter) -> bool:
        """Write beats, and what is put into `changes`, until a change is empty."""
        self.beats = asyncio.Event()
        self.beats.set()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        while True:
            await self.beats.wait()
            try:
                change = self.changes.get_nowait()
            except asyncio.QueueEmpty:
                _chunk(writer, b":\n\n")
            else:
                if not change:
                    _chunk(writer, b"")
                    return True
                _chunk(writer, b"data: %b\n\n" % json.dumps(change).encode())
            await writer.drain()
            await asyncio.sleep(0.02)

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        named = b"x-quire-fingerprint: %b\r\n" % self.fingerprint.encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"x-request-id: one\r\n%b\r\n" % (named if self.names_fingerprint else b"")
        )
        await writer.drain()
        self.began.set()
        if self.gate is not None:
            await self.gate.wait()
        end, known = self.event_end, request.get("output_ids", [])
        if known and isinstance(known[0], list):
            known = [token for of_choice in known for token in of_choice]
        data = b"" if end == b"\n" else b"data: "
        for count, token in enumerate(range(100 + len(known), 100 + self.length)):
            if self.silent_after == count:
                await asyncio.Event().wait()
            if self.fails_after == count:
                if not self.says:
                    # half of the next delta: an event without its comment
                    _chunk(writer, b'%b{"token": %d}%b' % (data, token, end))
                    await writer.drain()
                    return False
                _chunk(writer, self.says)
                _chunk(writer, b"")
                return True
            self.before_token(token)
            fields: dict[str, Any] = {
                "output_ids": [token],
                "output_cursor": f"{self.answer_id}:1:{token - 99}:0",
            }
            if self.num_choices > 1:
                fields["choice"] = count % self.num_choices
                if count == 0:
                    fields["num_choices"] = self.num_choices
            if count == 0 and self.prompt_tokens is not None:
                fields["prompt_tokens"] = self.prompt_tokens
            if count == 0 and self.seed is not None:
                fields["seed"] = self.seed
            comment = json.dumps(fields, separators=(",", ":")).encode()
            _chunk(writer, b'%b{"token": %d}%b' % (data, token, end))
            _chunk(writer, b": %b%b" % (comment, end))
            await writer.drain()
            await asyncio.sleep(0)
        _chunk(writer, b'%b[DONE]%b: {"ended":null}%b' % (data, end, end))
        if self.ends_late_s:
            await asyncio.sleep(self.ends_late_s)
        _chunk(writer, b"")
        return True


def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    """Write a response; where its body is an error of OpenAI with a code, with that in a header."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    if status >= 400 and (code := _code_in(raw)):
        head += b"x-quire-error-code: %b\r\n" % code.encode()
    writer.write(head % (status, len(raw)) + b"\r\n" + raw)


def response(error: QuireError, dialect: Dialect = OPENAI) -> bytes:
    """Return the whole response of a server with an error, after which it closes."""
    made = error_response(error, dialect, request_id="r")
    lines = [b"HTTP/1.1 %d X" % made.status_code, b"connection: close"]
    lines += [b"%b: %b" % header for header in made.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(made.body)])


def _code_in(raw: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        code = json.loads(raw)["error"]["code"]
        return code if isinstance(code, str) else ""
    return ""


def _name_process(writer: asyncio.StreamWriter, number: int) -> None:
    """Add the header of a process to each head that is written."""
    write, start = writer.write, b"HTTP/1.1 "

    def write_named(data: Any) -> None:
        named = b"\r\nx-quire-process: %d\r\n" % number
        write(data.replace(b"\r\n", named, 1) if data.startswith(start) else data)

    writer.write = write_named  # type: ignore[method-assign]


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


class Listed(Unwatched):
    """A discovery of addresses that a test changes."""

    def __init__(self, urls: tuple[ServerUrl, ...]) -> None:
        self.urls = urls

    def poll(self) -> tuple[ServerUrl, ...]:
        return self.urls


class PieceWriter:
    """Takes pieces of a response's body at once, until one of them makes the client wait."""

    def __init__(self, took: Callable[[bytes], Any]) -> None:
        self._took = took
        self.can_write = True

    def write_piece(self, body: bytes) -> None:
        waits = self._took(body)
        if waits is not None:
            self.can_write = False
            asyncio.ensure_future(waits).add_done_callback(self._resume)

    def _resume(self, _: object) -> None:
        self.can_write = True


class Router:
    """A router's application over fake replicas, and a client of it without sockets."""

    def __init__(
        self, replicas: list[FakeReplica], features: Features | None = None, **settings: Any
    ) -> None:
        urls = tuple(server_url(one.url) for one in replicas)
        options = {"probe_s": 0.05, "stall_s": 0.4, "resume_s": 2.0, "policy": "round-robin"}
        self.lines: list[str] = []
        self.discovery = Listed(urls)
        log = Log("router", _Lines(self))
        features = features or Features()
        self.fleet = Fleet(
            RouterSettings(**{**options, **settings}), self.discovery, log, features.sets
        )
        make_look_up = features.make_look_up
        self.prefixes = None if make_look_up is None else make_look_up(self.fleet)
        self.admission = Admission(self.fleet)
        self.metrics = RouterMetrics(self.fleet)
        self.app = RouterApp(
            self.fleet,
            self.admission,
            self.metrics,
            log,
            features,
            look_up=None if self.prefixes is None else self.prefixes.look_up,
        )
        self.prober = Prober(self.fleet)
        self._probing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.prober.first_round()
        self._probing = asyncio.ensure_future(self.prober.run())

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        self.fleet.close()
        if self.prefixes is not None:
            self.prefixes.close()

    async def post(
        self,
        path: str,
        body: Any,
        *,
        headers: list[tuple[bytes, bytes]] | None = None,
        leaves_after: int | None = None,
        method: str = "",
        query: bytes = b"",
        on_piece: Callable[[bytes], Any] = lambda piece: None,
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Return status, headers and body. leaves_after: bytes after which the client leaves."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        raw = b"" if body is None else raw
        sent, left = [False], asyncio.Event()
        status, got_headers, pieces = [0], dict[bytes, bytes](), list[bytes]()

        async def receive() -> dict[str, Any]:
            if not sent[0]:
                sent[0] = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                got_headers.update(message["headers"])
                return
            waits = took(message["body"])
            if waits is not None:
                await waits
            if left.is_set():
                await asyncio.sleep(0)

        def took(piece: bytes) -> Any:
            pieces.append(piece)
            if leaves_after is not None and sum(map(len, pieces)) >= leaves_after:
                left.set()
            return on_piece(piece)

        scope = {
            WRITER: PieceWriter(took),
            "type": "http",
            "method": method or ("POST" if body is not None else "GET"),
            "path": path,
            "query_string": query,
            "headers": [(b"host", b"localhost"), *(headers or [])],
            "client": ("10.0.0.7", 5),
        }
        await self.app(scope, receive, send)  # type: ignore[arg-type]
        return status[0], got_headers, b"".join(pieces)

    async def leave(self, path: str, body: Any, after_s: float) -> None:
        """Send a request, and leave before it has any answer."""
        sent = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await asyncio.sleep(after_s)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        await self.app(scope, receive, send)  # type: ignore[arg-type]

    def count(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = self.metrics.text().decode()
        found = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def run(
    replicas: list[FakeReplica],
    story: Callable[[Router], Awaitable[Any]],
    features: Features | None = None,
    *,
    within_s: float = 20.0,
    **settings: Any,
) -> Any:
    """Run a story with a router before the replicas; nothing of it may be left open."""

    async def go() -> Any:
        for replica in replicas:
            await replica.start()
        router = Router(replicas, features, **settings)
        try:
            await router.start()
            async with asyncio.timeout(within_s):
                result = await story(router)
            assert router.admission.num_open == 0
            for replica in router.fleet.replicas.values():
                assert not replica.loads
                assert replica.backlog_tokens == 0
                assert (replica.queued_tokens, replica.expected_tokens) == (0, 0)
            return result
        finally:
            await router.close()
            for one in replicas:
                one.stop_listening(cuts=True)
            await asyncio.sleep(0.01)  # both ends notice

    has_threads = features is not None and features.make_look_up is not None
    return asyncio.run(go()) if has_threads else run_virtual(go(), tick_s=TICK_S)


class _Lines:
    def __init__(self, router: Router) -> None:
        self._router = router

    def write(self, line: str) -> int:
        self._router.lines.append(line)
        return len(line)

    def flush(self) -> None:
        """Lines are kept."""

"""Chat with a server: valid and broken streams of OpenAI-compatible servers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.base.errors import (
    InvalidParameter,
    OverloadedError,
    RequestError,
    StepRowError,
    UnknownModel,
    WorkerError,
)
from quire.cli.chat_backends import RemoteBackend
from tests.unit.cli.command import quire_command

HELLO = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "Hel"}}]},
    {"choices": [{"delta": {"content": "lo 🦙"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"total_tokens": 3}},
]


class FakeServer:
    """A server with one way to answer, which records requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, Any]] = []
        self.status = 200
        self.models: Any = {"data": [{"id": "first"}, {"id": "second"}]}
        self.answer = _events(HELLO) + b"data: [DONE]\n\n"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _responder(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _events(events: list[dict[str, Any]]) -> bytes:
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
    return (": a comment\n\n" + "".join(lines)).encode()


def _responder(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Responder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps(server.models).encode(), None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(server.status, server.answer, body)

        def _send(self, status: int, content: bytes, body: Any) -> None:
            server.asked.append((self.path, self.headers["Authorization"], body))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return Responder


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def _speaker(server: FakeServer, **changes: Any) -> RemoteBackend:
    settings = {"model": "m", "api_key": "k", "sampling": {"temperature": 0.5}, **changes}
    return RemoteBackend(server.url, **settings)


def _said(backend: RemoteBackend) -> list[str]:
    pieces: list[str] = []
    backend.stream_answer([{"role": "user", "content": "Hi"}], pieces.append)
    return pieces


def test_pieces_are_passed_on_as_they_arrive(server: FakeServer) -> None:
    assert _said(_speaker(server)) == ["Hel", "lo 🦙"]
    [(path, key, body)] = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "temperature": 0.5,
    }


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_address_may_or_may_not_end_in_v1(server: FakeServer, ending: str) -> None:
    server.url += ending
    _said(_speaker(server))
    assert server.asked[0][0] == "/v1/chat/completions"


def test_without_a_name_the_first_model_is_used(server: FakeServer) -> None:
    assert _speaker(server, model="").name == "first"
    server.models = {"data": []}
    with pytest.raises(WorkerError, match="lists no models; name one"):
        _speaker(server, model="")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestError),
        (401, RequestError),
        (404, UnknownModel),
        (429, OverloadedError),
        (503, OverloadedError),
        (500, WorkerError),
    ],
)
def test_errors_keep_the_servers_message(
    server: FakeServer, status: int, kind: type[Exception]
) -> None:
    server.status, server.answer = status, b'{"error": {"message": "because of this"}}'
    with pytest.raises(kind, match="because of this"):
        _said(_speaker(server))
    server.answer = b"<html>"
    with pytest.raises(kind, match=f"answers {status}"):
        _said(_speaker(server))


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (_events(HELLO[:2]), WorkerError, "closed the stream before the end"),
        (b"data: {oops\n\n", WorkerError, "not JSON"),
        (b"data: 3\n\n", WorkerError, "not an object"),
        (_events([{"error": {"message": "row failed"}}]), StepRowError, "row failed"),
        (_events([{"error": "gone"}]), StepRowError, "gone"),
    ],
)
def test_broken_streams_are_errors(
    server: FakeServer, answer: bytes, kind: type[Exception], words: str
) -> None:
    server.answer = answer
    with pytest.raises(kind, match=words):
        _said(_speaker(server))


def test_an_interrupted_answer_closes_its_connection() -> None:
    """Also of a server that closes it after each answer: it stops generating only then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        backend = RemoteBackend(
            f"http://127.0.0.1:{listening.getsockname()[1]}", model="m", api_key=None, sampling={}
        )
        num_left = []

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + _events(HELLO))
                num_left.append(len(connection.recv(1)))

        thread = threading.Thread(target=answer)
        thread.start()

        def interrupt(_: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as raised:
            backend.stream_answer([{"role": "user", "content": "Hi"}], interrupt)
        thread.join(10.0)  # while `raised` keeps the frames of the call
        assert num_left == [0], raised


def test_an_invalid_address_is_rejected() -> None:
    for url in ("ftp://x", "http://", "file:///x"):
        with pytest.raises(InvalidParameter, match="not an http"):
            RemoteBackend(url, model="m", api_key=None, sampling={})


def test_a_missing_server_is_code_1_with_a_remedy(server: FakeServer) -> None:
    server.close()
    done = quire_command("chat", "--url", server.url, given="Hi\n")
    assert done.returncode == 1
    assert "start one with `quire serve`" in done.stderr


def test_the_command_talks_to_a_server(server: FakeServer) -> None:
    done = quire_command("chat", "second", "--url", server.url, "--seed", "3", given="Hi\nAgain\n")
    assert done.stdout == "Hello 🦙\nHello 🦙\n"
    assert done.returncode == 0
    assert [len(body["messages"]) for _, _, body in server.asked] == [1, 3]
    assert {body["model"] for _, _, body in server.asked} == {"second"}
    assert {body["seed"] for _, _, body in server.asked} == {3}


def test_engine_flags_conflict_with_an_address(server: FakeServer) -> None:
    done = quire_command("chat", "--url", server.url, "--max-model-len", "64", given="")
    assert done.returncode == 2
    assert "--max-model-len configures an engine in this process" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--url", "http://127.0.0.1:99999"),
        ("--url", "http://[::1"),
        ("--url", "http://127.0.0.1:1", "--api-key", "sec\nret"),
        ("--url", "http://127.0.0.1:1", "--api-key", "sécret"),
    ],
)
def test_wrong_addresses_and_keys_are_one_line_without_the_key(flags: tuple[str, ...]) -> None:
    done = quire_command("chat", "m", *flags, given="Hi\n")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "cret" not in done.stderr


def test_a_failed_piped_line_sets_the_exit_code(server: FakeServer) -> None:
    server.status, server.answer = 400, b'{"error": {"message": "because of this"}}'
    done = quire_command("chat", "m", "--url", server.url, given="Hi\n")
    assert done.returncode == 2
    assert "because of this" in done.stderr

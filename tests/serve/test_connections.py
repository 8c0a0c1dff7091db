"""Connections: heads that are too large or never come, and requests behind a request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.serve.running_server import GIVE_UP_S, RunningServer

COMPLETIONS = "/v1/completions"


@contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=GIVE_UP_S) as connection:
        yield connection


def post(body: object) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def answer(connection: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 3_000_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["a long header", "a header without end", "many headers", "a long path"],
)
def test_a_head_that_is_too_large_is_refused_as_an_error_of_ours(
    server: RunningServer, head: bytes
) -> None:
    with connected(server) as connection:
        connection.sendall(head)
        status, _, rest = answer(connection).partition(b"\r\n")
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    body = json.loads(rest.partition(b"\r\n\r\n")[2])
    assert body["error"]["code"] == "headers_too_large"
    assert server.get("/health")[0] == 200


def test_what_is_not_http_is_told_so_in_json(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_requests_one_after_another_on_a_connection_are_all_answered(
    server: RunningServer,
) -> None:
    with connected(server) as connection:
        for _ in range(3):
            connection.sendall(post({"prompt": "a", "max_tokens": 1}))
            received = b""
            while not received.endswith(b"}}}"):
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")


def test_a_request_behind_a_request_is_not_taken_and_the_first_is_answered(
    server: RunningServer,
) -> None:
    with connected(server) as connection:
        connection.sendall(post({"prompt": "a", "max_tokens": 40}) + post({"prompt": "b"}))
        received = answer(connection)
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in received.partition(b"\r\n\r\n")[0]


def test_a_caller_who_leaves_is_noticed_with_a_request_behind_the_first(
    server: RunningServer,
) -> None:
    before = server.metric("quire_disconnects_total")
    with connected(server) as connection:
        connection.sendall(post({"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}))
        server.until(lambda: server.metric("quire_kv_blocks_used") > 0, "blocks taken")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks given back")
    server.until(lambda: server.metric("quire_disconnects_total") == before + 1, "noticed")


def test_idle_connections_do_not_keep_others_out(tiny: Path) -> None:
    with (
        RunningServer(tiny, "--threads", "1", files=128) as server,
        ExitStack() as idle,
    ):
        for _ in range(150):
            idle.enter_context(connected(server))
        assert server.get("/health")[0] == 200

"""Connections: bounds on heads, idle connections and handshakes; HTTP/1.0; half-closed ones."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.serve.running_server import GIVE_UP_S, RunningServer
from tests.serve.test_tls import made_in

COMPLETIONS = "/v1/completions"


@contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=GIVE_UP_S) as connection:
        yield connection


def post(body: object, *, version: str = "1.1") -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def answer(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes."""
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
def test_a_too_large_head_gets_a_json_error(server: RunningServer, head: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(head)
        status, _, rest = answer(connection).partition(b"\r\n")
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    head, _, body = rest.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert b"x-quire-error-code: headers_too_large" in head.split(b"\r\n")
    assert server.get("/health")[0] == 200


def test_non_http_bytes_get_a_json_error(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert "the address begins with http://" in error["message"]


def test_consecutive_requests_on_a_connection_are_answered(
    server: RunningServer,
) -> None:
    with connected(server) as connection:
        for _ in range(3):
            connection.sendall(post({"prompt": "a", "max_tokens": 1}))
            received = b""
            while not _is_whole(received):
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")


def _is_whole(received: bytes) -> bool:
    """Return whether a response has as many bytes as its head says."""
    head, end, body = received.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end) and len(body) == int(lengths[0].partition(b":")[2])


def test_pipelining_is_ignored_and_the_first_request_is_answered(
    server: RunningServer,
) -> None:
    with connected(server) as connection:
        connection.sendall(post({"prompt": "a", "max_tokens": 40}) + post({"prompt": "b"}))
        received = answer(connection)
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in received.partition(b"\r\n\r\n")[0]


def test_a_disconnect_is_noticed_behind_a_pipelined_request(
    server: RunningServer,
) -> None:
    before = server.metric("quire_disconnects_total")
    with connected(server) as connection:
        connection.sendall(post({"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}))
        server.until(lambda: server.metric("quire_kv_blocks_used") > 0, "blocks taken")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks given back")
    server.until(lambda: server.metric("quire_disconnects_total") == before + 1, "noticed")


@pytest.fixture(scope="module")
def few_files(tiny: Path) -> Iterator[RunningServer]:
    """A server with fewer file descriptors than the connections that the tests open."""
    with RunningServer(tiny, "--threads", "1", files=128) as server:
        yield server


def test_idle_connections_do_not_block_others(few_files: RunningServer) -> None:
    with ExitStack() as idle:
        for _ in range(150):
            idle.enter_context(connected(few_files))
        assert few_files.get("/health")[0] == 200


def test_connections_idle_after_a_request_do_not_block_others(few_files: RunningServer) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as idle:
        for _ in range(150):
            connection = idle.enter_context(connected(few_files))
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert [few_files.get("/health")[0] for _ in range(20)] == [200] * 20


def test_a_running_request_survives_a_flood_of_idle_connections(few_files: RunningServer) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
    with few_files.stream(COMPLETIONS, body) as reader, ExitStack() as idle:
        reader.next()
        for _ in range(150):
            connection = idle.enter_context(connected(few_files))
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert list(reader)[-1] == "[DONE]"


def test_an_idle_connection_is_closed_after_the_configured_time(tiny: Path) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    flags = ("--threads", "1", "--keep-alive-seconds", "0.05")
    with RunningServer(tiny, *flags) as server, connected(server) as connection:
        connection.sendall(request)
        assert answer(connection).startswith(b"HTTP/1.1 200")


def test_a_rejected_body_still_being_sent_is_closed(few_files: RunningServer) -> None:
    """Part of such a body stops the idle timer; another timer must replace it."""
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with ExitStack() as idle:
        for _ in range(150):
            connection = idle.enter_context(connected(few_files))
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 404")
            connection.sendall(b"x")
        assert few_files.get("/health")[0] == 200


def test_unstarted_handshakes_do_not_block_others(tiny: Path, tmp_path: Path) -> None:
    cert, key = made_in(tmp_path)
    context = ssl.create_default_context(cafile=cert)
    flags = ("--threads", "1", "--tls-cert", cert, "--tls-key", key)
    with RunningServer(tiny, *flags, files=128) as server, ExitStack() as silent:
        for _ in range(150):
            silent.enter_context(connected(server))
        for _ in range(8):
            with (
                connected(server) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("half_closed", [False, True])
def test_stream_framing_follows_the_clients_http_version(
    server: RunningServer, version: str, half_closed: bool
) -> None:
    with connected(server) as connection:
        connection.sendall(post({"prompt": "a", "max_tokens": 3, "stream": True}, version=version))
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
        elif version == "1.1":
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")  # ends the connection after the answer
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.count(b"HTTP/1.1") == 1
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    assert is_chunked == (version == "1.1")
    ends = b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if is_chunked else b"")
    assert body.endswith(ends)
    assert body.startswith(b"id: ") != is_chunked


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_client_gets_its_whole_answer(server: RunningServer, version: str) -> None:
    asked = {"prompt": "the sea", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    with connected(server) as connection:
        connection.sendall(post(asked, version=version))
        connection.shutdown(socket.SHUT_WR)
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    expected = server.post(COMPLETIONS, asked)[1]["choices"]
    assert json.loads(body)["choices"] == expected


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("half_closed_before", [False, True])
def test_a_closed_connection_is_noticed(
    server: RunningServer, version: str, half_closed_before: bool
) -> None:
    before = server.metric("quire_disconnects_total")
    with connected(server) as connection:
        asked = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}
        connection.sendall(post(asked, version=version))
        server.until(lambda: server.metric("quire_kv_blocks_used") > 0, "blocks taken")
        if half_closed_before:
            connection.shutdown(socket.SHUT_WR)
            # the response has begun, and nothing else has arrived
            assert connection.recv(1) == b"H"
    server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks given back")
    server.until(lambda: server.metric("quire_disconnects_total") == before + 1, "noticed")

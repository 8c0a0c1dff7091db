"""Each way in which a server can be unreadable has its own error; nothing hangs or fills memory.

One thread answers raw bytes on a loopback socket; what it sends is a table.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from quire.base.errors import InvalidParameter, WorkerError
from quire.base.server_url import unreachable_text
from quire.doctor.server_reader import ServerReader
from tests.cases import each_case
from tests.serve.test_tls import made_in

Answer = Callable[[socket.socket, bytes], None]


@contextmanager
def answering(answer: Answer) -> Iterator[int]:
    """Serve each connection with `answer(connection, request)`; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(10.0)
                    with suppress(OSError):  # the reader closed it
                        answer(connection, connection.recv(65536))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def reply(body: str, *, status: str = "200 OK", headers: str = "") -> Answer:
    raw = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n{body}"
    return lambda connection, _: connection.sendall(raw.encode())


def endless(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"quire_a 1\n" * 1000)


def trickling(connection: socket.socket, _: bytes) -> None:
    """Send a header that never ends, one byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    connection.settimeout(0.01)
    while True:
        connection.sendall(b"a")
        try:
            if not connection.recv(1):
                return
        except TimeoutError:
            continue


def cut(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nquire_a 1\n")


def other_server(name: str) -> Answer:
    def answer(connection: socket.socket, request: bytes) -> None:
        is_metrics = request.startswith(b"GET /metrics ")
        body = f"# HELP x\n{name}running 1\n" if is_metrics else '{"version": "0.9.1"}'
        reply(body)(connection, request)

    return answer


def error_of(port: int, **limits: float) -> str:
    """Return the error of reading a server as `quire doctor` does."""
    reader = ServerReader(f"http://127.0.0.1:{port}", **limits)  # type: ignore[arg-type]
    try:
        reader.check_is_quire()
        reader.required("/metrics")
    except WorkerError as error:
        return str(error)
    raise AssertionError("the server was read")


@each_case(
    ("answer", "said"),
    [
        (reply("<html><body>It works!</body></html>"), "is not a Quire server: GET /version"),
        (reply('{"version": "1"}'), "is not a Quire server"),
        (reply("[]"), "is not a Quire server"),
        (reply("nothing here", status="404 Not Found"), "GET /version answers 404"),
        (other_server("vllm:"), "is a vLLM server"),
        (other_server("llamacpp:"), "is a llama.cpp server"),
        (reply("", status="301 Moved", headers="Location: https://x/\r\n"), "redirects"),
        (lambda c, _: c.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not speak HTTP"),
        (lambda c, _: c.sendall(b"\x00" * 70_000), "does not speak HTTP"),
        (lambda c, _: None, "closed the connection without an answer; for TLS"),
        (cut, "ended before the answer was complete"),
        (endless, "sends more than 8 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_failure_has_its_error(answer: Answer, said: str) -> None:
    with answering(answer) as port:
        text = error_of(port)
    assert said in text
    assert f"http://127.0.0.1:{port}" in text


def test_an_answer_that_trickles_in_is_cut_off() -> None:
    with answering(trickling) as port:
        assert "did not answer completely within 0.1 s" in error_of(port, limit_s=0.1)


def test_a_quire_server_that_wants_a_key_or_another_address() -> None:
    for status, said in (
        ("401 Unauthorized", "needs a key: give one with --api-key"),
        ("403 Forbidden", "is not open to this key"),
        ("404 Not Found", "does not exist; give the address"),
        ("500 Oops", "answers 500; its log says why"),
    ):

        def answer(connection: socket.socket, request: bytes, status: str = status) -> None:
            if request.startswith(b"GET /version "):
                reply('{"name": "quire", "version": "1"}')(connection, request)
            else:
                reply("{}", status=status)(connection, request)

        with answering(answer) as port:
            assert said in error_of(port)


def test_the_key_and_the_path_of_a_proxy_are_sent() -> None:
    seen: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        seen.append(request)
        reply('{"name": "quire", "version": "1"}')(connection, request)

    with answering(answer) as port:
        for path in ("/llm/v1/", "/llm/metrics", "/llm"):
            reader = ServerReader(f"127.0.0.1:{port}{path}", api_key="sk-1")
            assert reader.check_is_quire() == "1"
    assert all(request.startswith(b"GET /llm/version HTTP/1.1\r\n") for request in seen)
    assert all(b"Authorization: Bearer sk-1\r\n" in request for request in seen)


def test_no_server_an_unknown_host_and_wrong_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "no server listens at" in error_of(port)
    for url in ("ftp://host", "http://", "http://[", "http://h:port"):
        with pytest.raises(InvalidParameter, match="address"):
            ServerReader(url)
    with pytest.raises(InvalidParameter, match="API key has characters"):
        ServerReader("http://h", api_key="a\nb")
    assert ServerReader("http://user:secret@h:1/x").shown == "http://h:1/x"


def test_tls_on_one_side_only_and_a_certificate_that_nobody_signed(tmp_path: Path) -> None:
    with answering(reply("{}")) as port, pytest.raises(WorkerError, match="does not speak TLS"):
        ServerReader(f"https://127.0.0.1:{port}").check_is_quire()
    cert, key = made_in(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, pytest.raises(ssl.SSLError):
                context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(WorkerError, match=r"is not trusted .* set SSL_CERT_FILE"):
            ServerReader(f"https://127.0.0.1:{listener.getsockname()[1]}").check_is_quire()
        thread.join()


def test_a_certificate_for_other_names_needs_another_address() -> None:
    error = ssl.SSLCertVerificationError("x")
    error.verify_code, error.verify_message = 62, "Hostname mismatch"
    said = unreachable_text("https://a.example", error)
    assert said == (
        "the certificate of https://a.example is for other names (Hostname mismatch); give an "
        "address that it names"
    )

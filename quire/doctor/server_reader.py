"""ServerReader: bounded GET requests to a Quire server, with an error for each way to fail.

Never trusts the other side: a response has a limit of bytes and of time, and redirects are not
followed. Raises WorkerError with what was found and what to do.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quire.base.errors import WorkerError
from quire.base.server_url import key_headers, key_refused_text, server_url, unreachable_text

LIMIT_S = 10.0
MAX_BYTES = 8 * 2**20
_CHUNK_BYTES = 65536
_SHOWN_CHARS = 60
# How other servers begin the names of their metrics.
_OTHER_SERVERS = {
    "vllm:": "vLLM",
    "sglang:": "SGLang",
    "llamacpp:": "llama.cpp",
    "tgi_": "text-generation-inference",
    "nv_inference": "Triton",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A response. text: its body."""

    status: int
    text: str

    def json(self) -> Any:
        """Return the body as JSON, None if it is not."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class ServerReader:
    """Reads one server. url: its address, with the prefix of a proxy if there is one.

    limit_s, max_bytes: limits of one response. Raises InvalidParameter for a wrong address or key.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        limit_s: float = LIMIT_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._address = server_url(url)
        self._path = self._address.path.removesuffix("/v1").removesuffix("/metrics")
        self._headers = {**key_headers(api_key), "Connection": "close"}
        self._limit_s, self._max_bytes = limit_s, max_bytes
        self.shown = self._address.shown + self._path

    def get(self, path: str) -> Reply:
        """Return the response to a GET. Raises WorkerError where none is complete."""
        address = self._address
        kind = http.client.HTTPSConnection if address.is_secure else http.client.HTTPConnection
        connection = kind(address.host, address.port, timeout=self._limit_s)
        try:
            connection.connect()
            assert connection.sock is not None
            with _cut_off(connection.sock, self._limit_s):
                connection.request("GET", self._path + path, headers=self._headers)
                with connection.getresponse() as response:
                    return Reply(response.status, self._body(response, path))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise WorkerError(self._why(error, path)) from error
        finally:
            connection.close()

    def required(self, path: str) -> Reply:
        """Return a response with status 200. Raises WorkerError."""
        reply = self.get(path)
        if reply.status == 200:
            return reply
        if reply.status == 401:
            has_key = "Authorization" in self._headers
            text = key_refused_text(self.shown + path, has_key=has_key)
            raise WorkerError(text)
        raise WorkerError(f"{self.shown}{path} {self._what_instead(reply.status)}")

    def optional(self, path: str) -> Any:
        """Return the JSON object of a response with status 200, None for any other response."""
        reply = self.get(path)
        found = reply.json() if reply.status == 200 else None
        return found if isinstance(found, dict) else None

    def check_is_quire(self) -> str:
        """Return the server's version. Raises WorkerError for a server that is not Quire."""
        reply = self.get("/version")
        found = reply.json() if reply.status == 200 else None
        if isinstance(found, dict) and found.get("name") == "quire":
            return str(found.get("version", "?"))
        if reply.status in (301, 302, 303, 307, 308):
            raise WorkerError(f"{self.shown} {self._what_instead(reply.status)}")
        metrics = self.get("/metrics")
        names = [line for line in metrics.text.splitlines()[:500] if not line.startswith("#")]
        for prefix, server in _OTHER_SERVERS.items():
            if metrics.status == 200 and any(name.startswith(prefix) for name in names):
                raise WorkerError(
                    f"{self.shown} is a {server} server; quire doctor reads the metrics of Quire"
                )
        raise WorkerError(
            f"{self.shown} is not a Quire server: GET /version answers {reply.status} with "
            f"{_shown(reply.text)}; give the address that quire serve printed"
        )

    def _body(self, response: http.client.HTTPResponse, path: str) -> str:
        parts, size = [], 0
        while part := response.read1(_CHUNK_BYTES):
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise WorkerError(
                    f"{self.shown}{path} sends more than {self._max_bytes >> 20} MiB; this is not "
                    "a Quire server"
                )
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts).decode("utf-8", "replace")

    def _what_instead(self, status: int) -> str:
        if status == 403:
            return "is not open to this key: give a key of --api-key or of an admin of the server"
        if status in (301, 302, 303, 307, 308):
            return "redirects; give the address it redirects to (https:// perhaps)"
        if status == 404:
            return "does not exist; give the address that quire serve printed, with a proxy's path"
        return f"answers {status}; its log says why"

    def _why(self, error: Exception, path: str) -> str:
        where = f"{self.shown}{path}"
        if isinstance(error, ssl.SSLError):
            return unreachable_text(self.shown, error)
        if isinstance(error, TimeoutError):
            return f"{where} did not answer completely within {self._limit_s:g} s"
        if isinstance(error, socket.gaierror):
            return f"{self.shown}: the host is not known ({error.strerror}); check its name"
        if isinstance(error, ConnectionRefusedError):
            return f"no server listens at {self.shown}; start one with quire serve"
        if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
            return f"{where} closed the connection without an answer; for TLS write https://"
        if isinstance(error, http.client.IncompleteRead):
            return f"{where} ended before the answer was complete; try again"
        if isinstance(error, http.client.HTTPException | ValueError):
            return f"{where} does not speak HTTP ({_shown(str(error))}); check the port"
        return f"{self.shown} cannot be reached: {error}"


@contextmanager
def _cut_off(connection: socket.socket, limit_s: float) -> Iterator[None]:
    """Shut a connection down after `limit_s`, however slowly its bytes come.

    Raises TimeoutError then.
    """
    expired = threading.Event()

    def shut_down() -> None:
        expired.set()
        with suppress(OSError):  # closed already
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if expired.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise TimeoutError


def _shown(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 4 * _SHOWN_CHARS].split())
    return repr(line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "...")

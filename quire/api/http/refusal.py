"""Refusals before there is a request: heads that cannot be read, and HTTP or TLS at the wrong port.

A client that speaks TLS cannot read an answer in plain text, and one that is disconnected for want
of file descriptors gets none, so the server's log says what is wrong: one line a minute at most for
each cause, however many such clients there are. Knows no route.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from quire.api.http.dialect import Dialect
from quire.api.http.errors import ErrorReport
from quire.base.http_apis import ERROR_CODE_HEADER
from quire.base.log import Log

# The first byte of a TLS handshake; HTTP begins with a letter.
TLS_HANDSHAKE = 0x16
_REPORT_S = 60.0
_HEAD = (
    b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"%bconnection: close\r\n\r\n"
)


def refusal(dialect: Dialect, status: bytes, message: str, *, code: str | None = None) -> bytes:
    """Return a whole response. status: with its reason phrase."""
    report = ErrorReport(status=int(status.split()[0]), code=code, message=message)
    body = msgspec.json.encode(dialect.error(report, "")[1])
    of_code = b"" if code is None else b"%b: %b\r\n" % (ERROR_CODE_HEADER, code.encode())
    return _HEAD % (status, len(body), of_code) + body


def refusal_of_http(dialect: Dialect) -> bytes:
    """Return the response to plain HTTP at a port of HTTPS."""
    message = "this port serves HTTPS, and the request is plain HTTP; use https:// in the address"
    return refusal(dialect, b"400 Bad Request", message)


class ConnectionReport:
    """Logs connections that end without an answer, with the text of one cause."""

    def __init__(self, log: Log, text: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log, self._text, self._now_s = log, text, now_s
        self._num_connections = 0
        self._next_s = 0.0

    def add(self) -> None:
        """Count a connection, and log all since the last line if that was a minute ago."""
        self._num_connections += 1
        now_s = self._now_s()
        if now_s >= self._next_s:
            self._log.warning(self._text, connections=self._num_connections)
            self._num_connections, self._next_s = 0, now_s + _REPORT_S


TLS_REPORT = ConnectionReport(
    Log("server"),
    "a client speaks HTTPS at a port of plain HTTP; use http:// in its address, or serve HTTPS "
    "with --tls-cert and --tls-key",
)
FULL_REPORT = ConnectionReport(
    Log("server"),
    "connections were closed without an answer: the limit on open files leaves room for no more; "
    "raise it before the start, as in `ulimit -n 4096`, or with LimitNOFILE= in a systemd unit",
)

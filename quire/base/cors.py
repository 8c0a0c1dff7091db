"""CORS: allow web pages of other origins to send requests and read responses.

The server and the router use this where --cors-origin lists origins, or `*` for any. A page's
script sends its key in a header, so credentials in the sense of CORS (cookies) are never allowed.
Knows no path: what no page may reach is its caller's to say. Always holds: an origin is allowed as
a whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from quire.base.errors import SettingError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
# Response headers that a page may read.
_SHOWN = (
    *("x-request-id", "request-id", "x-quire-resume-seconds", "x-quire-ignored-fields"),
    *("x-quire-error-code", "retry-after"),
)
_METHODS = "GET, POST, DELETE"
# Headers grant nothing by themselves (a key is a secret in any header), so every header name that a
# page's library adds is allowed.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(\s*,\s*[A-Za-z0-9_-]+)*")
_MAX_NAMES_CHARS = 4096
_KEPT_S = 600
_VARY = (b"vary", b"origin")
# Of the headers that `Cors.headers` returns, and of those of a preflight.
_PREFIX = b"access-control-"

Headers = list[tuple[bytes, bytes]]


class Cors:
    """The CORS rules of one listener. origins: of --cors-origin. shown: response headers that a
    page may read beside those of every server."""

    def __init__(self, origins: Sequence[str], shown: Sequence[str] = ()) -> None:
        self._origins = frozenset(origins)
        self._any = "*" in self._origins
        self._shown = ", ".join((*_SHOWN, *shown)).encode()

    def origin_of(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return the Origin in a request's headers if it is allowed, else None."""
        found = _header(headers, b"origin")
        allowed = found is not None and (self._any or found.lower() in self._origins)
        return found if allowed else None

    def headers(self, origin: str | None) -> Headers:
        """Return the headers of every response to a request of an allowed origin, or of none."""
        # Responses depend on the origin, so a cache may not share them between origins.
        headers = [] if self._any else [_VARY]
        if origin is not None:
            allowed = "*" if self._any else origin
            headers.append((b"access-control-allow-origin", allowed.encode("latin-1")))
            headers.append((b"access-control-expose-headers", self._shown))
        return headers

    def preflight(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], origin: str | None
    ) -> Headers | None:
        """Return the headers of the 204 response to a preflight request of an allowed origin,
        beside those of every response; None for other requests."""
        if origin is None or method != "OPTIONS":
            return None
        headers = list(headers)
        if _header(headers, b"access-control-request-method") is None:
            return None
        found = [
            (b"access-control-allow-methods", _METHODS.encode()),
            (b"access-control-max-age", b"%d" % _KEPT_S),
        ]
        names = _header(headers, b"access-control-request-headers") or ""
        if len(names) <= _MAX_NAMES_CHARS and _HEADER_NAMES.fullmatch(names):
            found.append((b"access-control-allow-headers", names.encode()))
        return found


def without_cors(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a response without those of CORS."""
    return [one for one in headers if not one[0].startswith(_PREFIX) and one != _VARY]


def check_origin(origin: str) -> None:
    """Raise SettingError for an entry of cors_origin that no browser sends."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise SettingError(
            f"cors_origin is {origin!r}; give scheme, host and port as browsers send them, as in "
            "https://app.example or http://localhost:3000 (lower case, no path, no trailing "
            "slash), or * for any"
        )


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    for found, value in headers:
        if found == name:
            return str(value.decode("latin-1").strip())
    return None

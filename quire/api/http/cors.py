"""CORS: allow web pages of other origins to send requests and read responses.

Only used if --cors-origin lists origins, or `*` for any. A page's script sends its key in a header,
so credentials in the sense of CORS (cookies) are never allowed. Always holds: no page of another
origin is allowed at admin paths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Scope

from quire.api.http.origins import is_guarded

# Response headers that a page may read.
_SHOWN = "x-request-id, request-id, x-quire-resume-seconds, x-quire-ignored-fields, retry-after"
_METHODS = "GET, POST, DELETE"
# Headers grant nothing by themselves (a key is a secret in any header), so every header name that a
# page's library adds is allowed.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(\s*,\s*[A-Za-z0-9_-]+)*")
_MAX_NAMES_CHARS = 4096
_KEPT_S = 600

Headers = list[tuple[bytes, bytes]]


class Cors:
    """The CORS rules of one server. origins: of --cors-origin."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)
        self._any = "*" in self._origins

    def origin_of(self, scope: Scope) -> str | None:
        """Return the Origin of a request if it is allowed, else None."""
        if is_guarded(scope["path"]):
            return None
        found = _header(scope, b"origin")
        allowed = found is not None and (self._any or found.lower() in self._origins)
        return found if allowed else None

    def headers(self, origin: str | None) -> Headers:
        """Return the headers of every response to a request of an allowed origin, or of none."""
        # Responses depend on the origin, so a cache may not share them between origins.
        headers = [] if self._any else [(b"vary", b"origin")]
        if origin is not None:
            allowed = "*" if self._any else origin
            headers.append((b"access-control-allow-origin", allowed.encode("latin-1")))
            headers.append((b"access-control-expose-headers", _SHOWN.encode()))
        return headers

    def preflight(self, scope: Scope, origin: str | None) -> Response | None:
        """Return the response to a preflight request of an allowed origin; None for others."""
        if origin is None or scope["method"] != "OPTIONS":
            return None
        if _header(scope, b"access-control-request-method") is None:
            return None
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-max-age": str(_KEPT_S),
        }
        names = _header(scope, b"access-control-request-headers") or ""
        if len(names) <= _MAX_NAMES_CHARS and _HEADER_NAMES.fullmatch(names):
            headers["access-control-allow-headers"] = names
        return Response(status_code=204, headers=headers)


def _header(scope: Scope, name: bytes) -> str | None:
    for found, value in scope["headers"]:
        if found == name:
            return str(value.decode("latin-1").strip())
    return None

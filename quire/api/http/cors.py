"""CORS: the pages of other origins that a browser lets ask here and read what we answer.

Off unless --cors-origin names origins, or `*` for any. A key travels in a header that a page's
program sets, never in what a browser sends by itself, so credentials in CORS' sense (cookies) are
never allowed. Always holds: no page of another origin is let at the admin's paths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Scope

from quire.api.http.auth import is_guarded

# What a page may read of an answer beside its body.
_SHOWN = "x-request-id, x-quire-resume-seconds, x-quire-ignored-fields, retry-after"
_METHODS = "GET, POST, DELETE"
# No header of a request has authority of its own here (a key is a secret wherever it stands), so
# whatever a page's library adds to its requests is allowed.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(\s*,\s*[A-Za-z0-9_-]+)*")
_MAX_NAMES_CHARS = 4096
_KEPT_S = 600

Headers = list[tuple[bytes, bytes]]


class Cors:
    """Of one server. origins: as --cors-origin has them."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)
        self._any = "*" in self._origins

    def origin_of(self, scope: Scope) -> str | None:
        """The origin of the page that asks, where it is another and may; else None."""
        if not self._origins or is_guarded(scope["path"]):
            return None
        found = _header(scope, b"origin")
        allowed = found is not None and (self._any or found.lower() in self._origins)
        return found if allowed else None

    def headers(self, origin: str | None) -> Headers:
        """What every answer to a request of that origin carries."""
        if not self._origins:
            return []
        # What is answered depends on who asks, so what is kept for one page is not shown another.
        headers = [] if self._any else [(b"vary", b"origin")]
        if origin is not None:
            allowed = "*" if self._any else origin
            headers.append((b"access-control-allow-origin", allowed.encode("latin-1")))
            headers.append((b"access-control-expose-headers", _SHOWN.encode()))
        return headers

    def preflight(self, scope: Scope, origin: str | None) -> Response | None:
        """The answer to a browser that asks whether a page of that origin may ask; None where
        that is not what the request is."""
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

"""Ollama's conventions: `{"error": "..."}` bodies, streams of one JSON object a line.

Ollama's server has no keys; its clients send `Authorization: Bearer KEY` to the hosts that want
one, and that is read here. Always holds: an error body is {"error": message}, in a response and as
the last line of a failed stream. A stream has no line without an object: clients parse each.
"""

from __future__ import annotations

from typing import Any

from quire.api.http.dialect import Headers
from quire.api.http.errors import ErrorReport
from quire.base import http_apis
from quire.base.errors import NotAuthorized

MEDIA_TYPE = "application/x-ndjson"


class OllamaFraming:
    """One line of JSON for each event; the object with `done` is the last."""

    media_type, event_end = MEDIA_TYPE, b"\n"
    heartbeat = b""

    def event(self, number: int, payload: bytes, kind: str = "") -> bytes:
        """Return one line."""
        return b"%b\n" % payload

    error = event

    def end(self, number: int) -> bytes:
        """Return nothing: the last object marks the end."""
        return b""


class OllamaDialect:
    """See the top of this file."""

    challenge = "Bearer"
    id_header = "x-request-id"

    def read_key(self, headers: Headers) -> bytes:
        """Return the key of `Authorization: Bearer KEY`. Raises NotAuthorized."""
        key = http_apis.key_in(headers, http_apis.KEY_HEADERS[http_apis.OLLAMA])
        if not key:
            raise NotAuthorized(
                "no API key was sent; send `Authorization: Bearer KEY` (the `headers` of Ollama's "
                "clients)"
            )
        return key

    def error(self, report: ErrorReport, request_id: str) -> tuple[int, Any]:
        """Return the status and the body."""
        return report.status, {"error": report.message}

    def framing(self, request_id: str) -> OllamaFraming:
        """Return the framing of one stream."""
        return OllamaFraming()


OLLAMA = OllamaDialect()

"""llama.cpp's conventions: `{"error": {code, message, type}}` bodies, events of `data:` alone.

Its server reads keys as bearer tokens or from `X-Api-Key`. Always holds: an error body is {"error":
{code, message, type}} with the status as code, in a response and in a stream; that of a prompt that
exceeds the context has both lengths. A stream has no end marker, since its last object has `stop`.
"""

from __future__ import annotations

from typing import Any

from quire.api.http.dialect import Headers
from quire.api.http.errors import ErrorReport
from quire.base import http_apis
from quire.base.errors import NotAuthorized

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "unavailable_error",
    503: "unavailable_error",
}
TOO_LONG = "exceed_context_size_error"


class LlamaCppFraming:
    """Server-sent events without ids and names."""

    media_type, event_end = "text/event-stream", b"\n\n"
    heartbeat = b":\n\n"

    def event(self, number: int, payload: bytes, kind: str = "") -> bytes:
        """Return one event."""
        return b"data: %b\n\n" % payload

    error = event

    def end(self, number: int) -> bytes:
        """Return nothing: the last object has `stop`."""
        return b""


class LlamaCppDialect:
    """See the top of this file."""

    challenge = "Bearer"
    id_header = "x-request-id"

    def read_key(self, headers: Headers) -> bytes:
        """Return the key of `Authorization: Bearer KEY` or `X-Api-Key: KEY`.

        Raises NotAuthorized.
        """
        key = http_apis.key_in(headers, http_apis.KEY_HEADERS[http_apis.LLAMA_CPP])
        if not key:
            raise NotAuthorized(
                "no API key was sent; send `Authorization: Bearer KEY`, or `X-Api-Key: KEY`"
            )
        return key

    def error(self, report: ErrorReport, request_id: str) -> tuple[int, Any]:
        """Return the status and the body."""
        kind = error_type(report.status)
        if report.code == "context_length_exceeded":
            kind = TOO_LONG
        error: dict[str, Any] = {"code": report.status, "message": report.message, "type": kind}
        if report.lengths is not None:
            error["n_prompt_tokens"], error["n_ctx"] = report.lengths
        return report.status, {"error": error}

    def framing(self, request_id: str) -> LlamaCppFraming:
        """Return the framing of one stream."""
        return LlamaCppFraming()


def error_type(status: int) -> str:
    """Return llama.cpp's `type` of an error with this status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


LLAMA_CPP = LlamaCppDialect()

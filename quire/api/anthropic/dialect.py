"""Anthropic's conventions: `x-api-key`, `{"type": "error", ...}` bodies, events with names.

Statuses and types of errors are those that Anthropic documents: 529 for a server without capacity,
504 for a request that took too long. A key may also be sent as `Authorization: Bearer KEY`, as
coding agents do. Always holds: an error body is {"type": "error", "error": {type, message},
"request_id"}, in a response and in a stream.
"""

from __future__ import annotations

from typing import Any

from quire.api.http.dialect import Headers
from quire.api.http.errors import ErrorReport
from quire.base import http_apis
from quire.base.errors import NotAuthorized

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# Coding agents shorten a conversation if the message of an error begins with these words.
_TOO_LONG = "prompt is too long: "


class AnthropicFraming:
    """Server-sent events: `event: TYPE`, one `data:` line each, `message_stop` last."""

    media_type, event_end = "text/event-stream", b"\n\n"
    heartbeat = b'event: ping\ndata: {"type":"ping"}\n\n'

    def event(self, number: int, payload: bytes, kind: str) -> bytes:
        """Return one event."""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)

    def error(self, number: int, payload: bytes) -> bytes:
        """Return the event of an error."""
        return self.event(number, payload, "error")

    def end(self, number: int) -> bytes:
        """Return the `message_stop` event."""
        return self.event(number, b'{"type":"message_stop"}', "message_stop")


class AnthropicDialect:
    """See the top of this file."""

    challenge = None
    id_header = "request-id"

    def read_key(self, headers: Headers) -> bytes:
        """Return the key of `x-api-key: KEY` or `Authorization: Bearer KEY`.

        Raises NotAuthorized.
        """
        key = http_apis.key_in(headers, http_apis.KEY_HEADERS[http_apis.ANTHROPIC])
        if not key:
            raise NotAuthorized(
                "no API key was sent; send `x-api-key: KEY`, or `Authorization: Bearer KEY`"
            )
        return key

    def error(self, report: ErrorReport, request_id: str) -> tuple[int, Any]:
        """Return the status and the body."""
        status = status_of(report.status)
        is_too_long = report.code == "context_length_exceeded"
        message = f"{_TOO_LONG}{report.message}" if is_too_long else report.message
        error = {"type": error_type(status), "message": message}
        return status, {"type": "error", "error": error, "request_id": request_id or None}

    def framing(self, request_id: str) -> AnthropicFraming:
        """Return the framing of one stream."""
        return AnthropicFraming()


def status_of(status: int) -> int:
    """Return Anthropic's status for one of errors.py."""
    return OVERLOADED if status == 503 else status


def error_type(status: int) -> str:
    """Return Anthropic's `type` of an error with this status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


ANTHROPIC = AnthropicDialect()

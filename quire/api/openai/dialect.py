"""OpenAI's conventions: bearer keys, `{"error": ...}` bodies, `data:` events that end in `[DONE]`.

Also what this server's own routes (`native/`) speak by default. Always holds: an error body is
{"error": {message, type, param, code}}, in a response and in a stream.
"""

from __future__ import annotations

from typing import Any

from quire.api.http.dialect import Headers
from quire.api.http.errors import ErrorReport
from quire.base.errors import NotAuthorized
from quire.base.http_apis import AUTHORIZATION, key_in

# Statuses below 500 that are not the fault of the request.
_SERVER_SIDE = (408, 409)
# Headers in which other APIs take the key.
_OTHER_HEADERS = (b"x-api-key", b"api-key", b"x-goog-api-key")


class OpenAIFraming:
    """Server-sent events: `id: REQUEST:NUMBER`, one `data:` line each, `[DONE]` last."""

    media_type, event_end = "text/event-stream", b"\n\n"
    heartbeat = b": waiting\n\n"

    def __init__(self, request_id: str) -> None:
        self._prefix = f"id: {request_id}:".encode()

    def event(self, number: int, payload: bytes, kind: str = "") -> bytes:
        """Return one event, without its kind."""
        return b"%b%d\ndata: %b\n\n" % (self._prefix, number, payload)

    error = event

    def end(self, number: int) -> bytes:
        """Return the `[DONE]` event."""
        return self.event(number, b"[DONE]")


class OpenAIDialect:
    """See the top of this file."""

    challenge = "Bearer"
    id_header = "x-request-id"

    def read_key(self, headers: Headers) -> bytes:
        """Return the key of `Authorization: Bearer KEY`. Raises NotAuthorized."""
        if key := key_in(headers, (AUTHORIZATION,)):
            return key
        if any(name == AUTHORIZATION for name, _ in headers):
            raise NotAuthorized(
                "the Authorization header is not of the form `Bearer KEY`; send it like that"
            )
        other = next((name.decode() for name, _ in headers if name in _OTHER_HEADERS), "")
        found = f"; {other} is not read here" if other else ""
        raise NotAuthorized(f"no API key was sent{found}; send `Authorization: Bearer KEY`")

    def error(self, report: ErrorReport, request_id: str) -> tuple[int, Any]:
        """Return the status and `{"error": ...}`."""
        body = {
            "message": report.message,
            "type": error_type(report.status),
            "param": report.param,
            "code": report.code,
        }
        return report.status, {"error": body}

    def framing(self, request_id: str) -> OpenAIFraming:
        """Return the framing of one stream."""
        return OpenAIFraming(request_id)


def error_type(status: int) -> str:
    """Return OpenAI's `type` of an error with this status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 or status in _SERVER_SIDE else "invalid_request_error"


OPENAI = OpenAIDialect()

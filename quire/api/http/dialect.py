"""Dialect: what one HTTP API decides for itself, and the neutral HTTP code asks it for.

OpenAI's API is one dialect (`quire/api/openai/dialect.py`). A route hands its dialect to
`generate`; the middleware picks the dialect of a path for errors that are raised before a route.
Knows no API. Always holds: nothing in `http/`, `streaming/` or `generation/` writes an error body,
frames an event or reads a key except through these protocols.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from quire.api.http.errors import ErrorReport, error_headers, report_of
from quire.base.errors import NotAuthorized, QuireError

Headers = Iterable[tuple[bytes, bytes]]


class EventFraming(Protocol):
    """Frame the events of one streamed response.

    Events are numbered from 1. A framing with the event ids `REQUEST:NUMBER` can be resumed
    by `Last-Event-ID`.
    """

    @property
    def media_type(self) -> str:
        """Return the content type of the stream."""

    @property
    def heartbeat(self) -> bytes:
        """Return the bytes that keep an idle connection open; b"" for none."""

    @property
    def event_end(self) -> bytes:
        """Return the bytes that end each event, and each comment."""

    def event(self, number: int, payload: bytes, kind: str) -> bytes:
        """Return an event with JSON `payload`. kind: the chunk's field `type`, "" without one."""

    def error(self, number: int, payload: bytes) -> bytes:
        """Return the event that ends a failed stream; `payload` is the JSON of the error."""

    def end(self, number: int) -> bytes:
        """Return the marker that ends a complete stream; b"" for none."""


class Dialect(Protocol):
    """The conventions of one HTTP API."""

    @property
    def challenge(self) -> str | None:
        """Return the `www-authenticate` header of a 401 response; None for none."""

    @property
    def id_header(self) -> str:
        """Return the header of all responses that has the request's id, beside `x-request-id`."""

    def read_key(self, headers: Headers) -> bytes:
        """Return the API key of a request. Raises NotAuthorized if it is missing or malformed."""

    def error(self, report: ErrorReport, request_id: str) -> tuple[int, Any]:
        """Return the HTTP status and the JSON body of an error. request_id: as in the header
        `x-request-id`; "" before there is a request."""

    def framing(self, request_id: str) -> EventFraming:
        """Return the framing of the stream of one request."""


def error_response(error: QuireError, dialect: Dialect, *, request_id: str) -> Response:
    """Return the response of an error in a dialect."""
    status, body = dialect.error(report_of(error), request_id)
    headers = {"x-request-id": request_id, **error_headers(error)}
    if isinstance(error, NotAuthorized) and dialect.challenge is not None:
        headers["www-authenticate"] = dialect.challenge
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )

"""Errors as HTTP: each class of the tree has a status, a type and a code in OpenAI's words.

Knows nothing of how an error came about. Always holds: every class of quire/base/errors.py maps to
exactly one row (its own, else its nearest ancestor's), and a body is always
{"error": {message, type, param, code}}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from quire.base.errors import (
    BodyTooLarge,
    CapacityError,
    ContextTooLong,
    DeadlineMissed,
    DeviceLost,
    InvalidParameter,
    ModelError,
    NotAuthorized,
    OverloadedError,
    QueueTimedOut,
    QuireError,
    RequestError,
    SettingError,
    ShuttingDown,
    StepRowError,
    TenantLimit,
    TimedOut,
    UnknownModel,
    WorkerError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """How a class of errors looks to a caller."""

    status: int
    type: str
    code: str | None


class UnknownRoute(RequestError):
    """Nothing is served at this path."""


class MethodNotAllowed(RequestError):
    """The path is served, but not by this method. `allowed` names those that are."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnsupportedEncoding(RequestError):
    """The body is compressed, or encoded in another way."""


class NotAdmin(RequestError):
    """The key is a tenant's, and what is asked for tells of everybody."""


class ForeignPage(RequestError):
    """A browser asks for a page that is not of this server, which has no key."""


class UnknownRequest(RequestError):
    """No request of that id is known to whoever asks."""


class ResumeGone(RequestError):
    """The stream cannot go on from there: those events are not kept."""


class NothingToChoose(RequestError):
    """What the request bans, or its grammar, left no token to go on with."""


class Aborted(QuireError):
    """Somebody ended the request by its id."""


class SlowReader(QuireError):
    """The stream's reader did not read, or not fast enough; its request was ended."""


class ReaderGone(QuireError):
    """The reader of a resumable stream left and did not come back in time."""


class ReadElsewhere(QuireError):
    """The stream was resumed on another connection, and goes on there."""


SHAPES: dict[type[QuireError], ErrorShape] = {
    RequestError: ErrorShape(status=400, type="invalid_request_error", code=None),
    InvalidParameter: ErrorShape(status=400, type="invalid_request_error", code="invalid_value"),
    ContextTooLong: ErrorShape(
        status=400, type="invalid_request_error", code="context_length_exceeded"
    ),
    BodyTooLarge: ErrorShape(status=413, type="invalid_request_error", code="body_too_large"),
    UnsupportedEncoding: ErrorShape(
        status=415, type="invalid_request_error", code="unsupported_encoding"
    ),
    UnknownModel: ErrorShape(status=404, type="invalid_request_error", code="model_not_found"),
    UnknownRoute: ErrorShape(status=404, type="invalid_request_error", code="unknown_url"),
    MethodNotAllowed: ErrorShape(
        status=405, type="invalid_request_error", code="method_not_allowed"
    ),
    UnknownRequest: ErrorShape(status=404, type="invalid_request_error", code="unknown_request"),
    ResumeGone: ErrorShape(status=410, type="invalid_request_error", code="resume_gone"),
    NothingToChoose: ErrorShape(
        status=400, type="invalid_request_error", code="no_token_to_choose"
    ),
    Aborted: ErrorShape(status=409, type="server_error", code="aborted"),
    SlowReader: ErrorShape(status=408, type="server_error", code="slow_reader"),
    ReaderGone: ErrorShape(status=408, type="server_error", code="reader_gone"),
    ReadElsewhere: ErrorShape(status=409, type="server_error", code="read_elsewhere"),
    ForeignPage: ErrorShape(status=403, type="invalid_request_error", code="foreign_page"),
    NotAdmin: ErrorShape(status=403, type="invalid_request_error", code="not_admin"),
    NotAuthorized: ErrorShape(status=401, type="invalid_request_error", code="invalid_api_key"),
    OverloadedError: ErrorShape(status=503, type="server_error", code="overloaded"),
    ShuttingDown: ErrorShape(status=503, type="server_error", code="shutting_down"),
    QueueTimedOut: ErrorShape(status=503, type="server_error", code="queue_timeout"),
    DeadlineMissed: ErrorShape(status=503, type="server_error", code="deadline_missed"),
    TenantLimit: ErrorShape(status=429, type="rate_limit_error", code="tenant_limit"),
    TimedOut: ErrorShape(status=504, type="server_error", code="timeout"),
    WorkerError: ErrorShape(status=500, type="server_error", code="worker_error"),
    StepRowError: ErrorShape(status=500, type="server_error", code="step_row_error"),
    DeviceLost: ErrorShape(status=500, type="server_error", code="device_lost"),
    ModelError: ErrorShape(status=500, type="server_error", code="model_error"),
    SettingError: ErrorShape(status=500, type="server_error", code="setting_error"),
    CapacityError: ErrorShape(status=500, type="server_error", code="capacity_error"),
    QuireError: ErrorShape(status=500, type="server_error", code="internal_error"),
}

# What connection.py refuses before there is a request.
HEAD_TOO_LARGE = ErrorShape(status=431, type="invalid_request_error", code="headers_too_large")


def shape_of(error: QuireError) -> ErrorShape:
    """The row of an error's class, or of its nearest ancestor that has one."""
    return next(SHAPES[kind] for kind in type(error).__mro__ if kind in SHAPES)


def error_body(error: QuireError) -> dict[str, Any]:
    """The JSON of an error: a response's body, or the data of an event inside a stream."""
    shape = shape_of(error)
    param = error.param if isinstance(error, RequestError) else None
    return {
        "error": {"message": str(error), "type": shape.type, "param": param, "code": shape.code}
    }


def error_response(error: QuireError, *, request_id: str) -> Response:
    """A response for an error, with the headers its class calls for."""
    headers = {"x-request-id": request_id}
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    if isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = "identity"
    if isinstance(error, NotAuthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=shape_of(error).status,
        headers=headers,
        media_type="application/json",
    )

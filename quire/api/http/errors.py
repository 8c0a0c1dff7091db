"""Map error classes to HTTP: a status and a code for each class, and the response of an error.

The body of an error is its dialect's. Always holds: every class of quire/base/errors.py maps to
exactly one row (its own, else its nearest ancestor's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    PoisonRequest,
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
from quire.base.http_apis import ERROR_CODE_HEADER
from quire.base.records import NOTHING_LEFT
from quire.base.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """The HTTP status of a class of errors, and the code that identifies it."""

    status: int
    code: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """One error as a dialect writes it. param: the request field at fault, if there is one.
    lengths: as in ContextTooLong."""

    status: int
    code: str | None
    message: str
    param: str | None = None
    lengths: tuple[int, int] | None = None


class UnknownRoute(RequestError):
    """No route has this path."""


class MethodNotAllowed(RequestError):
    """The path exists but does not support this method. `allowed` lists those that it supports."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnsupportedEncoding(RequestError):
    """The body has a content encoding other than identity."""


class NotAdmin(RequestError):
    """The key is not an admin's, and the path is for admins."""


class ForeignPage(RequestError):
    """A web page of another origin sent the request, and the server has no keys."""


class UnknownRequest(RequestError):
    """No request with that id was sent with this key."""


class UnknownResponse(RequestError):
    """No response with that id is stored for this key."""


class UnknownConversation(RequestError):
    """No conversation, or no item of it, with that id is stored for this key."""


class UnknownFile(RequestError):
    """No file with that id is stored for this key."""


class UnknownBatch(RequestError):
    """No batch with that id is stored for this key."""


class ResumeGone(RequestError):
    """The stream cannot resume there: those events are no longer kept."""


class NothingToChoose(RequestError):
    """The bans or the grammar of the request left no token to sample."""


class Aborted(QuireError):
    """The request was aborted by its id."""


class SlowReader(QuireError):
    """The client did not read the stream fast enough, so the request was ended."""


class ReaderGone(QuireError):
    """The client of a resumable stream disconnected and did not reconnect in time."""


class ReadElsewhere(QuireError):
    """The stream was resumed on another connection."""


SHAPES: dict[type[QuireError], ErrorShape] = {
    RequestError: ErrorShape(status=400, code=None),
    InvalidParameter: ErrorShape(status=400, code="invalid_value"),
    ContextTooLong: ErrorShape(status=400, code="context_length_exceeded"),
    BodyTooLarge: ErrorShape(status=413, code="body_too_large"),
    UnsupportedEncoding: ErrorShape(status=415, code="unsupported_encoding"),
    UnknownModel: ErrorShape(status=404, code="model_not_found"),
    UnknownRoute: ErrorShape(status=404, code="unknown_url"),
    MethodNotAllowed: ErrorShape(status=405, code="method_not_allowed"),
    UnknownRequest: ErrorShape(status=404, code="unknown_request"),
    UnknownResponse: ErrorShape(status=404, code="response_not_found"),
    UnknownConversation: ErrorShape(status=404, code="conversation_not_found"),
    UnknownFile: ErrorShape(status=404, code="file_not_found"),
    UnknownBatch: ErrorShape(status=404, code="batch_not_found"),
    ResumeGone: ErrorShape(status=410, code="resume_gone"),
    NothingToChoose: ErrorShape(status=400, code="no_token_to_choose"),
    Aborted: ErrorShape(status=409, code="aborted"),
    SlowReader: ErrorShape(status=408, code="slow_reader"),
    ReaderGone: ErrorShape(status=408, code="reader_gone"),
    ReadElsewhere: ErrorShape(status=409, code="read_elsewhere"),
    ForeignPage: ErrorShape(status=403, code="foreign_page"),
    NotAdmin: ErrorShape(status=403, code="not_admin"),
    NotAuthorized: ErrorShape(status=401, code="invalid_api_key"),
    OverloadedError: ErrorShape(status=503, code="overloaded"),
    ShuttingDown: ErrorShape(status=503, code="shutting_down"),
    QueueTimedOut: ErrorShape(status=503, code="queue_timeout"),
    DeadlineMissed: ErrorShape(status=503, code="deadline_missed"),
    TenantLimit: ErrorShape(status=429, code="tenant_limit"),
    TimedOut: ErrorShape(status=504, code="timeout"),
    WorkerError: ErrorShape(status=500, code="worker_error"),
    StepRowError: ErrorShape(status=500, code="step_row_error"),
    PoisonRequest: ErrorShape(status=500, code="poison_request"),
    DeviceLost: ErrorShape(status=500, code="device_lost"),
    ModelError: ErrorShape(status=500, code="model_error"),
    SettingError: ErrorShape(status=500, code="setting_error"),
    CapacityError: ErrorShape(status=500, code="capacity_error"),
    QuireError: ErrorShape(status=500, code="internal_error"),
}

# Errors that the same request would meet again. OpenAI's and Anthropic's clients resend requests
# with a status of 409 or 500 and above unless a header says that it is useless.
_FINAL = (Aborted, ReadElsewhere, PoisonRequest, ModelError, SettingError, CapacityError)

# The refusal of connection.py, before there is a request.
HEAD_TOO_LARGE = ErrorShape(status=431, code="headers_too_large")


def shape_of(error: QuireError) -> ErrorShape:
    """Return the row of an error's class, or of its nearest ancestor that has one."""
    return next(SHAPES[kind] for kind in type(error).__mro__ if kind in SHAPES)


def report_of(error: QuireError) -> ErrorReport:
    """Return an error as a dialect writes it."""
    shape = shape_of(error)
    param = error.param if isinstance(error, RequestError) else None
    return ErrorReport(
        status=shape.status,
        code=shape.code,
        message=str(error),
        param=param,
        lengths=error.lengths if isinstance(error, ContextTooLong) else None,
    )


def error_headers(error: QuireError) -> dict[str, str]:
    """Return the headers that the class of an error calls for, in every dialect: its code, and what
    the client should do."""
    code = shape_of(error).code
    headers = {} if code is None else {ERROR_CODE_HEADER.decode(): code}
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    elif isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = "identity"
    elif isinstance(error, OverloadedError) and error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    elif isinstance(error, _FINAL):
        headers["x-should-retry"] = "false"
    return headers


def row_failure(sampling: SamplingParams, message: str | None) -> QuireError:
    """Return the error of a failed row: the request's fault if it may have left no token."""
    reason = message or "the engine could not compute this request"
    bans = (
        sampling.structured_outputs is not None
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.no_repeat_ngram_size
        or sampling.min_tokens
        or -math.inf in sampling.logit_bias.values()
    )
    is_own = bans and reason.startswith(NOTHING_LEFT)
    return NothingToChoose(reason) if is_own else StepRowError(reason)

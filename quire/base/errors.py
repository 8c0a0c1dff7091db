"""Every error Quire raises on purpose, in one tree.

    QuireError
    ├── RequestError            the caller's fault: fix the request (HTTP 400)
    │   ├── InvalidParameter    a field has a value that is not allowed; `param` names it
    │   ├── ContextTooLong      prompt and output can never fit the context or the cache
    │   ├── BodyTooLarge        more bytes were sent than are allowed (HTTP 413)
    │   ├── UnknownModel        the model asked for is not served here (HTTP 404)
    │   └── NotAuthorized       no key, or a wrong one (HTTP 401)
    ├── ModelError              the model's files are wrong or not supported
    │   ├── ConfigError         config.json: unknown, missing or contradictory values
    │   ├── WeightsError        weight files: corrupt, missing, unexpected or of a wrong shape
    │   └── TokenizerError      tokenizer or chat template: missing, broken or contradictory
    ├── SettingError            a flag or constructor argument has a value that is not allowed
    ├── CapacityError           the machine is too small for what was asked at start-up
    ├── OverloadedError         busy now, try later (HTTP 503)
    │   ├── ShuttingDown        the server is draining (HTTP 503)
    │   ├── QueueTimedOut       it waited for its first step as long as it may (HTTP 503)
    │   ├── DeadlineMissed      it cannot be served by its deadline, and was not begun (HTTP 503)
    │   ├── TenantLimit         its tenant has as much waiting as it may (HTTP 429)
    │   └── TimedOut            the request ran past its time limit (HTTP 504)
    └── WorkerError             the engine or a worker failed or is gone (HTTP 500)
        ├── StepRowError        one request's row of a step failed; the others go on
        ├── PoisonRequest       engines died with this request; it is not tried again
        └── DeviceLost          what computes is gone; the engine ends

Wording: what was found, with its value; what is allowed; what to do. This file knows nothing
of HTTP: the edge maps classes to status codes, and a test holds that its map covers this tree.
"""

from __future__ import annotations


class QuireError(Exception):
    """Root of all errors raised on purpose.

    text_in_flags: where the text names keyword arguments, the one that names flags; else empty.
    """

    text_in_flags = ""


class RequestError(QuireError):
    """The caller's fault. `param` names the offending field where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameter(RequestError):
    """A field's value is not allowed."""


class ContextTooLong(RequestError):
    """Prompt and requested output can never fit the context length or the cache.

    lengths: the tokens of the prompt, at least, and of the context, where both are known.
    """

    def __init__(
        self, message: str, *, param: str | None = None, lengths: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.lengths = lengths


class BodyTooLarge(RequestError):
    """More bytes were sent than are allowed."""


class UnknownModel(RequestError):
    """The model asked for is not served here."""


class NotAuthorized(RequestError):
    """No key was given, or a wrong one."""


class ModelError(QuireError):
    """The model's files are wrong or not supported."""


class ConfigError(ModelError):
    """config.json or generation_config.json cannot be honoured as written."""


class WeightsError(ModelError):
    """Weight files are corrupt, missing, unexpected or of a wrong shape."""


class TokenizerError(ModelError):
    """The tokenizer or the chat template is missing, broken or contradicts the model."""


class SettingError(QuireError):
    """A flag or a constructor argument has a value that is not allowed, or is not known."""


class CapacityError(QuireError):
    """The machine is too small for what was asked at start-up."""


class OverloadedError(QuireError):
    """Busy now; `retry_after_s` says when to try again where that is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(OverloadedError):
    """The server is draining and takes nothing new."""


class QueueTimedOut(OverloadedError):
    """The request waited for its first step as long as it may; nothing of it was computed."""


class DeadlineMissed(OverloadedError):
    """The request is predicted to miss its deadline; nothing of it was computed."""


class TenantLimit(OverloadedError):
    """The request's tenant has as many waiting as it may; others are served."""


class TimedOut(OverloadedError):
    """The request ran past its time limit."""


class WorkerError(QuireError):
    """The engine process or a worker failed or is gone."""


class DeviceLost(WorkerError):
    """What computes is gone for good, and with it every request's cache."""


class StepRowError(WorkerError):
    """One request's row of a step failed; the other rows are unaffected."""


class PoisonRequest(WorkerError):
    """Engines died twice with this request, so it is not tried again."""

"""Operation: what /openapi.json says of one route and method; the errors that routes share.

Knows no route. Always holds: an API has one schema of errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.api.http.errors import Aborted, NothingToChoose, UnsupportedEncoding
from quire.api.openapi.field_schemas import Known, Schema
from quire.base import http_apis
from quire.base.errors import (
    BodyTooLarge,
    ContextTooLong,
    DeadlineMissed,
    DeviceLost,
    InvalidParameter,
    ModelError,
    OverloadedError,
    PoisonRequest,
    QueueTimedOut,
    QuireError,
    RequestError,
    ShuttingDown,
    StepRowError,
    TenantLimit,
    TimedOut,
    UnknownModel,
    WorkerError,
)

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"

Errors = tuple[type[QuireError], ...]
# Schemas of errors, by the API of a path.
ERRORS: Mapping[str, str] = {
    http_apis.OPENAI: "Error",
    http_apis.MODELS: "Error",
    http_apis.RESPONSES: "Error",
    http_apis.ANTHROPIC: "AnthropicError",
    http_apis.OLLAMA: "OllamaError",
    http_apis.LLAMA_CPP: "LlamaCppError",
}

ENGINE: Errors = (OverloadedError, ShuttingDown, WorkerError, DeviceLost)
OBJECT: Errors = (RequestError, InvalidParameter, BodyTooLarge, UnsupportedEncoding)
BODY: Errors = (*OBJECT, UnknownModel, TimedOut, *ENGINE)
TEXTS: Errors = (*BODY, ModelError)
TOKENS: Errors = (
    *TEXTS,
    *(
        ContextTooLong,
        NothingToChoose,
        Aborted,
        QueueTimedOut,
        DeadlineMissed,
        TenantLimit,
        StepRowError,
        PoisonRequest,
    ),
)
HI = [{"role": "user", "content": "Write a story about a little dog."}]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldsForm:
    """The fields of a body that differ from those of the same name elsewhere. rows: their schemas;
    words: their descriptions."""

    rows: Callable[[Known], Mapping[str, Schema]] = lambda known: {}
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route and method.

    answer: the schema of status 200, by name; "" if it is a text of `media`. event: of a chunk, if
    the route can stream (as `stream_media`); without an answer it only streams. body: the fields of
    the request, None without a body; plain: the schema of a body outside the table of fields.
    needed: required fields. unhealthy: 503 has the same answer. others: further parameters. also:
    other media of a text, by the request. fields_form: of the body. body_media: of the request.
    """

    says: str
    tag: str
    answer: str = ""
    media: str = JSON
    event: str = ""
    title: str = ""
    body: frozenset[str] | None = None
    needed: frozenset[str] = frozenset()
    plain: Schema | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    errors: Errors = ()
    others: tuple[Schema, ...] = ()
    unhealthy: bool = False
    also: tuple[str, ...] = ()
    fields_form: FieldsForm = FieldsForm()
    stream_media: str = EVENTS
    body_media: str = JSON

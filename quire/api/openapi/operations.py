"""What each route is for: a line of words, its body's fields, its answers, and how it may fail.

Knows the routes by method and path, as app.py lists them, and the names of answer_schemas.py; no
HTTP. Always holds: each route that is served has a row here (a test holds both lists together).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.api.admin.cache import MAX_PREFIXES, NUM_PREFIXES
from quire.api.generation.fields import (
    APPLY_TEMPLATE,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    TOKENIZE,
)
from quire.api.http.errors import (
    Aborted,
    NotAdmin,
    NothingToChoose,
    ReaderGone,
    ResumeGone,
    UnknownRequest,
    UnsupportedEncoding,
)
from quire.api.openapi.field_schemas import TEXT, Schema, object_of
from quire.base.errors import (
    BodyTooLarge,
    ContextTooLong,
    DeadlineMissed,
    DeviceLost,
    InvalidParameter,
    ModelError,
    OverloadedError,
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
from quire.base.log import LEVELS
from quire.obs.metrics import CONTENT_TYPE

JSON = "application/json"
EVENTS = "text/event-stream"

Errors = tuple[type[QuireError], ...]

_ENGINE: Errors = (OverloadedError, ShuttingDown, WorkerError, DeviceLost)
_OBJECT: Errors = (RequestError, InvalidParameter, BodyTooLarge, UnsupportedEncoding)
_BODY: Errors = (*_OBJECT, UnknownModel, TimedOut, *_ENGINE)
_TEXTS: Errors = (*_BODY, ModelError)
_TOKENS: Errors = (
    *_TEXTS,
    *(
        ContextTooLong,
        NothingToChoose,
        Aborted,
        QueueTimedOut,
        DeadlineMissed,
        TenantLimit,
        StepRowError,
    ),
)
_HI = [{"role": "user", "content": "Tell me a story about a little dog."}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route and method.

    answer: the schema of status 200, by name; "" where it is a text of `media`. event: of a chunk,
    where it may stream, or does nothing else (then there is no answer). body: the fields of the
    request, None where it has none (or one that the table of fields does not know: plain);
    needed: those it must have. unhealthy: the answer of 503 is
    the same. others: further parameters.
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


_APPLY = Operation(
    says="The text a chat's model is given for these messages.",
    tag="Texts and tokens",
    answer="PromptText",
    title="ApplyTemplateRequest",
    body=APPLY_TEMPLATE,
    needed=frozenset({"messages"}),
    example={"messages": _HI},
    errors=_TEXTS,
)
_ABORT = Operation(
    says="End a request; aborted is false where it had ended before.",
    tag="Requests by id",
    answer="Aborted",
    errors=(UnknownRequest,),
)
_FLUSH = Operation(
    says="Empty the prefix cache; what runs goes on, and is not found either.",
    tag="For admins",
    answer="Flushed",
    errors=(InvalidParameter, NotAdmin, *_ENGINE),
)
_ADMIN = Operation(says="", tag="For admins", answer="Server", errors=(InvalidParameter, NotAdmin))

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        says="Answer a conversation, whole or streamed.",
        tag="Answers",
        answer="ChatCompletion",
        event="ChatCompletionChunk",
        title="ChatRequest",
        body=CHAT,
        needed=frozenset({"messages"}),
        example={"messages": _HI, "max_tokens": 48, "seed": 7},
        errors=_TOKENS,
    ),
    "POST /v1/completions": Operation(
        says="Continue prompts, whole or streamed.",
        tag="Answers",
        answer="Completion",
        event="CompletionChunk",
        title="CompletionRequest",
        body=COMPLETIONS,
        needed=frozenset({"prompt"}),
        example={"prompt": "Once upon a time", "max_tokens": 48, "seed": 7},
        errors=_TOKENS,
    ),
    "POST /generate": Operation(
        says="Token ids in, token ids out, whole or streamed.",
        tag="Answers",
        answer="Generation",
        event="GenerationChunk",
        title="GenerateRequest",
        body=GENERATE,
        needed=frozenset({"tokens"}),
        example={"tokens": [5, 6, 7], "max_tokens": 8, "seed": 7},
        errors=_TOKENS,
    ),
    "POST /tokenize": Operation(
        says="Ids of a prompt, or of messages.",
        tag="Texts and tokens",
        answer="Tokens",
        title="TokenizeRequest",
        body=TOKENIZE,
        example={"prompt": "Once upon a time", "return_token_strs": True},
        errors=_TEXTS,
    ),
    "POST /detokenize": Operation(
        says="The text of ids.",
        tag="Texts and tokens",
        answer="PromptText",
        title="DetokenizeRequest",
        body=DETOKENIZE,
        needed=frozenset({"tokens"}),
        example={"tokens": [5, 6, 7]},
        errors=_TEXTS,
    ),
    "POST /apply_template": _APPLY,
    "POST /apply-template": replace(_APPLY, says="The same under another server's name."),
    "GET /tokenizer_info": Operation(
        says="The named tokens of the tokenizer by their texts, and the chat template.",
        tag="Texts and tokens",
        answer="TokenizerInfo",
        errors=_ENGINE,
    ),
    "GET /v1/models": Operation(
        says="The models served here: one.", tag="Server", answer="ModelList", errors=_ENGINE
    ),
    "GET /v1/models/{name}": Operation(
        says="A model by name: its context length, precision and fingerprint.",
        tag="Server",
        answer="Model",
        errors=(UnknownModel, *_ENGINE),
    ),
    "GET /v1/requests/{id}": Operation(
        says="What a request does: its state, its tokens so far. By the id of its answer, or the "
        "x-request-id it was sent with.",
        tag="Requests by id",
        answer="RequestState",
        errors=(UnknownRequest,),
    ),
    "DELETE /v1/requests/{id}": _ABORT,
    "POST /v1/requests/{id}/abort": _ABORT,
    "GET /v1/requests/{id}/stream": Operation(
        says="A resumable stream (stream_options.resumable) behind Last-Event-ID, or all of it.",
        tag="Requests by id",
        event="AnyChunk",
        errors=(UnknownRequest, ResumeGone, ReaderGone, *_TOKENS),
        others=(
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "The id of the last event that was read.",
                "schema": TEXT,
            },
        ),
    ),
    "GET /health": Operation(
        says="200 while ready and making progress, else 503 with the reason.",
        tag="Server",
        answer="Health",
        unhealthy=True,
    ),
    "GET /metrics": Operation(
        says="Counters and times in Prometheus' text format.",
        tag="For admins",
        media=CONTENT_TYPE,
        errors=(NotAdmin,),
    ),
    "GET /v1/cache": Operation(
        says="What the prefix cache holds.",
        tag="For admins",
        answer="Cache",
        errors=(InvalidParameter, NotAdmin, *_ENGINE),
        others=(
            {
                "name": "prefixes",
                "in": "query",
                "description": "How many of the prefixes that spared most to tell.",
                "schema": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": MAX_PREFIXES,
                    "default": NUM_PREFIXES,
                },
            },
        ),
    ),
    "POST /v1/cache/flush": _FLUSH,
    "POST /reset_prefix_cache": replace(_FLUSH, says="The same under another server's name."),
    "POST /flush_cache": replace(_FLUSH, says="The same under another server's name."),
    "GET /admin": replace(_ADMIN, says="What is taken now, and what is open and held."),
    "POST /admin/pause": replace(_ADMIN, says="Requests for tokens wait; what runs goes on."),
    "POST /admin/drain": replace(_ADMIN, says="Nothing new is taken; what is open goes on."),
    "POST /admin/resume": replace(_ADMIN, says="As before a pause or a drain."),
    "PUT /admin/log-level": replace(
        _ADMIN,
        says="What is worth less than this is not logged.",
        title="LogLevelRequest",
        plain=object_of(
            {"level": {"enum": list(LEVELS), "description": "The least that is logged."}},
            needed=("level",),
        ),
        example={"level": "info"},
        errors=(*_OBJECT, NotAdmin),
    ),
    "GET /version": Operation(says="The server's version.", tag="Server", answer="Version"),
    "GET /openapi.json": Operation(
        says="This document.", tag="Server", answer="Document", errors=()
    ),
    "GET /docs": Operation(
        says="This document as a page.", tag="Server", media="text/html; charset=utf-8"
    ),
    "GET /": Operation(
        says="A few lines for browsers.", tag="Server", media="text/plain; charset=utf-8"
    ),
}

# What stands in a path, by name.
PATH_WORDS: Mapping[str, tuple[str, Schema]] = {
    "id": ("The answer's id, or the x-request-id it was asked with.", TEXT),
    "name": ("The model's name.", TEXT),
}

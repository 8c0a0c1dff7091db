"""One row for each route: a description, the fields of its body, its answers and its errors.

Knows the routes by method and path, as app.py lists them, and the names of answer_schemas.py; no
HTTP. Always holds: each served route has a row here (a test compares both lists).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.api.admin.cache import MAX_PREFIXES, NUM_PREFIXES
from quire.api.anthropic.fields import COUNT_TOKENS, MESSAGES
from quire.api.anthropic.models import MAX_LISTED as MAX_MODELS
from quire.api.anthropic.models import NUM_LISTED as NUM_MODELS
from quire.api.embeddings.fields import EMBEDDINGS, POOLING, RERANK, SCORE
from quire.api.generation.fields import (
    APPLY_TEMPLATE,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    TOKENIZE,
)
from quire.api.http.errors import (
    NotAdmin,
    ReaderGone,
    ResumeGone,
    UnknownConversation,
    UnknownRequest,
    UnknownResponse,
    UnknownRoute,
)
from quire.api.openai.responses.fields import INCLUDABLE, INPUT_TOKENS, RESPONSES
from quire.api.openai.responses.stored_routes import (
    MAX_LISTED,
    MAX_SEQUENCE_NUMBER,
    NUM_LISTED,
    ORDERS,
)
from quire.api.openapi.batch_operations import BATCH_OPERATIONS
from quire.api.openapi.conversation_operations import CONVERSATION_OPERATIONS, INCLUDED
from quire.api.openapi.embedding_schemas import embedding_rows, score_rows
from quire.api.openapi.field_schemas import (
    TEXT,
    Schema,
    chat_rows,
    completion_rows,
    generate_rows,
    object_of,
)
from quire.api.openapi.field_words import (
    OF_CHATS,
    OF_EMBEDDINGS,
    OF_INPUT_TOKENS,
    OF_MESSAGES,
    OF_RESPONSES,
    OF_TEXTS,
)
from quire.api.openapi.llama_cpp_operations import LLAMA_CPP_OPERATIONS
from quire.api.openapi.messages_schemas import messages_rows
from quire.api.openapi.ollama_operations import OLLAMA_OPERATIONS
from quire.api.openapi.operation import ENGINE, HI, OBJECT, TEXTS, TOKENS, FieldsForm, Operation
from quire.api.openapi.responses_schemas import responses_rows
from quire.base.errors import (
    ContextTooLong,
    InvalidParameter,
    OverloadedError,
    UnknownModel,
)
from quire.base.log import LEVELS
from quire.obs.metrics import CONTENT_TYPE

_VECTORS = FieldsForm(rows=embedding_rows, words=OF_EMBEDDINGS)
_MESSAGES = FieldsForm(rows=messages_rows, words=OF_MESSAGES)
_TEXTS = FieldsForm(words=OF_TEXTS)
_APPLY = Operation(
    says="The prompt that the chat template makes of these messages.",
    tag="Texts and tokens",
    answer="PromptText",
    title="ApplyTemplateRequest",
    body=APPLY_TEMPLATE,
    needed=frozenset({"messages"}),
    example={"messages": HI},
    errors=TEXTS,
    fields_form=_TEXTS,
)
_ABORT = Operation(
    says="End a request; aborted is false if it had ended before.",
    tag="Requests by id",
    answer="Aborted",
    errors=(UnknownRequest,),
)
_FLUSH = Operation(
    says="Empty the prefix cache; running requests continue, and their blocks are not reused.",
    tag="For admins",
    answer="Flushed",
    errors=(InvalidParameter, NotAdmin, *ENGINE),
)
_ADMIN = Operation(says="", tag="For admins", answer="Server", errors=(InvalidParameter, NotAdmin))


_RERANK = Operation(
    says="Documents in the order of their relevance to a query.",
    tag="Embeddings and scores",
    answer="Ranking",
    title="RerankRequest",
    body=RERANK,
    needed=frozenset({"query", "documents"}),
    example={"query": "a little dog", "documents": ["A dog barks.", "Rain falls."], "top_n": 1},
    errors=TOKENS,
    fields_form=_VECTORS,
)
_SCORE = Operation(
    says="How well texts fit each other, one score for each pair.",
    tag="Embeddings and scores",
    answer="Scores",
    title="ScoreRequest",
    body=SCORE,
    example={"text_1": "a little dog", "text_2": ["A dog barks.", "Rain falls."]},
    errors=TOKENS,
    fields_form=FieldsForm(rows=score_rows, words=OF_EMBEDDINGS),
)


def _query(name: str, says: str, schema: Schema) -> Schema:
    """Return a parameter of the query."""
    return {"name": name, "in": "query", "description": says, "schema": schema}


_PAGE = {"minimum": 1, "maximum": MAX_LISTED, "default": NUM_LISTED}
_MODELS = {"minimum": 1, "maximum": MAX_MODELS, "default": NUM_MODELS}
_HEALTH = Operation(
    says="200 while ready and making progress, else 503 with the reason.",
    tag="Server",
    answer="Health",
    unhealthy=True,
)
_BETA = _query("beta", "Without effect.", {"type": "string"})
_INCLUDE = _query("include", INCLUDED, {"enum": [*INCLUDABLE]})

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        says="Answer a conversation, whole or streamed.",
        tag="Answers",
        answer="ChatCompletion",
        event="ChatCompletionChunk",
        title="ChatRequest",
        body=CHAT,
        needed=frozenset({"messages"}),
        example={"messages": HI, "max_tokens": 48, "seed": 7},
        errors=TOKENS,
        fields_form=FieldsForm(rows=chat_rows, words=OF_CHATS),
    ),
    "POST /v1/completions": Operation(
        says="Continue prompts, whole or streamed.",
        tag="Answers",
        answer="Completion",
        event="CompletionChunk",
        title="CompletionRequest",
        body=COMPLETIONS,
        fields_form=FieldsForm(rows=completion_rows),
        needed=frozenset({"prompt"}),
        example={"prompt": "Once upon a time", "max_tokens": 48, "seed": 7},
        errors=TOKENS,
    ),
    "POST /v1/responses": Operation(
        says="Answer a conversation in the form of OpenAI's Responses API, whole or streamed.",
        tag="Answers",
        answer="Response",
        event="ResponseEvent",
        title="ResponsesRequest",
        body=RESPONSES,
        example={"input": "Write a story.", "max_output_tokens": 48, "seed": 7},
        errors=(*TOKENS, UnknownResponse, UnknownConversation),
        fields_form=FieldsForm(rows=responses_rows, words=OF_RESPONSES),
    ),
    "GET /v1/responses/{id}": Operation(
        says="A stored response, or the events of a background response.",
        tag="Stored responses",
        answer="Response",
        event="ResponseEvent",
        errors=(InvalidParameter, UnknownResponse, ResumeGone),
        others=(
            _query("stream", "Return the events.", {"enum": ["true", "false"]}),
            _query(
                "starting_after",
                "With stream: the sequence_number of the last event that the client has read.",
                {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE_NUMBER},
            ),
            _query("include_obfuscation", "Without effect.", {"enum": ["true", "false"]}),
            _INCLUDE,
        ),
    ),
    "POST /v1/responses/{id}/cancel": Operation(
        says="End a background response; one that has ended stays as it is.",
        tag="Stored responses",
        answer="Response",
        errors=(InvalidParameter, UnknownResponse),
    ),
    "DELETE /v1/responses/{id}": Operation(
        says="Remove a stored response.",
        tag="Stored responses",
        answer="ResponseDeleted",
        errors=(InvalidParameter, UnknownResponse),
    ),
    "GET /v1/responses/{id}/input_items": Operation(
        says="The items of a stored response's input, without those of responses before it.",
        tag="Stored responses",
        answer="InputItemList",
        errors=(InvalidParameter, UnknownResponse),
        others=(
            _query("limit", "Number of items.", {"type": "integer", **_PAGE}),
            _query("order", "Oldest or newest first.", {"enum": [*ORDERS], "default": "desc"}),
            _query("after", "The last_id of the page before.", TEXT),
            _INCLUDE,
        ),
    ),
    "POST /v1/messages": Operation(
        says="Answer a conversation in the form of Anthropic's API, whole or streamed.",
        tag="Answers",
        answer="AnthropicMessage",
        event="MessageEvent",
        title="MessagesRequest",
        body=MESSAGES,
        needed=frozenset({"messages", "max_tokens"}),
        example={"messages": HI, "max_tokens": 48, "seed": 7},
        errors=TOKENS,
        others=(_BETA,),
        fields_form=_MESSAGES,
    ),
    "POST /v1/messages/count_tokens": Operation(
        says="The number of tokens of a message's prompt.",
        tag="Texts and tokens",
        answer="TokenCount",
        title="CountTokensRequest",
        body=COUNT_TOKENS,
        needed=frozenset({"messages"}),
        example={"messages": HI},
        errors=TEXTS,
        others=(_BETA,),
        fields_form=_MESSAGES,
    ),
    "POST /v1/responses/input_tokens": Operation(
        says="The number of tokens of a response's prompt.",
        tag="Texts and tokens",
        answer="ResponseTokens",
        title="InputTokensRequest",
        body=INPUT_TOKENS,
        example={"input": "Write a story."},
        errors=(*TEXTS, ContextTooLong, UnknownResponse, UnknownConversation),
        fields_form=FieldsForm(rows=responses_rows, words=OF_INPUT_TOKENS),
    ),
    **BATCH_OPERATIONS,
    **CONVERSATION_OPERATIONS,
    **OLLAMA_OPERATIONS,
    **LLAMA_CPP_OPERATIONS,
    "POST /generate": Operation(
        says="Token ids in, token ids out, whole or streamed.",
        tag="Answers",
        answer="Generation",
        event="GenerationChunk",
        title="GenerateRequest",
        body=GENERATE,
        needed=frozenset({"tokens"}),
        example={"tokens": [5, 6, 7], "max_tokens": 8, "seed": 7},
        errors=TOKENS,
        fields_form=FieldsForm(rows=generate_rows),
    ),
    "POST /v1/embeddings": Operation(
        says="One vector for each text, of a model that makes embeddings.",
        tag="Embeddings and scores",
        answer="Embeddings",
        title="EmbeddingsRequest",
        body=EMBEDDINGS,
        needed=frozenset({"input"}),
        example={"input": ["A dog barks.", "Rain falls."]},
        errors=TOKENS,
        fields_form=_VECTORS,
    ),
    "POST /pooling": Operation(
        says="The same vectors in the form of vLLM.",
        tag="Embeddings and scores",
        answer="PooledVectors",
        title="PoolingRequest",
        body=POOLING,
        needed=frozenset({"input"}),
        example={"input": "A dog barks."},
        errors=TOKENS,
        fields_form=_VECTORS,
    ),
    "POST /v1/score": _SCORE,
    "POST /score": replace(_SCORE, says="The same under another server's name."),
    "POST /v1/rerank": _RERANK,
    "POST /v2/rerank": replace(_RERANK, says="The same under Cohere's newer name."),
    "POST /rerank": replace(_RERANK, says="The same under another server's name."),
    "POST /v1/reranking": replace(_RERANK, says="The same under llama.cpp's name."),
    "POST /reranking": replace(_RERANK, says="The same under llama.cpp's name."),
    "POST /tokenize": Operation(
        says="Ids of a prompt, or of messages; with content, in the form of llama.cpp's API.",
        tag="Texts and tokens",
        answer="Tokens",
        title="TokenizeRequest",
        body=TOKENIZE,
        example={"prompt": "Once upon a time", "return_token_strs": True},
        errors=TEXTS,
        fields_form=_TEXTS,
    ),
    "POST /detokenize": Operation(
        says="The text of ids.",
        tag="Texts and tokens",
        answer="DetokenizedText",
        title="DetokenizeRequest",
        body=DETOKENIZE,
        needed=frozenset({"tokens"}),
        example={"tokens": [5, 6, 7]},
        errors=TEXTS,
        fields_form=_TEXTS,
    ),
    "POST /apply_template": _APPLY,
    "POST /apply-template": replace(_APPLY, says="The same under another server's name."),
    "GET /tokenizer_info": Operation(
        says="The named tokens of the tokenizer by their texts, and the chat template.",
        tag="Texts and tokens",
        answer="TokenizerInfo",
        errors=ENGINE,
    ),
    "GET /v1/models": Operation(
        says="The served model, under each of its names; with the header anthropic-version in "
        "Anthropic's form.",
        tag="Server",
        answer="ModelList",
        errors=(InvalidParameter, UnknownModel, *ENGINE),
        others=(
            _query("limit", "Anthropic's form: number of names.", {"type": "integer", **_MODELS}),
            _query("after_id", "Anthropic's form: names after this one.", TEXT),
            _query("before_id", "Anthropic's form: names before this one.", TEXT),
        ),
    ),
    "GET /v1/models/{name}": Operation(
        says="A model by name: its context length, precision and fingerprint; with the header "
        "anthropic-version in Anthropic's form.",
        tag="Server",
        answer="Model",
        errors=(UnknownModel, *ENGINE),
    ),
    "GET /v1/requests/{id}": Operation(
        says="The state of a request and its tokens so far, by the id of its answer or its "
        "x-request-id.",
        tag="Requests by id",
        answer="RequestState",
        errors=(UnknownRequest,),
    ),
    "DELETE /v1/requests/{id}": _ABORT,
    "POST /v1/requests/{id}/abort": _ABORT,
    "GET /v1/requests/{id}/stream": Operation(
        says="A resumable stream (stream_options.resumable) after Last-Event-ID, or all of it.",
        tag="Requests by id",
        event="AnyChunk",
        errors=(UnknownRequest, ResumeGone, ReaderGone, *TOKENS),
        others=(
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "The id of the last event that the client has read.",
                "schema": TEXT,
            },
        ),
    ),
    "GET /v1/requests/{id}/timeline": Operation(
        says="Where the time of a request went: its queueing, prefill and each gap between tokens, "
        "with causes. For the key that sent it, and for admin keys.",
        tag="Requests by id",
        answer="RequestTimeline",
        errors=(InvalidParameter, UnknownRequest, *ENGINE),
    ),
    "GET /health": _HEALTH,
    "GET /v1/health": replace(_HEALTH, says="The same under llama.cpp's other name."),
    "GET /health/beats": Operation(
        says="For routers: a comment ten times a second from a thread of the server, as a sign of "
        "life, and an event whenever the state of /health changes, or another API process or the "
        "engine stops or goes on. Ends when the server drains.",
        tag="Server",
        event="HealthChange",
        errors=(OverloadedError,),
    ),
    "GET /metrics": Operation(
        says="Metrics in Prometheus' text format.",
        tag="For admins",
        media=CONTENT_TYPE,
        errors=(NotAdmin,),
    ),
    "GET /v1/cache": Operation(
        says="The contents of the prefix cache.",
        tag="For admins",
        answer="Cache",
        errors=(InvalidParameter, NotAdmin, *ENGINE),
        others=(
            {
                "name": "prefixes",
                "in": "query",
                "description": "Number of prefixes to list; the most useful come first.",
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
    "GET /v1/engine": Operation(
        says="The queue, the running batch and the KV blocks by owner, without ids and texts.",
        tag="For admins",
        answer="Engine",
        errors=(InvalidParameter, NotAdmin, *ENGINE),
    ),
    "GET /admin": replace(
        _ADMIN, says="Whether requests are accepted, and how many are open and held."
    ),
    "POST /admin/pause": replace(
        _ADMIN, says="Hold new generation requests; running ones continue."
    ),
    "POST /admin/drain": replace(_ADMIN, says="Refuse new requests; open ones continue."),
    "POST /admin/resume": replace(_ADMIN, says="Accept requests again after a pause or a drain."),
    "POST /admin/sleep": replace(
        _ADMIN, says="End the idle engine, which frees its memory; a request wakes it."
    ),
    "POST /admin/wake": replace(_ADMIN, says="Start an engine that sleeps."),
    "PUT /admin/log-level": replace(
        _ADMIN,
        says="Set the lowest level that is logged.",
        title="LogLevelRequest",
        plain=object_of(
            {"level": {"enum": list(LEVELS), "description": "The lowest level that is logged."}},
            needed=("level",),
        ),
        example={"level": "info"},
        errors=(*OBJECT, NotAdmin),
    ),
    "GET /admin/record": Operation(
        says="Record the requests of the server while this is read: lines of JSON.",
        tag="For admins",
        media="application/x-ndjson",
        errors=(InvalidParameter, NotAdmin, *ENGINE),
        others=(
            {
                "name": "content",
                "in": "query",
                "description": "Also record token ids; needs --record-content.",
                "schema": {"enum": ["true", "false"], "default": "false"},
            },
            {
                "name": "seconds",
                "in": "query",
                "description": "Record for this many seconds, then until open requests end.",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 604_800},
            },
        ),
    ),
    "GET /version": Operation(says="The server's version.", tag="Server", answer="Version"),
    "GET /openapi.json": Operation(
        says="This document.", tag="Server", answer="Document", errors=()
    ),
    "GET /docs": Operation(
        says="This document as a page.", tag="Server", media="text/html; charset=utf-8"
    ),
    "GET /": Operation(
        says="The web page for browsers (Accept: text/html), an overview of the routes for others.",
        tag="Server",
        media="text/plain; charset=utf-8",
        also=("text/html",),
    ),
    "GET /web/{file}": Operation(
        says="A file of the web page.",
        tag="Server",
        media="text/javascript",
        also=("text/css", "image/svg+xml"),
        errors=(UnknownRoute,),
    ),
}

# Parameters in paths, by name.
PATH_WORDS: Mapping[str, tuple[str, Schema]] = {
    "id": ("The answer's id; for requests also the x-request-id that they were sent with.", TEXT),
    "item_id": ("The item's id.", TEXT),
    "name": ("The model's name.", TEXT),
    "file": ("The name of a file.", TEXT),
}

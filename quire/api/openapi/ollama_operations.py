"""Rows of operations.py for the routes of Ollama's API.

Knows the routes by method and path, and the names of ollama_schemas.py; no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.api.ollama.fields import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_SHOW,
)
from quire.api.openapi.ollama_schemas import ollama_embed_rows, ollama_rows, ollama_show_rows
from quire.api.openapi.operation import BODY, ENGINE, HI, LINES, TOKENS, FieldsForm, Operation
from quire.base.errors import InvalidParameter

_GENERATED, _EMBED = FieldsForm(rows=ollama_rows), FieldsForm(rows=ollama_embed_rows)
OLLAMA_OPERATIONS: Mapping[str, Operation] = {
    "POST /api/chat": Operation(
        says="Answer a conversation in the form of Ollama's API, streamed or whole.",
        tag="Ollama",
        answer="OllamaChat",
        event="OllamaChatLine",
        title="OllamaChatRequest",
        body=OLLAMA_CHAT,
        example={"messages": HI, "options": {"num_predict": 48, "seed": 7}},
        errors=TOKENS,
        fields_form=_GENERATED,
        stream_media=LINES,
    ),
    "POST /api/generate": Operation(
        says="Continue a prompt in the form of Ollama's API, streamed or whole.",
        tag="Ollama",
        answer="OllamaCompletion",
        event="OllamaCompletionLine",
        title="OllamaGenerateRequest",
        body=OLLAMA_GENERATE,
        example={"prompt": "Write a story.", "options": {"num_predict": 48, "seed": 7}},
        errors=TOKENS,
        fields_form=_GENERATED,
        stream_media=LINES,
    ),
    "POST /api/embed": Operation(
        says="One vector for each text in the form of Ollama's API.",
        tag="Ollama",
        answer="OllamaEmbed",
        title="OllamaEmbedRequest",
        body=OLLAMA_EMBED,
        needed=frozenset({"input"}),
        example={"input": ["A dog barks.", "Rain falls."]},
        errors=TOKENS,
        fields_form=_EMBED,
    ),
    "POST /api/embeddings": Operation(
        says="The vector of one text in the older form of Ollama's API.",
        tag="Ollama",
        answer="OllamaEmbedding",
        title="OllamaEmbeddingsRequest",
        body=OLLAMA_EMBEDDINGS,
        needed=frozenset({"prompt"}),
        example={"prompt": "A dog barks."},
        errors=TOKENS,
        fields_form=_EMBED,
    ),
    "POST /api/show": Operation(
        says="The served model: its template, context length and capabilities.",
        tag="Ollama",
        answer="OllamaModel",
        title="OllamaShowRequest",
        body=OLLAMA_SHOW,
        errors=BODY,
        fields_form=FieldsForm(rows=ollama_show_rows),
    ),
    "GET /api/tags": Operation(
        says="The served model, under each of its names.",
        tag="Ollama",
        answer="OllamaModels",
        errors=(InvalidParameter, *ENGINE),
    ),
    "GET /api/ps": Operation(
        says="The served model, which is always loaded.",
        tag="Ollama",
        answer="OllamaRunning",
        errors=(InvalidParameter, *ENGINE),
    ),
    "GET /api/version": Operation(
        says="The release of Ollama that these routes follow.",
        tag="Ollama",
        answer="OllamaVersion",
        errors=(InvalidParameter,),
    ),
}

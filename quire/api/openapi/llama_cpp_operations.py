"""Rows of operations.py for the native routes of llama.cpp's server.

Knows the routes by method and path, and the names of llama_cpp_schemas.py; no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.api.http.errors import NotAdmin
from quire.api.llama_cpp.fields import LLAMA_COMPLETION, LLAMA_EMBEDDING, LLAMA_INFILL
from quire.api.openapi.field_schemas import OBJECT, list_of
from quire.api.openapi.field_words import OF_EMBEDDINGS
from quire.api.openapi.llama_cpp_schemas import (
    infill_rows,
    llama_cpp_embedding_rows,
    llama_cpp_rows,
)
from quire.api.openapi.operation import ENGINE, TOKENS, FieldsForm, Operation
from quire.base.errors import BodyTooLarge, InvalidParameter

_EMBEDDING = Operation(
    says="One vector for each input in the form of llama.cpp's API.",
    tag="llama.cpp",
    answer="LlamaCppEmbeddings",
    title="LlamaCppEmbeddingRequest",
    body=LLAMA_EMBEDDING,
    example={"content": "A dog barks."},
    errors=TOKENS,
    fields_form=FieldsForm(rows=llama_cpp_embedding_rows, words=OF_EMBEDDINGS),
)
LLAMA_CPP_OPERATIONS: Mapping[str, Operation] = {
    "POST /completion": Operation(
        says="Continue a prompt in the form of llama.cpp's API, whole or streamed.",
        tag="llama.cpp",
        answer="LlamaCppCompletion",
        event="LlamaCppEvent",
        title="LlamaCppCompletionRequest",
        body=LLAMA_COMPLETION,
        needed=frozenset({"prompt"}),
        example={"prompt": "Once upon a time", "n_predict": 48, "seed": 7},
        errors=TOKENS,
        fields_form=FieldsForm(rows=llama_cpp_rows),
    ),
    "POST /infill": Operation(
        says="Fill a gap between two texts in the form of llama.cpp's API, whole or streamed.",
        tag="llama.cpp",
        answer="LlamaCppCompletion",
        event="LlamaCppEvent",
        title="LlamaCppInfillRequest",
        body=LLAMA_INFILL,
        needed=frozenset({"input_prefix", "input_suffix"}),
        errors=TOKENS,
        fields_form=FieldsForm(rows=infill_rows),
    ),
    "POST /embedding": _EMBEDDING,
    "POST /embeddings": replace(_EMBEDDING, says="The same under its older name."),
    "GET /props": Operation(
        says="The server's properties: default parameters, context length, chat template.",
        tag="llama.cpp",
        answer="LlamaCppProps",
        errors=(InvalidParameter, *ENGINE),
    ),
    "GET /lora-adapters": Operation(
        says="The LoRA adapters: none.",
        tag="llama.cpp",
        answer="LlamaCppAdapters",
        errors=(InvalidParameter,),
    ),
    "POST /lora-adapters": Operation(
        says="Set the scales of adapters; since there are none, only of none.",
        tag="llama.cpp",
        answer="LlamaCppScalesSet",
        title="LlamaCppScales",
        plain=list_of(OBJECT, most=0),
        errors=(InvalidParameter, BodyTooLarge),
    ),
    "GET /slots": Operation(
        says="An entry for each request that may run at once, with the counts of those that run.",
        tag="For admins",
        answer="LlamaCppSlots",
        others=(
            {
                "name": "fail_on_no_slot",
                "in": "query",
                "description": "Any value: 503 if no entry is idle.",
                "schema": {"type": "string"},
            },
        ),
        errors=(InvalidParameter, NotAdmin, *ENGINE),
    ),
}

"""Rows of /v1/files, /v1/batches and /v1/messages/batches; see operations.py.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.api.anthropic.batch_routes import MAX_LISTED as MAX_MESSAGE_BATCHES
from quire.api.http.errors import UnknownBatch, UnknownFile
from quire.api.openai.batches.batch_routes import MAX_LISTED as MAX_BATCHES_LISTED
from quire.api.openai.batches.batch_routes import NUM_LISTED
from quire.api.openai.batches.file_routes import LISTED_PURPOSES, MAX_LISTED, ORDERS
from quire.api.openapi.batch_schemas import batch_body, file_form, message_batch_body
from quire.api.openapi.field_schemas import TEXT, Schema
from quire.api.openapi.operation import HI, OBJECT, Operation
from quire.base.errors import BodyTooLarge, InvalidParameter, ShuttingDown, TenantLimit, TimedOut

_TAG = "Files and batches"


def _query(name: str, says: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "description": says, "schema": schema}


def _page(most: int, default: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default}


_AFTER = _query("after", "The last_id of the page before.", TEXT)

BATCH_OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/files": Operation(
        says="Upload the lines of a batch.",
        tag=_TAG,
        answer="File",
        title="FileUpload",
        plain=file_form(),
        body_media="multipart/form-data",
        example={"purpose": "batch", "file": "lines.jsonl"},
        errors=(InvalidParameter, BodyTooLarge, TenantLimit, TimedOut, ShuttingDown),
    ),
    "GET /v1/files": Operation(
        says="The files of a key.",
        tag=_TAG,
        answer="FileList",
        errors=(InvalidParameter, UnknownFile),
        others=(
            _query("purpose", "Only files of this purpose.", {"enum": [*LISTED_PURPOSES]}),
            _query("limit", "Number of files.", _page(MAX_LISTED, MAX_LISTED)),
            _query("order", "Oldest or newest first.", {"enum": [*ORDERS], "default": "desc"}),
            _AFTER,
        ),
    ),
    "GET /v1/files/{id}": Operation(
        says="A file, without its content.", tag=_TAG, answer="File", errors=(UnknownFile,)
    ),
    "GET /v1/files/{id}/content": Operation(
        says="The content of a file.",
        tag=_TAG,
        media="application/octet-stream",
        errors=(UnknownFile,),
    ),
    "DELETE /v1/files/{id}": Operation(
        says="Remove a file that no unfinished batch reads.",
        tag=_TAG,
        answer="FileDeleted",
        errors=(InvalidParameter, UnknownFile),
    ),
    "POST /v1/batches": Operation(
        says="Answer the lines of a file within 24 hours, while the server has little else to do.",
        tag=_TAG,
        answer="Batch",
        title="BatchRequest",
        plain=batch_body(),
        example={
            "input_file_id": "file-0123456789abcdef0123456789abcdef",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
        errors=(*OBJECT, UnknownFile, TenantLimit, TimedOut, ShuttingDown),
    ),
    "GET /v1/batches": Operation(
        says="The batches of a key, the newest first.",
        tag=_TAG,
        answer="BatchList",
        errors=(InvalidParameter, UnknownBatch),
        others=(
            _query("limit", "Number of batches.", _page(MAX_BATCHES_LISTED, NUM_LISTED)),
            _AFTER,
        ),
    ),
    "GET /v1/batches/{id}": Operation(
        says="The state of a batch.", tag=_TAG, answer="Batch", errors=(UnknownBatch,)
    ),
    "POST /v1/batches/{id}/cancel": Operation(
        says="Cancel a batch; lines that have ended keep their results.",
        tag=_TAG,
        answer="Batch",
        errors=(InvalidParameter, UnknownBatch),
    ),
    "POST /v1/messages/batches": Operation(
        says="Answer messages within 24 hours, while the server has little else to do.",
        tag=_TAG,
        answer="MessageBatch",
        title="MessageBatchRequest",
        plain=message_batch_body(),
        example={
            "requests": [
                {"custom_id": "a-1", "params": {"model": "box", "max_tokens": 48, "messages": HI}}
            ]
        },
        errors=(*OBJECT, TenantLimit, TimedOut, ShuttingDown),
    ),
    "GET /v1/messages/batches": Operation(
        says="The message batches of a key, the newest first.",
        tag=_TAG,
        answer="MessageBatchList",
        errors=(InvalidParameter, UnknownBatch),
        others=(
            _query("limit", "Number of batches.", _page(MAX_MESSAGE_BATCHES, NUM_LISTED)),
            _query("after_id", "The last_id of the page before.", TEXT),
            _query("before_id", "The first_id of the page after.", TEXT),
            _query("beta", "Without effect.", TEXT),
        ),
    ),
    "GET /v1/messages/batches/{id}": Operation(
        says="The state of a message batch.",
        tag=_TAG,
        answer="MessageBatch",
        errors=(UnknownBatch,),
    ),
    "DELETE /v1/messages/batches/{id}": Operation(
        says="Remove a message batch that has ended.",
        tag=_TAG,
        answer="MessageBatchDeleted",
        errors=(InvalidParameter, UnknownBatch),
    ),
    "POST /v1/messages/batches/{id}/cancel": Operation(
        says="Cancel a message batch; messages that have ended keep their results.",
        tag=_TAG,
        answer="MessageBatch",
        errors=(UnknownBatch,),
    ),
    "GET /v1/messages/batches/{id}/results": Operation(
        says="The results of a message batch that has ended, one JSON object a line.",
        tag=_TAG,
        media="application/x-jsonl",
        errors=(InvalidParameter, UnknownBatch),
    ),
}

"""JSON Schemas of files and batches: their objects, lists, and the form of an upload.

Knows no route.
"""

from __future__ import annotations

from quire.api.anthropic.batch_routes import CUSTOM_ID, MAX_REQUESTS
from quire.api.batch_wiring import ENDPOINTS
from quire.api.batches.expiry import ANCHOR, MAX_S, MIN_S
from quire.api.batches.stored_batches import ENDED, TIMES
from quire.api.openai.batches.file_routes import PURPOSES
from quire.api.openapi.field_schemas import (
    FLAG,
    TEXT,
    Schema,
    list_of,
    metadata_row,
    object_of,
    or_null,
    whole_object,
)

_COUNT: Schema = {"type": "integer", "minimum": 0}
_KEPT_S: Schema = {"type": "integer", "minimum": MIN_S, "maximum": MAX_S}
_NULL: Schema = {"type": "null"}
_RESULTS = ("processing", "succeeded", "errored", "canceled", "expired")


def batch_answers() -> dict[str, Schema]:
    """Return the answers by name."""
    fault = whole_object(code=TEXT, message=TEXT, param=_NULL, line=or_null(_COUNT))
    faults = whole_object(object={"const": "list"}, data=list_of(fault))
    usage = whole_object(
        input_tokens=_COUNT,
        input_tokens_details=whole_object(cached_tokens=_COUNT),
        output_tokens=_COUNT,
        output_tokens_details=whole_object(reasoning_tokens=_COUNT),
        total_tokens=_COUNT,
    )
    return {
        "File": whole_object(
            id=TEXT,
            object={"const": "file"},
            bytes=_COUNT,
            created_at=_COUNT,
            expires_at=or_null(_COUNT),
            filename=TEXT,
            purpose={"enum": [*PURPOSES]},
            status={"const": "processed"},
            status_details=_NULL,
        ),
        "FileDeleted": whole_object(id=TEXT, object={"const": "file"}, deleted=FLAG),
        "FileList": _page("File"),
        "Batch": whole_object(
            id=TEXT,
            object={"const": "batch"},
            endpoint=TEXT,
            model=or_null(TEXT),
            usage=or_null(usage),
            errors=or_null(faults),
            input_file_id=TEXT,
            completion_window={"const": "24h"},
            status={"enum": ["validating", "in_progress", "finalizing", "cancelling", *ENDED]},
            output_file_id=or_null(TEXT),
            error_file_id=or_null(TEXT),
            created_at=_COUNT,
            expires_at=_COUNT,
            **{f"{name}_at": or_null(_COUNT) for name in TIMES},
            request_counts=whole_object(total=_COUNT, completed=_COUNT, failed=_COUNT),
            metadata=or_null({"type": "object", "additionalProperties": TEXT}),
        ),
        "BatchList": _page("Batch"),
        "MessageBatch": whole_object(
            id=TEXT,
            type={"const": "message_batch"},
            processing_status={"enum": ["in_progress", "canceling", "ended"]},
            request_counts=whole_object(**dict.fromkeys(_RESULTS, _COUNT)),
            created_at=TEXT,
            expires_at=TEXT,
            ended_at=or_null(TEXT),
            cancel_initiated_at=or_null(TEXT),
            archived_at=_NULL,
            results_url=or_null(TEXT),
        ),
        "MessageBatchDeleted": whole_object(id=TEXT, type={"const": "message_batch_deleted"}),
        "MessageBatchList": whole_object(
            data=list_of({"$ref": "#/components/schemas/MessageBatch"}),
            has_more=FLAG,
            first_id=or_null(TEXT),
            last_id=or_null(TEXT),
        ),
    }


def file_form() -> Schema:
    """Return the schema of an upload."""
    return object_of(
        {
            "purpose": {"const": "batch", "description": "What the file is for."},
            "file": {"type": "string", "format": "binary", "description": "Lines of JSON."},
            "expires_after[anchor]": {
                "const": ANCHOR,
                "description": "From when expires_after[seconds] count; both are given, or none.",
            },
            "expires_after[seconds]": {
                **_KEPT_S,
                "description": "How long the file is kept; without it, until it is deleted.",
            },
        },
        needed=("purpose", "file"),
    )


def batch_body() -> Schema:
    """Return the schema of the body of POST /v1/batches."""
    metadata: Schema = {
        **metadata_row(),
        "description": "Texts that the batch is returned with.",
    }
    return object_of(
        {
            "input_file_id": {
                "type": "string",
                "minLength": 1,
                "description": "An uploaded file.",
            },
            "endpoint": {"enum": [*ENDPOINTS], "description": "The route of every line."},
            "completion_window": {"const": "24h", "description": "The time of the whole batch."},
            "metadata": or_null(metadata),
            "output_expires_after": {
                **or_null(whole_object(anchor={"const": ANCHOR}, seconds=_KEPT_S)),
                "description": "How long the output files are kept; without it, until they are "
                "deleted.",
            },
        },
        needed=("input_file_id", "endpoint", "completion_window"),
    )


def message_batch_body() -> Schema:
    """Return the schema of the body of POST /v1/messages/batches."""
    entry = object_of(
        {
            "custom_id": {"type": "string", "pattern": f"^{CUSTOM_ID.pattern}$"},
            "params": {"type": "object", "description": "A request of POST /v1/messages."},
        },
        needed=("custom_id", "params"),
    )
    requests = list_of(entry, least=1, most=MAX_REQUESTS)
    described = {**requests, "description": "Messages with ids that differ."}
    return object_of({"requests": described}, needed=("requests",))


def _page(name: str) -> Schema:
    entry: Schema = {"$ref": f"#/components/schemas/{name}"}
    return whole_object(
        object={"const": "list"},
        data=list_of(entry),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    )

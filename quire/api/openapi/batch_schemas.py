"""JSON Schemas of files and batches: their objects, lists, and the form of an upload.

Knows no route.
"""

from __future__ import annotations

from quire.api.openai.batches.batch_routes import MAX_KEY_CHARS, MAX_PAIRS, MAX_VALUE_CHARS
from quire.api.openai.batches.file_routes import PURPOSES
from quire.api.openai.batches.routes import ENDPOINTS
from quire.api.openai.batches.stored_batches import ENDED, TIMES
from quire.api.openapi.field_schemas import (
    FLAG,
    TEXT,
    Schema,
    list_of,
    object_of,
    or_null,
    whole_object,
)

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NULL: Schema = {"type": "null"}


def batch_answers() -> dict[str, Schema]:
    """Return the answers by name."""
    fault = whole_object(code=TEXT, message=TEXT, param=_NULL, line=or_null(_COUNT))
    faults = whole_object(object={"const": "list"}, data=list_of(fault))
    return {
        "File": whole_object(
            id=TEXT,
            object={"const": "file"},
            bytes=_COUNT,
            created_at=_COUNT,
            expires_at=_NULL,
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
    }


def file_form() -> Schema:
    """Return the schema of an upload."""
    return object_of(
        {
            "purpose": {"const": "batch", "description": "What the file is for."},
            "file": {"type": "string", "format": "binary", "description": "Lines of JSON."},
        },
        needed=("purpose", "file"),
    )


def batch_body() -> Schema:
    """Return the schema of the body of POST /v1/batches."""
    metadata: Schema = {
        "type": "object",
        "maxProperties": MAX_PAIRS,
        "propertyNames": {"maxLength": MAX_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
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
        },
        needed=("input_file_id", "endpoint", "completion_window"),
    )


def _page(name: str) -> Schema:
    entry: Schema = {"$ref": f"#/components/schemas/{name}"}
    return whole_object(
        object={"const": "list"},
        data=list_of(entry),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    )

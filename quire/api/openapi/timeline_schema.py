"""JSON Schema of the answer of GET /v1/requests/{id}/timeline.

quire/obs/timeline.py makes the answer. The schema is closed: the tests validate each answer against
it, so a test fails if a field is missing here.
"""

from __future__ import annotations

from quire.api.openapi.field_schemas import FLAG, TEXT, Schema, list_of, object_of, or_null
from quire.base.cache_usage import MissReason
from quire.base.timeline import EventKind, WaitReason
from quire.obs.timeline import PARTIAL_BLOCK, Cause

_COUNT: Schema = {"type": "integer", "minimum": 0}
_MS: Schema = {"type": "number", "description": "Milliseconds."}
_AT: Schema = {"type": "number", "description": "Milliseconds after the request's arrival."}
_REASON: Schema = {"enum": [reason.value for reason in WaitReason]}
_MISS: Schema = {"enum": [*(reason.value for reason in MissReason), PARTIAL_BLOCK]}


def timeline_schema() -> Schema:
    """Return the schema of the whole answer."""
    return _whole(
        id=TEXT,
        object={"const": "request.timeline"},
        state={"enum": ["done", "open"]},
        kept_steps=_COUNT,
        streams=list_of(_stream()),
    )


def _stream() -> Schema:
    causes = list_of(_whole(cause={"enum": [cause.value for cause in Cause]}, ms=_MS))
    others = {"other_rows": or_null(_COUNT), "other_prefill_tokens": or_null(_COUNT)}
    span = {"at_ms": _AT, "ms": _MS, "step": _COUNT, **others, "causes": causes}
    miss = object_of(
        {"token": _COUNT, "reason": _MISS, "description": TEXT, "judged": TEXT},
        needed=("token", "reason", "description"),
    )
    return _whole(
        prompt=_COUNT,
        stream=_COUNT,
        finish_reason=or_null(TEXT),
        prompt_tokens=_COUNT,
        cached_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_ms=_MS,
        queue=_queue(),
        cache=_whole(
            cached_tokens=_COUNT, host_tokens=_COUNT, disk_tokens=_COUNT, first_miss=or_null(miss)
        ),
        prefill=_whole(ms=_MS, chunks=list_of(_whole(**span, tokens=_COUNT))),
        first_token_ms=or_null(_AT),
        gaps=list_of(_whole(**span, token=_COUNT, tokens=_COUNT)),
        causes=causes,
        events=list_of(_event()),
        dropped_events=_COUNT,
        steps_missing=FLAG,
    )


def _queue() -> Schema:
    return _whole(
        ms=_MS,
        reasons=list_of(_whole(reason=_REASON, ms=_MS, description=TEXT)),
        spans=list_of(_whole(at_ms=_AT, ms=_MS, reason=_REASON)),
        overtaken_by=_COUNT,
    )


def _event() -> Schema:
    return object_of(
        {
            "at_ms": _AT,
            "event": {"enum": [kind.value for kind in EventKind]},
            "step": _COUNT,
            "from_token": _COUNT,
            "known_tokens": _COUNT,
            "for": TEXT,
            "blocks": {"type": ["integer", "string"]},
        },
        needed=("at_ms", "event"),
    )


def _whole(**properties: Schema) -> Schema:
    return object_of(properties, needed=tuple(properties))

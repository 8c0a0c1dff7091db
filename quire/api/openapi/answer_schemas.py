"""JSON Schemas of answers: bodies, chunks of streams, and errors.

Schemas of records that are returned unchanged (health, timings, cache) are read from their types.
Those of objects that this package writes are here, closed: the tests validate each answer against
them, so a test fails if a field is missing here. Knows no route.
"""

from __future__ import annotations

import msgspec

from quire.api.generation.usage import Speeds, Timings
from quire.api.http.errors import HEAD_TOO_LARGE, SHAPES
from quire.api.openai.dialect import error_type
from quire.api.openapi.batch_schemas import batch_answers
from quire.api.openapi.embedding_schemas import embedding_answers
from quire.api.openapi.field_schemas import (
    FLAG,
    TEXT,
    Schema,
    counts_of_output,
    list_of,
    metadata_row,
    object_of,
    or_null,
    whole_object,
)
from quire.api.openapi.llama_cpp_schemas import llama_cpp_answers
from quire.api.openapi.messages_schemas import messages_answers
from quire.api.openapi.ollama_schemas import ollama_answers
from quire.api.openapi.responses_schemas import responses_answers
from quire.api.openapi.timeline_schema import timeline_schema
from quire.base.cache_usage import Miss, MissReason, OwnerUsage, PrefixUsage
from quire.base.engine_snapshot import BlockOwner, RequestSnapshot, StepPrices, TierSnapshot
from quire.base.log import LEVELS
from quire.base.records import FinishReason
from quire.engine.model_card import Health

COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
_ID: Schema = {"type": "integer"}
# A piece is a text, or the bytes of a token that is only part of a character.
_ID_OR_PIECE: Schema = {
    "anyOf": [COUNT, whole_object(id=COUNT, piece={"anyOf": [TEXT, list_of(COUNT)]})]
}
# abort and error are returned as errors.
_REASONS = [str(reason) for reason in (FinishReason.STOP, FinishReason.LENGTH)]


def answer_schemas() -> dict[str, Schema]:
    """Return all schemas by name."""
    chunks = _chunks()
    any_chunk = {"anyOf": [_ref(name) for name in chunks]}
    others = {
        **_message_parts(),
        **_route_answers(),
        **_records(),
        "AnyChunk": any_chunk,
        **messages_answers(),
        **responses_answers(),
        **ollama_answers(),
        **llama_cpp_answers(),
        **embedding_answers(),
        **batch_answers(),
        "Error": _error(),
    }
    return {**_answers(), **chunks, **others}


def _part(needed: dict[str, Schema], **optional: Schema) -> Schema:
    """Return an object with all of `needed`, any of the optional properties, and no others."""
    return object_of({**needed, **optional}, needed=tuple(needed))


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _frame(kind: str) -> dict[str, Schema]:
    return {
        "id": TEXT,
        "object": {"const": kind},
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": TEXT,
    }


def _ended() -> dict[str, Schema]:
    """Return the fields of a finished choice: stop reason and seed."""
    return {"stop_reason": {"type": ["string", "integer", "null"]}, "seed": {"type": "integer"}}


def _reason(*more: str) -> Schema:
    return {"enum": [*_REASONS, *more]}


def _answers() -> dict[str, Schema]:
    choices = {
        "ChatCompletion": _part(
            {
                "index": COUNT,
                "message": _ref("Message"),
                "logprobs": or_null(_ref("ChatLogprobs")),
                "finish_reason": _reason("tool_calls"),
                **_ended(),
            },
            token_ids=list_of(_ID),
        ),
        "Completion": _part(
            {
                "index": COUNT,
                "text": TEXT,
                "logprobs": or_null(_ref("CompletionLogprobs")),
                "finish_reason": _reason(),
                **_ended(),
            },
            prompt_logprobs=or_null(_ref("PromptLogprobs")),
            prompt_token_ids=list_of(_ID),
            token_ids=list_of(_ID),
        ),
        "Generation": _part(
            {"index": COUNT, "tokens": list_of(_ID), "finish_reason": _reason(), **_ended()},
            **_of_ids(),
        ),
    }
    kinds = {
        "ChatCompletion": "chat.completion",
        "Completion": "text_completion",
        "Generation": "generation",
    }
    scored: dict[str, Schema] = {"prompt_logprobs": _ref("PromptLogprobs")}
    beside: dict[str, dict[str, Schema]] = {
        "ChatCompletion": {
            "prompt_logprobs": or_null(_ref("PromptLogprobs")),
            "prompt_token_ids": list_of(_ID),
            "kv_transfer_params": {"type": ["object", "null"]},
            **_labels(),
        },
        "Completion": {"kv_transfer_params": {"type": ["object", "null"]}},
        "Generation": scored,
    }
    return {
        name: _part(
            {**_frame(kind), "choices": list_of(choices[name], least=1), "usage": _ref("Usage")},
            timings=_ref("Speeds"),
            **beside[name],
        )
        for name, kind in kinds.items()
    }


def _chunks() -> dict[str, Schema]:
    last = _ended()
    chat = _part(
        {
            "index": COUNT,
            "delta": _ref("Delta"),
            "logprobs": or_null(_ref("ChatLogprobs")),
            "finish_reason": or_null(_reason("tool_calls")),
        },
        token_ids=list_of(_ID),
        **last,
    )
    completion = _part(
        {
            "index": COUNT,
            "text": TEXT,
            "logprobs": or_null(_ref("CompletionLogprobs")),
            "finish_reason": or_null(_reason()),
        },
        prompt_logprobs=_ref("PromptLogprobs"),
        prompt_token_ids=list_of(_ID),
        token_ids=list_of(_ID),
        **last,
    )
    ids = _part(
        {"index": COUNT, "tokens": list_of(_ID), "finish_reason": or_null(_reason())},
        **_of_ids(),
        **last,
    )
    usage = or_null(_ref("Usage"))
    scored = _ref("PromptLogprobs")
    progress = whole_object(index=COUNT, total=COUNT, cache=COUNT, processed=COUNT, time_ms=NUMBER)
    return {
        "ChatCompletionChunk": _part(
            {**_frame("chat.completion.chunk"), "choices": list_of(chat)},
            usage=usage,
            timings=_ref("Speeds"),
            prompt_progress=progress,
            prompt_logprobs=scored,
            prompt_token_ids=list_of(_ID),
            service_tier=_labels()["service_tier"],
        ),
        "CompletionChunk": _part(
            {**_frame("text_completion"), "choices": list_of(completion)},
            usage=usage,
            timings=_ref("Speeds"),
            prompt_progress=progress,
        ),
        "GenerationChunk": _part(
            {**_frame("generation"), "choices": list_of(ids)},
            usage=usage,
            timings=_ref("Speeds"),
            prompt_progress=progress,
            prompt_logprobs=scored,
        ),
    }


def _labels() -> dict[str, Schema]:
    """Return what a chat's answer repeats of its request."""
    return {"service_tier": {"const": "default"}, "metadata": metadata_row()}


def _of_ids() -> dict[str, Schema]:
    by_id: Schema = {"type": "object", "additionalProperties": NUMBER}
    return {"logprobs": list_of(NUMBER), "top_logprobs": list_of(by_id)}


def _message_parts() -> dict[str, Schema]:
    """Return messages, deltas, log-probabilities and usage."""
    token = {
        "token": TEXT,
        "logprob": NUMBER,
        "bytes": list_of({**_ID, "minimum": 0, "maximum": 255}),
    }
    by_text: Schema = {"type": "object", "additionalProperties": or_null(NUMBER)}
    ranked = whole_object(logprob=or_null(NUMBER), rank=or_null(COUNT), decoded_token=TEXT)
    function = whole_object(name=TEXT, arguments=TEXT)
    call = {"id": TEXT, "type": {"const": "function"}, "function": function}
    said = {"reasoning_content": TEXT, "reasoning": TEXT}
    delta_call = _part(
        {"index": COUNT, "function": _part({"arguments": TEXT}, name=TEXT)},
        id=TEXT,
        type={"const": "function"},
    )
    return {
        "Message": _part(
            {
                "role": {"const": "assistant"},
                "content": or_null(TEXT),
                "refusal": {"type": "null"},
            },
            **{name: or_null(schema) for name, schema in said.items()},
            tool_calls=list_of(whole_object(**call), least=1),
        ),
        "Delta": object_of(
            {
                "role": {"const": "assistant"},
                "content": TEXT,
                "refusal": {"type": "null"},
                **said,
                "tool_calls": list_of(delta_call, least=1),
            }
        ),
        "ChatLogprobs": whole_object(
            content=list_of(whole_object(**token, top_logprobs=list_of(whole_object(**token)))),
            refusal={"type": "null"},
        ),
        "CompletionLogprobs": _part(
            {
                "tokens": list_of(TEXT),
                "token_logprobs": list_of(or_null(NUMBER)),
                "top_logprobs": list_of(or_null(by_text)),
                "text_offset": list_of(COUNT),
            },
            listed_logprobs=list_of(or_null(list_of(or_null(NUMBER)))),
        ),
        "PromptLogprobs": list_of(or_null({"type": "object", "additionalProperties": ranked})),
        "Usage": _usage(),
    }


def _route_answers() -> dict[str, Schema]:
    """Return the answers of the routes that generate no tokens."""
    model = {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": COUNT,
        "vocab_size": COUNT,
        "dtype": TEXT,
        "quantization": TEXT,
        "kv_cache_dtype": TEXT,
        "system_fingerprint": TEXT,
        "shutdown_date": {"type": "null"},
    }
    return {
        "HealthChange": _part(
            {"ok": FLAG, "state": TEXT, "reason": TEXT},
            stopped_processes=list_of(COUNT),
            silent_ms=COUNT,
        ),
        "Model": {"anyOf": [_ref("OpenAIModel"), _ref("AnthropicModel")]},
        "ModelList": {
            "anyOf": [
                whole_object(object={"const": "list"}, data=list_of(_ref("OpenAIModel"))),
                _ref("AnthropicModelList"),
            ]
        },
        "OpenAIModel": whole_object(**model),
        "Tokens": _part(
            {"count": COUNT, "max_model_len": COUNT, "tokens": list_of(_ID_OR_PIECE)},
            token_strs=list_of(TEXT),
        ),
        "PromptText": whole_object(prompt=TEXT),
        "DetokenizedText": whole_object(prompt=TEXT, content=TEXT),
        "TokenizerInfo": _part(
            {
                "bos_token": or_null(TEXT),
                "eos_token": or_null(TEXT),
                "model_max_length": COUNT,
                "chat_template": or_null(TEXT),
            },
            **{f"{role}_token": TEXT for role in ("unk", "sep", "pad", "cls", "mask")},
        ),
        "RequestState": _request(),
        "RequestTimeline": timeline_schema(),
        "Aborted": whole_object(id=TEXT, object={"const": "request"}, aborted=FLAG),
        "Server": whole_object(
            object={"const": "server"},
            paused=FLAG,
            draining=FLAG,
            open_requests=COUNT,
            held_requests=COUNT,
            asleep=FLAG,
            log_level={"enum": list(LEVELS)},
        ),
        "Flushed": whole_object(flushed_blocks=COUNT),
        "Version": whole_object(name={"const": "quire"}, version=TEXT),
        "Cache": _cache(),
        "Engine": _engine(),
        "Document": {"type": "object"},
    }


def _usage() -> Schema:
    misses = list_of(or_null(_ref("Miss")))
    cached = _part(
        {"cached_tokens": COUNT},
        cache_write_tokens=COUNT,
        cached_tokens_details=whole_object(pool=COUNT, host=COUNT, disk=COUNT, misses=misses),
    )
    return _part(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": cached,
        },
        completion_tokens_details=counts_of_output("reasoning_tokens"),
        timings=_ref("Timings"),
    )


def _request() -> Schema:
    used = whole_object(prompt_tokens=COUNT, completion_tokens=COUNT, cached_tokens=COUNT)
    return whole_object(
        id=TEXT,
        object={"const": "request"},
        name=or_null(TEXT),
        route=TEXT,
        stream=FLAG,
        created=COUNT,
        state={"enum": ["waiting", "running", "done", "failed"]},
        error=or_null(TEXT),
        finish_reasons=list_of(TEXT),
        usage=used,
    )


def _cache() -> Schema:
    share = or_null(NUMBER)
    blocks = (
        *("total", "used", "free_used_once", "free_used_again", "free_used_again_most"),
        *("free_pinned", "free_plain", "findable"),
    )
    return whole_object(
        object={"const": "cache"},
        prefix_caching=FLAG,
        block_size=COUNT,
        blocks=whole_object(**dict.fromkeys(blocks, COUNT)),
        evicted_blocks_total=COUNT,
        evicted_digests=whole_object(known=COUNT, most=COUNT),
        tokens=whole_object(
            queried_total=COUNT,
            found_total=whole_object(pool=COUNT, host=COUNT, disk=COUNT),
            hit_rate=whole_object(all=share, pool=share, host=share, disk=share),
        ),
        prefixes=list_of(_ref("PrefixUsage")),
        owners=list_of(_ref("OwnerUsage")),
    )


def _engine() -> Schema:
    counts = ("steps_total", "steps_in_flight", "slots_total")
    totals = ("running_total", "waiting_total", "held_total")
    blocks = whole_object(
        size=COUNT,
        bytes_each=COUNT,
        total=COUNT,
        per_cell=COUNT,
        owners=list_of(_ref("BlockOwner")),
        run_lengths=list_of(COUNT),
        run_owners=list_of(COUNT),
    )
    return whole_object(
        object={"const": "engine"},
        **dict.fromkeys((*counts, *totals), COUNT),
        running=list_of(_ref("RequestSnapshot")),
        waiting=list_of(_ref("RequestSnapshot")),
        blocks=blocks,
        tiers=list_of(_ref("TierSnapshot")),
        limits={"type": "object", "additionalProperties": {"type": "number"}},
        step_prices=_ref("StepPrices"),
    )


def _records() -> dict[str, Schema]:
    """Return the schemas of records that are returned unchanged."""
    usage = (Miss, PrefixUsage, OwnerUsage, BlockOwner, RequestSnapshot, StepPrices, TierSnapshot)
    records = (Health, Speeds, Timings, *usage)
    _, found = msgspec.json.schema_components(
        [*records, MissReason], ref_template="#/components/schemas/{name}"
    )
    closed = {record.__name__: {"additionalProperties": False} for record in records}
    error = whole_object(code={"const": 503}, message=TEXT, type={"const": "unavailable_error"})
    found["Health"]["properties"] |= {"status": TEXT, "error": error}
    found["Speeds"]["properties"] |= {"draft_n": COUNT, "draft_n_accepted": COUNT}  # with drafts
    return {
        name: {**_without_docs(schema), **closed.get(name, {})} for name, schema in found.items()
    }


def _without_docs(schema: Schema) -> Schema:
    """Remove docstrings, which are for readers of the code."""
    return {name: value for name, value in schema.items() if name not in ("description", "title")}


def _error() -> Schema:
    shapes = [*SHAPES.values(), HEAD_TOO_LARGE]
    types = sorted({error_type(shape.status) for shape in shapes})
    codes = sorted({shape.code for shape in shapes if shape.code is not None})
    return whole_object(
        error=whole_object(
            message=TEXT,
            type={"enum": types},
            param=or_null(TEXT),
            code={"enum": [None, *codes]},
        )
    )

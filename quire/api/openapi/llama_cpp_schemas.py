"""JSON Schemas of llama.cpp's native routes: fields of requests, answers, events, errors.

Fields that these routes share with others are in field_schemas.py. Knows no route.
"""

from __future__ import annotations

from quire.api.http.errors import HEAD_TOO_LARGE, SHAPES
from quire.api.llama_cpp.completion import MAX_ANSWERS
from quire.api.llama_cpp.dialect import TOO_LONG, error_type
from quire.api.llama_cpp.embedding import NORMS
from quire.api.llama_cpp.infill import MAX_FILES
from quire.api.llama_cpp.request import MAX_RESPONSE_FIELDS, Returned
from quire.api.llama_cpp.settings import settings_json
from quire.api.openapi.embedding_schemas import embedding_rows
from quire.api.openapi.field_schemas import (
    FLAG,
    OBJECT,
    TEXT,
    Known,
    Schema,
    list_of,
    object_of,
    or_null,
    token_id_row,
    whole_object,
)
from quire.base import sampling_checks as sampling
from quire.base.sampling_params import SamplingParams

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_PLACE: Schema = {"type": "integer", "minimum": -1}


def llama_cpp_rows(known: Known) -> dict[str, Schema]:
    """Return the fields that have another form than in other APIs, or exist here only."""
    part = {"anyOf": [token_id_row(known), TEXT]}
    one = list_of(part, least=1)
    limit = {"type": "integer", "minimum": 0, "maximum": known.max_output_tokens or 2**31 - 1}
    return {
        "prompt": {
            "anyOf": [TEXT, one, list_of({"anyOf": [TEXT, one]}, least=1, most=MAX_ANSWERS)],
            "description": "A text, token ids, a list of both that makes one prompt, or a list of "
            "such prompts, none of which is an id.",
        },
        "n_predict": {"anyOf": [limit, {"enum": [-1, -2]}]},
        "max_tokens": {**limit, "description": "Another name of n_predict."},
        "n_probs": {**_COUNT, "maximum": sampling.MAX_TOP_LOGPROBS},
        "logprobs": {
            **{**_COUNT, "maximum": sampling.MAX_TOP_LOGPROBS},
            "description": "Another name of n_probs.",
        },
        "id_slot": {**_PLACE, "maximum": 2**31 - 1},
        "return_tokens": FLAG,
        "input_prefix": TEXT,
        "input_suffix": TEXT,
        "input_extra": list_of(
            object_of({"filename": TEXT, "text": TEXT}, needed=("text",), closed=False),
            most=MAX_FILES,
        ),
        "t_max_predict_ms": {**_PLACE, "maximum": 2**31 - 1},
        "n_indent": {**_COUNT, "maximum": 2**31 - 1},
        "response_fields": list_of(TEXT, most=MAX_RESPONSE_FIELDS),
    }


def infill_rows(known: Known) -> dict[str, Schema]:
    """Return those of /infill."""
    text = {**TEXT, "description": "What the gap begins with; the answer continues it."}
    return {**llama_cpp_rows(known), "prompt": text}


def llama_cpp_embedding_rows(known: Known) -> dict[str, Schema]:
    """Return those of /embedding."""
    own = embedding_rows(known)
    return {
        "input": own["input"],
        "content": {**own["input"], "description": "Another name of input."},
        "dimensions": own["dimensions"],
        "prompt_name": own["prompt_name"],
        "encoding_format": {"const": "float"},
        "embd_normalize": {
            "enum": sorted(NORMS),
            "description": "2: bring vectors to length 1 (default); -1: leave them as they are.",
        },
    }


def llama_cpp_answers() -> dict[str, Schema]:
    """Return answers, events and errors by name."""
    speeds = {"timings": _ref("Speeds")}
    begun: dict[str, Schema] = {
        "index": _COUNT,
        "content": TEXT,
        "tokens": list_of(_COUNT),
        "id_slot": _PLACE,
        "tokens_predicted": _COUNT,
        "tokens_evaluated": _COUNT,
    }
    progress = whole_object(
        index=_COUNT, total=_COUNT, cache=_COUNT, processed=_COUNT, time_ms=_NUMBER
    )
    probabilities: dict[str, Schema] = {"completion_probabilities": list_of(_probability())}
    ended: dict[str, Schema] = {
        **begun,
        "stop": {"const": True},
        "model": TEXT,
        "generation_settings": _settings(),
        "prompt": TEXT,
        "has_new_line": FLAG,
        "truncated": FLAG,
        "stop_type": {"enum": ["eos", "limit", "word"]},
        "stopping_word": TEXT,
        "tokens_cached": _COUNT,
        **speeds,
    }
    event = object_of(
        {**begun, "stop": {"const": False}, **probabilities, "prompt_progress": progress, **speeds},
        needed=(*begun, "stop"),
    )
    last = object_of(ended, needed=tuple(ended))
    whole = object_of({**ended, **probabilities}, needed=tuple(ended))
    names = "|".join((*ended, *probabilities))
    parts: Schema = {
        "type": "object",
        "description": "The parts that response_fields names.",
        "propertyNames": {"pattern": f"^({names})(/|$)"},
        "not": {"required": ["content", "generation_settings", "timings"]},
    }
    return {
        "LlamaCppCompletion": {
            "anyOf": [whole, parts, list_of({"anyOf": [whole, parts]}, least=2, most=MAX_ANSWERS)]
        },
        "LlamaCppEvent": {"anyOf": [event, last, parts]},
        "LlamaCppEmbeddings": list_of(
            whole_object(index=_COUNT, embedding=list_of(list_of(_NUMBER), least=1, most=1))
        ),
        "LlamaCppProps": _props(),
        "LlamaCppSlots": list_of(_slot()),
        "LlamaCppAdapters": list_of(OBJECT, most=0),
        "LlamaCppScalesSet": whole_object(success={"const": True}),
        "LlamaCppError": _error(),
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _probability() -> Schema:
    token: dict[str, Schema] = {
        "id": _COUNT,
        "token": TEXT,
        "bytes": list_of(_COUNT),
        "logprob": or_null(_NUMBER),
    }
    return whole_object(**token, top_logprobs=list_of(whole_object(**token)))


def _settings() -> Schema:
    names = settings_json(SamplingParams(), Returned())
    return {**object_of({name: {} for name in names}), "required": sorted(names)}


def _props() -> Schema:
    texts = [
        *("model_alias", "model_path", "model_ftype", "media_marker", "chat_template"),
        *("bos_token", "eos_token", "build_info"),
    ]
    flags = ("endpoint_slots", "endpoint_props", "endpoint_metrics")
    return whole_object(
        default_generation_settings=whole_object(n_ctx=_COUNT, params=_settings()),
        total_slots=_COUNT,
        **dict.fromkeys(texts, TEXT),
        **dict.fromkeys(flags, FLAG),
        modalities=OBJECT,
        chat_template_caps=OBJECT,
        is_sleeping={"const": False},
    )


def _slot() -> Schema:
    counts = [
        *("id", "n_ctx", "n_prompt_tokens", "n_prompt_tokens_processed"),
        *("n_prompt_tokens_cache", "n_decoded"),
    ]
    following = whole_object(has_next_token=FLAG, n_remain=_COUNT, n_decoded=_COUNT)
    return whole_object(
        **dict.fromkeys(counts, _COUNT),
        id_task=_PLACE,
        speculative=FLAG,
        is_processing=FLAG,
        params=object_of({"n_predict": _COUNT, "max_tokens": _COUNT}),
        next_token=list_of(following, most=1),
    )


def _error() -> Schema:
    statuses = {shape.status for shape in (*SHAPES.values(), HEAD_TOO_LARGE)}
    types = sorted({TOO_LONG, *map(error_type, statuses)})
    said = {"code": {"enum": sorted(statuses)}, "message": TEXT, "type": {"enum": types}}
    lengths = {"n_prompt_tokens": _COUNT, "n_ctx": _COUNT}
    return whole_object(error=object_of({**said, **lengths}, needed=tuple(said)))

"""JSON Schemas of the request fields, with their descriptions.

Bounds are read from the checks themselves (quire/base and quire/api/generation), so the document
matches the server. Knows no route and no HTTP. Always holds: each field of a body has a row here or
in the fields' form of its route.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.api.generation.conversation import EFFORTS, MAX_MESSAGES
from quire.api.generation.field_forms import MAX_BIAS_TEXT_CHARS
from quire.api.generation.foreign_fields import (
    BREAKPOINT,
    HINTS,
    NO_EFFECT,
    OPTIONS,
    SYNONYMS,
    UNSERVED,
    Unserved,
)
from quire.api.generation.generate import MAX_SALT_CHARS, STREAM_OPTIONS
from quire.api.generation.grammar_fields import FORMAT_TYPES
from quire.api.generation.stream_cursor import CURSOR
from quire.api.generation.tools import MAX_TOOLS, TOOL_NAME
from quire.api.generation.truncation import SIDES
from quire.api.openai.chat_fields import NO_LIMIT
from quire.api.openai.completions import MAX_CHOICES
from quire.api.openai.metadata import MAX_KEY_CHARS, MAX_PAIRS, MAX_VALUE_CHARS
from quire.api.openapi.field_words import WORDS
from quire.base import sampling_checks as sampling
from quire.base.grammar import MAX_CHARS, MAX_WHITESPACE_CHARS
from quire.base.grammar import MAX_CHOICES as MAX_CHOICE_TEXTS
from quire.base.parameter_checks import MAX_TOKEN_ID
from quire.base.sampling_checks import EARLY_STOPPING, FLAGS, MUST_BE_ABOVE, NUMBERS, WHOLE_NUMBERS
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import MAX_PRIORITY, MAX_TERM_MS, OBJECTIVES
from quire.base.speculation_params import MAX_DRAFT_TOKENS
from quire.base.thinking_budget import MAX_MARK_CHARS, MAX_TOKENS
from quire.text.messages import ROLES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
_CURSOR: Schema = {"type": "string", "pattern": f"^{CURSOR}$"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the document includes of one server: its model's names and sizes, and its own bounds.

    Without a model, models is empty, and vocab_size and context_tokens are None.
    """

    models: tuple[str, ...] = ()
    vocab_size: int | None = None
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    warns_unknown: bool = False
    defaults: SamplingParams = dataclasses.field(default_factory=SamplingParams)


def body_schema(
    honoured: frozenset[str],
    needed: frozenset[str],
    known: Known,
    *,
    own: Mapping[str, Schema],
    words: Mapping[str, str],
) -> Schema:
    """Return the schema of a body: honoured fields, refused ones, and those without effect.

    own, words: as of FieldsForm.
    """
    rows = sampling_rows(known) | _scheduling_rows() | _conversation_rows() | _other_rows(known)
    rows |= own
    properties: Schema = {}
    for name in sorted(honoured, key=lambda name: (name not in needed, name)):
        schema = {"description": words.get(name) or WORDS[name], **rows[name]}
        properties[name] = schema if name in needed else or_null(schema)
    properties |= _foreign_rows(honoured)
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(needed),
        "additionalProperties": known.warns_unknown,
    }


def _foreign_rows(honoured: frozenset[str]) -> Schema:
    """Return rows of the fields of other servers and clients in foreign_fields.py."""
    rows: Schema = {}
    for name, path in sorted(SYNONYMS.items()):
        if path[0] in honoured:
            words = f"Another name of {'.'.join(path)}."
            rows[name] = {"description": words, "x-quire": "synonym"}
    for name, rule in sorted(UNSERVED.items()):
        values = _distinct(rule.allowed)
        rows[name] = {
            "enum": [None, *values],
            "description": f"Not served: {rule.why}.",
            "x-quire": "refused",
        }
    for name, keys in sorted(OPTIONS.items()):
        reasons = "; ".join(f"{key}: {rule.why}" for key, rule in keys.items())
        rows[name] = {
            **or_null(_options(keys)),
            "description": f"Accepted at values that ask for nothing ({reasons}).",
            "x-quire": "refused",
        }
    for name, kind in sorted(NO_EFFECT.items()):
        rows[name] = {
            "type": [kind, "null"],
            "description": "Accepted at any value of its type; it cannot change the answer.",
            "x-quire": "no effect",
        }
    for name in sorted(HINTS):
        rows[name] = {
            "description": "A hint: accepted, not used, and listed in a response header.",
            "x-quire": "hint",
        }
    return {name: row for name, row in rows.items() if name not in honoured}


def _options(keys: Mapping[str, Unserved]) -> Schema:
    return object_of({key: {"enum": [None, *rule.allowed]} for key, rule in keys.items()})


def or_null(schema: Schema) -> Schema:
    """Return the same schema with null allowed."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    own = {"description": schema["description"]} if "description" in schema else {}
    rest = {name: value for name, value in schema.items() if name != "description"}
    either = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {"anyOf": [*either, {"type": "null"}], **own}


def list_of(entry: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    """Return a list with bounds on its length."""
    bounds = {"minItems": least} if least else {}
    return {
        "type": "array",
        "items": entry,
        **bounds,
        **({} if most is None else {"maxItems": most}),
    }


def object_of(
    properties: Mapping[str, Schema], *, needed: tuple[str, ...] = (), closed: bool = True
) -> Schema:
    """Return an object. closed: it has no other properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        **({"required": list(needed)} if needed else {}),
        **({"additionalProperties": False} if closed else {}),
    }


def whole_object(**properties: Schema) -> Schema:
    """Return an object with exactly these properties."""
    return object_of(properties, needed=tuple(properties))


def counts_of_output(first: str) -> Schema:
    """Return the parts of an answer's tokens: `first`, and proposed tokens where there are any."""
    kinds = ("accepted_prediction", "rejected_prediction", "accepted_draft", "rejected_draft")
    count: Schema = {"type": "integer", "minimum": 0}
    return object_of(
        dict.fromkeys((first, *(f"{kind}_tokens" for kind in kinds)), count), needed=(first,)
    )


def chat_rows(known: Known) -> Mapping[str, Schema]:
    """Return the fields that differ in chats."""
    tops = {**_other_rows(known)["top_logprobs"], "minimum": sampling.ALL_LOGPROBS}
    limit = {**sampling_rows(known)["max_tokens"], "minimum": NO_LIMIT}
    return {
        "logprobs": FLAG,
        "top_logprobs": tops,
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), limit),
        "metadata": metadata_row(),
        "service_tier": {"enum": list(UNSERVED["service_tier"].allowed)},
    }


def completion_rows(known: Known) -> Mapping[str, Schema]:
    """Return the fields that differ in completions."""
    return {"prompt": or_null(_other_rows(known)["prompt"])}  # an empty one


def generate_rows(known: Known) -> Mapping[str, Schema]:
    """Return the fields that differ at /generate."""
    return {"tokens": list_of(token_id_row(known), least=1)}  # an empty list is no prompt


def sampling_rows(known: Known) -> dict[str, Schema]:
    """Return the sampling fields."""
    rows: dict[str, Schema] = {}
    for name, low, high in WHOLE_NUMBERS:
        rows[name] = {"type": "integer", "minimum": low, "maximum": high}
    for name, least, most in NUMBERS:
        low_word = "exclusiveMinimum" if name in MUST_BE_ABOVE else "minimum"
        rows[name] = {"type": "number", low_word: least, "maximum": most}
    rows |= dict.fromkeys(FLAGS, FLAG)
    rows["max_tokens"]["maximum"] = max_output(known)
    rows["max_completion_tokens"] = rows["max_tokens"]
    rows["min_tokens"]["maximum"] = max_output(known)
    stop = _text(1, sampling.MAX_STOP_STRING_CHARS)
    pattern = _text(1, sampling.MAX_STOP_PATTERN_CHARS)
    word = {**_text(1, sampling.MAX_BAD_WORD_CHARS), "pattern": r"\S"}
    breaker = _text(1, sampling.MAX_DRY_BREAKER_CHARS)
    token_id = token_id_row(known)
    rows |= {
        "stop": _one_or_list(stop, sampling.MAX_STOP_STRINGS),
        "stop_regex": _one_or_list(pattern, sampling.MAX_STOP_PATTERNS),
        "bad_words": _one_or_list(word, sampling.MAX_BAD_WORDS),
        "dry_sequence_breakers": list_of(breaker, most=sampling.MAX_DRY_BREAKERS),
        "stop_token_ids": list_of(token_id, most=sampling.MAX_STOP_TOKEN_IDS),
        "logprob_token_ids": list_of(token_id, most=sampling.MAX_LOGPROB_TOKEN_IDS),
        "allowed_token_ids": list_of(token_id, least=1, most=sampling.MAX_ALLOWED_TOKEN_IDS),
        "logit_bias": _biases(token_id),
        "early_stopping": {"enum": list(EARLY_STOPPING)},
        "structured_outputs": _structured(),
    }
    for name, schema in rows.items():
        default = getattr(known.defaults, name, None)
        if isinstance(default, bool | int | float | str):
            rows[name] = {**schema, "default": default}
    return rows


def _biases(token_id: Schema) -> Schema:
    """Return the object of OpenAI, or the list of llama.cpp."""
    bias: Schema = {"type": "number", "minimum": -100.0, "maximum": 100.0}
    entry: Schema = {
        "type": "array",
        "prefixItems": [
            {"anyOf": [token_id, _text(1, MAX_BIAS_TEXT_CHARS)]},
            {"anyOf": [bias, {"const": False}]},
        ],
        "minItems": 2,
        "maxItems": 2,
    }
    return {
        "anyOf": [
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": bias,
                "maxProperties": sampling.MAX_LOGIT_BIAS,
            },
            list_of(entry, most=sampling.MAX_LOGIT_BIAS),
        ]
    }


def max_output(known: Known) -> int:
    """Return the upper bound of max_tokens, as far as it is known."""
    bounds = [2**31 - 1, known.max_output_tokens]
    if known.context_tokens is not None:
        bounds.append(known.context_tokens - 1)  # the prompt has at least one token
    return min(bound for bound in bounds if bound is not None)


def _scheduling_rows() -> dict[str, Schema]:
    above_zero = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TERM_MS}
    return {
        "priority": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
        "return_cached_tokens_details": FLAG,
        **dict.fromkeys(OBJECTIVES, above_zero),
    }


def _conversation_rows() -> dict[str, Schema]:
    part = object_of(
        {"type": {"const": "text"}, "text": TEXT}, needed=("type", "text"), closed=False
    )
    words = {"anyOf": [TEXT, list_of(part)]}
    others = [role for role in ROLES if role != "assistant"]
    message = {
        "anyOf": [
            object_of(
                {
                    "role": {"enum": others},
                    "content": words,
                    "tool_calls": {"type": ["array", "null"]},
                },
                needed=("role", "content"),
                closed=False,
            ),
            object_of(
                {
                    "role": {"const": "assistant"},
                    "content": or_null(words),
                    "tool_calls": or_null(list_of(_call())),
                },
                needed=("role",),
                closed=False,
            ),
        ]
    }
    return {
        "messages": list_of(message, least=1, most=MAX_MESSAGES),
        "tools": list_of(_tool(), most=MAX_TOOLS),
        "tool_choice": _tool_choice(),
        "parallel_tool_calls": FLAG,
        # A hint: other degrees are ignored and named in a warning header.
        "reasoning_effort": {"type": "string", "examples": list(EFFORTS)},
        "include_reasoning": FLAG,
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "chat_template": TEXT,
        "chat_template_kwargs": OBJECT,
        "documents": list_of(OBJECT),
    }


def _kv_transfer_params() -> Schema:
    port = {"type": "integer", "minimum": 1, "maximum": 65535}
    count: Schema = {"type": "integer", "minimum": 0}
    groups = list_of(list_of(count), least=1, most=1)
    rows: dict[str, Schema] = {
        **dict.fromkeys(("do_remote_prefill", "do_remote_decode"), FLAG),
        **dict.fromkeys(("remote_engine_id", "remote_host", "remote_request_id"), TEXT),
        "remote_port": port,
        "remote_block_ids": {"anyOf": [list_of(count), groups]},
        "remote_num_tokens": count,
        "remote_blocks_expiry_time": {"type": "number"},
        "transfer_id": {"type": "string", "maxLength": 256},
        "tp_size": {"type": ["integer", "null"], "minimum": 1, "maximum": 64},
    }
    return object_of({name: or_null(schema) for name, schema in rows.items()})


def _other_rows(known: Known) -> dict[str, Schema]:
    token_id = token_id_row(known)
    return {
        "model": {"enum": list(known.models)} if known.models else TEXT,
        "prompt": {
            "anyOf": [
                TEXT,
                list_of(TEXT, least=1, most=MAX_CHOICES),
                list_of(token_id, least=1),
                list_of(list_of(token_id, least=1), least=1, most=MAX_CHOICES),
            ]
        },
        "tokens": list_of(token_id),
        "content": TEXT,
        "output_ids": {"anyOf": [list_of(token_id), list_of(list_of(token_id), least=2)]},
        "output_cursor": {"anyOf": [_CURSOR, list_of(or_null(_CURSOR), least=2)]},
        **dict.fromkeys(("stream", "include_output_ids"), FLAG),
        "stream_options": object_of({name: or_null(FLAG) for name in sorted(STREAM_OPTIONS)}),
        "top_logprobs": {
            "type": "integer",
            "minimum": 0,
            "maximum": sampling.MAX_TOP_LOGPROBS,
        },
        "cache_salt": {"type": "string", "maxLength": MAX_SALT_CHARS, "pattern": "^(?!\\u0000)"},
        "add_special_tokens": FLAG,
        "truncate_prompt_tokens": {
            "anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}],
        },
        "truncation_side": {"enum": list(SIDES)},
        "return_tokens_as_token_ids": FLAG,
        "response_format": _response_format(),
        "return_timings": FLAG,
        "timings": FLAG,
        "timings_per_token": FLAG,
        "return_progress": FLAG,
        "kv_transfer_params": _kv_transfer_params(),
        "speculation": {
            "anyOf": [
                {"enum": ["off", "auto"]},
                {
                    **object_of(
                        {
                            "max_draft_tokens": {
                                "type": "integer",
                                "minimum": 1,
                                "maximum": MAX_DRAFT_TOKENS,
                            }
                        }
                    ),
                    "required": ["max_draft_tokens"],
                },
            ]
        },
        "prediction": _prediction(),
        "return_token_ids": FLAG,
        "thinking_token_budget": {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS},
                {"const": -1},
            ]
        },
        "echo": FLAG,
        "suffix": TEXT,
        "return_token_strs": FLAG,
    }


def _prediction() -> Schema:
    text = object_of(
        {"type": {"const": "text"}, "text": TEXT, "prompt_cache_breakpoint": breakpoint_row()}
    )
    content = {"anyOf": [TEXT, list_of({**text, "required": ["type", "text"]})]}
    whole = object_of({"type": {"const": "content"}, "content": content})
    return {**whole, "required": ["type", "content"]}


def breakpoint_row() -> Schema:
    """Return a breakpoint of OpenAI's prompt cache."""
    return or_null(_options(BREAKPOINT))


def _structured() -> Schema:
    form: dict[str, Schema] = {
        "json": {"type": ["object", "boolean", "string"]},
        "json_object": {"const": True},
        "regex": _text(1, MAX_CHARS),
        "choice": list_of(_text(1), least=1, most=MAX_CHOICE_TEXTS),
        "grammar": _text(1, MAX_CHARS),
        "structural_tag": {"type": ["object", "string"]},
    }
    of_json = {
        "whitespace_pattern": or_null(_text(1, MAX_WHITESPACE_CHARS)),
        "disable_any_whitespace": or_null(FLAG),
    }
    mark = _text(0, MAX_MARK_CHARS)
    thinking = object_of(
        {
            "max_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS},
            "opens": mark,
            "closes": mark,
            "is_open": FLAG,
        },
        needed=("max_tokens", "opens", "closes"),
    )
    beside = {"thinking": or_null(thinking)}
    return {
        "anyOf": [
            object_of({"thinking": thinking}, needed=("thinking",)),
            *(
                object_of(
                    {name: schema, **(of_json if name.startswith("json") else {}), **beside},
                    needed=(name,),
                )
                for name, schema in form.items()
            ),
        ]
    }


def _response_format() -> Schema:
    named: dict[str, Schema] = {
        "name": or_null(TEXT),
        "description": or_null(TEXT),
        "schema": {"type": ["object", "boolean"]},
        "strict": or_null(FLAG),
    }
    own: dict[str, Schema] = {
        "text": {},
        "json_object": {},
        "json_schema": {"json_schema": object_of(named, needed=("schema",))},
        "structural_tag": {
            "structures": list_of(OBJECT, least=1),
            "triggers": list_of(_text(1), least=1),
        },
    }
    beside: Schema = {"type": {"enum": ["json_object", "json_schema"]}, **named}
    return {
        "anyOf": [
            *(
                object_of({"type": {"const": kind}, **own[kind]}, needed=("type", *own[kind]))
                for kind in FORMAT_TYPES
            ),
            object_of(beside, needed=("type", "schema")),
        ]
    }


def _call() -> Schema:
    function = object_of(
        {"name": _text(1), "arguments": {"type": ["string", "object", "null"]}},
        needed=("name",),
        closed=False,
    )
    return object_of(
        {"id": TEXT, "type": {"const": "function"}, "function": function},
        needed=("function",),
        closed=False,
    )


def _tool() -> Schema:
    function = object_of(
        {
            "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
            "description": or_null(TEXT),
            "parameters": or_null(OBJECT),
            "strict": or_null(FLAG),
        },
        needed=("name",),
        closed=False,
    )
    return object_of(
        {"type": {"const": "function"}, "function": function},
        needed=("type", "function"),
        closed=False,
    )


def _tool_choice() -> Schema:
    named = object_of({"name": _text(1)}, needed=("name",), closed=False)
    one = object_of(
        {"type": {"const": "function"}, "function": named},
        needed=("type", "function"),
        closed=False,
    )
    several = object_of(
        {"mode": {"enum": ["auto", "required"]}, "tools": list_of(one, least=1)},
        needed=("tools",),
        closed=False,
    )
    return {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            one,
            object_of(
                {"type": {"const": "allowed_tools"}, "allowed_tools": several},
                needed=("type", "allowed_tools"),
                closed=False,
            ),
        ]
    }


def _text(least: int, most: int | None = None) -> Schema:
    return {"type": "string", "minLength": least, **({} if most is None else {"maxLength": most})}


def _one_or_list(entry: Schema, most: int) -> Schema:
    return {"anyOf": [entry, list_of(entry, most=most)]}


def metadata_row() -> Schema:
    """Return the labels of OpenAI's APIs."""
    return {
        "type": "object",
        "maxProperties": MAX_PAIRS,
        "propertyNames": {"maxLength": MAX_KEY_CHARS},
        "additionalProperties": {**TEXT, "maxLength": MAX_VALUE_CHARS},
    }


def token_id_row(known: Known) -> Schema:
    """Return an id of the vocabulary."""
    highest = MAX_TOKEN_ID if known.vocab_size is None else known.vocab_size - 1
    return {"type": "integer", "minimum": 0, "maximum": highest}


def _distinct(allowed: tuple[Any, ...]) -> list[Any]:
    """Return the values without duplicates: 1 and 1.0 are the same number in JSON."""
    kept: list[Any] = []
    for value in allowed:
        if not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in kept
        ):
            kept.append(value)
    return kept

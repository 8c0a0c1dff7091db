"""JSON Schemas of Anthropic's Messages API: fields of requests, messages, events, errors.

Fields that this API shares with others are in field_schemas.py. Knows no route.
"""

from __future__ import annotations

from quire.api.anthropic.dialect import error_type, status_of
from quire.api.anthropic.history import MAX_MESSAGES, SCOPES
from quire.api.anthropic.message_writer import BATCH, STANDARD
from quire.api.anthropic.request import THINKING_DISPLAYS, THINKING_TYPES, TIERS
from quire.api.generation.conversation import EFFORTS
from quire.api.generation.tools import MAX_TOOLS, TOOL_NAME
from quire.api.http.errors import HEAD_TOO_LARGE, SHAPES
from quire.api.openapi.field_schemas import (
    FLAG,
    OBJECT,
    TEXT,
    Known,
    Schema,
    counts_of_output,
    list_of,
    max_output,
    object_of,
    or_null,
    whole_object,
)
from quire.base import sampling_checks as sampling

_COUNT: Schema = {"type": "integer", "minimum": 0}


def messages_rows(known: Known) -> dict[str, Schema]:
    """Return the fields that have another form than in other APIs, or exist here only."""
    cache_control = _cache_control()
    stop = {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_STRING_CHARS}
    text = _block("text", {"text": TEXT}, cache_control=or_null(cache_control))
    schema = object_of({"type": {"const": "json_schema"}, "schema": OBJECT})
    return {
        "max_tokens": {"type": "integer", "minimum": 0, "maximum": max_output(known)},
        "messages": list_of(
            {"anyOf": [_user(text), _assistant(text), _system(text)]}, least=1, most=MAX_MESSAGES
        ),
        "system": {"anyOf": [TEXT, list_of(text)]},
        "stop_sequences": list_of(stop, most=sampling.MAX_STOP_STRINGS),
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "metadata": object_of({"user_id": or_null(TEXT)}),
        "service_tier": {"enum": list(TIERS)},
        "thinking": _thinking(),
        "output_config": object_of(
            {
                "effort": or_null({"enum": list(EFFORTS)}),
                "format": or_null({**schema, "required": ["type", "schema"]}),
            }
        ),
        "cache_control": cache_control,
        "logprobs": FLAG,
        "tools": list_of(_tool(), most=MAX_TOOLS),
        "tool_choice": _tool_choice(),
    }


def _thinking() -> Schema:
    """Return the objects that switch the reasoning on, perhaps with a budget, or off."""
    on = {"enum": [kind for kind in THINKING_TYPES if kind != "disabled"]}
    budget = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
    display = or_null({"enum": list(THINKING_DISPLAYS)})
    disabled = object_of({"type": {"const": "disabled"}, "budget_tokens": {"type": "null"}})
    return {
        "anyOf": [
            object_of({"type": on, "budget_tokens": budget, "display": display}, needed=("type",)),
            {**disabled, "required": ["type"]},
        ]
    }


def messages_answers() -> dict[str, Schema]:
    """Return messages, events and errors by name."""
    answer = {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": list_of(_ref("AnswerBlock")),
        "stop_reason": or_null({"enum": _STOP_REASONS}),
        "stop_sequence": or_null(TEXT),
        **_NULLS,
        "diagnostics": _NULL,
        "usage": _ref("MessageUsage"),
        "seed": {"type": ["integer", "null"]},
    }
    blocks = [
        whole_object(type={"const": "text"}, text=TEXT),
        whole_object(type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
        whole_object(
            type={"const": "tool_use"},
            id=TEXT,
            name=TEXT,
            input=OBJECT,
            caller={"const": {"type": "direct"}},
            toolset_name=_NULL,
        ),
    ]
    beside = {"logprobs": list_of({"type": "number", "maximum": 0}), "kv_transfer_params": OBJECT}
    counts = ("input_tokens", "output_tokens")
    cached = ("cache_creation_input_tokens", "cache_read_input_tokens")
    return {
        "AnthropicMessage": object_of({**answer, **beside}, needed=tuple(answer)),
        "AnswerBlock": {"anyOf": blocks},
        "MessageUsage": whole_object(
            **dict.fromkeys((*counts, *cached), _COUNT),
            cache_creation=whole_object(
                ephemeral_5m_input_tokens=_COUNT, ephemeral_1h_input_tokens=_COUNT
            ),
            output_tokens_details=or_null(counts_of_output("thinking_tokens")),
            server_tool_use=_NULL,
            service_tier={"enum": [STANDARD, BATCH]},
            inference_geo=_NULL,
            speed={"const": "standard"},
        ),
        "MessageEvent": {"anyOf": _events()},
        "TokenCount": whole_object(input_tokens=_COUNT),
        "AnthropicModel": _model(),
        "AnthropicModelList": whole_object(
            data=list_of(_ref("AnthropicModel")),
            has_more=FLAG,
            first_id=or_null(TEXT),
            last_id=or_null(TEXT),
        ),
        "AnthropicError": _error(),
    }


_NULL: Schema = {"type": "null"}
_NULLS: dict[str, Schema] = {"stop_details": _NULL, "container": _NULL}
_STOP_REASONS = [
    *("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _cache_control() -> Schema:
    ttl = {"ttl": {"enum": ["5m", "1h", None]}}
    scope = {"scope": {"enum": [*SCOPES, None]}}
    properties: dict[str, Schema] = {"type": {"const": "ephemeral"}, **ttl, **scope}
    return {**object_of(properties), "required": ["type"]}


def _block(kind: str, needed: dict[str, Schema], **optional: Schema) -> Schema:
    properties = {"type": {"const": kind}, **needed, **optional}
    return object_of(properties, needed=("type", *needed))


def _system(text: Schema) -> Schema:
    content = {"anyOf": [TEXT, list_of(text)]}
    return object_of({"role": {"const": "system"}, "content": content}, needed=("role", "content"))


def _user(text: Schema) -> Schema:
    said = {"anyOf": [TEXT, list_of(text)]}
    result = _block(
        "tool_result",
        {"tool_use_id": TEXT},
        content=or_null(said),
        is_error=or_null(FLAG),
        cache_control=or_null(_cache_control()),
    )
    system = _block("mid_conv_system", {"content": said}, cache_control=or_null(_cache_control()))
    content = {"anyOf": [TEXT, list_of({"anyOf": [text, result, system]})]}
    return object_of({"role": {"const": "user"}, "content": content}, needed=("role", "content"))


def _assistant(text: Schema) -> Schema:
    named = {"id": TEXT, "name": {**TEXT, "minLength": 1}, "input": OBJECT}
    call = _block("tool_use", named, cache_control=or_null(_cache_control()))
    thinking = _block("thinking", {"thinking": TEXT}, signature=TEXT)
    redacted = _block("redacted_thinking", {"data": TEXT})
    block = {"anyOf": [text, call, thinking, redacted]}
    content = {"anyOf": [TEXT, list_of(block)]}
    role = {"const": "assistant"}
    return object_of({"role": role, "content": content}, needed=("role", "content"))


def _tool() -> Schema:
    return object_of(
        {
            "type": {"enum": ["custom", None]},
            "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
            "description": or_null(TEXT),
            "input_schema": OBJECT,
            "strict": or_null(FLAG),
            "cache_control": or_null(_cache_control()),
            "eager_input_streaming": or_null(FLAG),
        },
        needed=("name", "input_schema"),
    )


def _tool_choice() -> Schema:
    alone = {"disable_parallel_tool_use": or_null(FLAG)}
    kinds: dict[str, dict[str, Schema]] = {
        "auto": alone,
        "any": alone,
        "none": {},
        "tool": {"name": {**TEXT, "minLength": 1}, **alone},
    }
    return {
        "anyOf": [
            object_of(
                {"type": {"const": kind}, **more},
                needed=("type", *(("name",) if kind == "tool" else ())),
            )
            for kind, more in kinds.items()
        ]
    }


def _events() -> list[Schema]:
    at: dict[str, Schema] = {"index": _COUNT}
    deltas = {
        "text_delta": "text",
        "input_json_delta": "partial_json",
        "thinking_delta": "thinking",
        "signature_delta": "signature",
    }
    delta = {
        "anyOf": [whole_object(type={"const": kind}, **{key: TEXT}) for kind, key in deltas.items()]
    }
    reason: Schema = {"enum": _STOP_REASONS}
    end = whole_object(stop_reason=reason, stop_sequence=or_null(TEXT), **_NULLS)
    events: dict[str, dict[str, Schema]] = {
        "ping": {},
        "message_start": {"message": _ref("AnthropicMessage")},
        "content_block_start": {**at, "content_block": _ref("AnswerBlock")},
        "content_block_delta": {**at, "delta": delta},
        "content_block_stop": at,
        "message_delta": {"delta": end, "usage": _ref("MessageUsage")},
        "message_stop": {},
    }
    kinds = {kind: whole_object(type={"const": kind}, **more) for kind, more in events.items()}
    kinds["message_delta"]["properties"]["kv_transfer_params"] = OBJECT  # not needed
    return list(kinds.values())


def _model() -> Schema:
    unknown = ("capabilities", "deprecated_at", "line", "retires_at")
    return whole_object(
        type={"const": "model"},
        **dict.fromkeys(("id", "display_name", "created_at"), TEXT),
        **dict.fromkeys(("max_input_tokens", "max_tokens"), _COUNT),
        lifecycle={"const": "active"},
        **dict.fromkeys(unknown, _NULL),
    )


def _error() -> Schema:
    shapes = [*SHAPES.values(), HEAD_TOO_LARGE]
    types = sorted({error_type(status_of(shape.status)) for shape in shapes})
    return whole_object(
        type={"const": "error"},
        error=whole_object(type={"enum": types}, message=TEXT),
        request_id=or_null(TEXT),
    )

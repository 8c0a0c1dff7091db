"""JSON Schemas of OpenAI's Responses API: fields of requests, responses, items, events.

Fields that this API shares with others are in field_schemas.py. Knows no route.
"""

from __future__ import annotations

from quire.api.generation.conversation import EFFORTS, MAX_MESSAGES
from quire.api.generation.tools import MAX_TOOLS, TOOL_NAME
from quire.api.openai.responses.fields import INCLUDABLE, TRUNCATIONS
from quire.api.openai.responses.request import SUMMARIES, VERBOSITIES
from quire.api.openai.responses.response_writer import FAILURES
from quire.api.openapi.field_schemas import (
    FLAG,
    OBJECT,
    TEXT,
    Known,
    Schema,
    breakpoint_row,
    counts_of_output,
    list_of,
    max_output,
    metadata_row,
    object_of,
    or_null,
    whole_object,
)
from quire.output_parsers.parsed_answer import PHASES

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NAMED: Schema = {**TEXT, "minLength": 1}
_STATUSES = ("in_progress", "completed", "incomplete")
_ENDED = ("completed", "incomplete", "failed", "cancelled")


def responses_rows(known: Known) -> dict[str, Schema]:
    """Return the fields that have another form than in other APIs, or exist here only."""
    summary = or_null({"enum": list(SUMMARIES)})
    return {
        "input": {"anyOf": [TEXT, list_of({"anyOf": input_items()}, most=MAX_MESSAGES)]},
        "instructions": TEXT,
        "tools": list_of(_tool(), most=MAX_TOOLS),
        "tool_choice": _tool_choice(),
        "text": object_of(
            {"format": or_null(_format()), "verbosity": or_null({"enum": list(VERBOSITIES)})}
        ),
        "reasoning": object_of(
            {
                "effort": or_null({"enum": list(EFFORTS)}),
                "summary": summary,
                "generate_summary": summary,
                "context": {"enum": ["auto", None]},
                "mode": {"enum": ["standard", None]},
            }
        ),
        "include": list_of({"enum": list(INCLUDABLE)}),
        "truncation": {"enum": list(TRUNCATIONS)},
        "previous_response_id": TEXT,
        "conversation": {"anyOf": [TEXT, whole_object(id=TEXT)]},
        "store": FLAG,
        "background": FLAG,
        "metadata": metadata_row(),
        "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": max_output(known)},
        "stream_options": object_of({"include_obfuscation": or_null(FLAG)}),
    }


def responses_answers() -> dict[str, Schema]:
    """Return responses, items and events by name."""
    token = {"token": TEXT, "logprob": {"type": "number"}, "bytes": list_of(_COUNT)}
    details = {"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}
    return {
        "Response": _response(),
        "OutputItem": {"anyOf": _output_items()},
        "ResponseUsage": whole_object(
            input_tokens=_COUNT,
            input_tokens_details=whole_object(**details),
            output_tokens=_COUNT,
            output_tokens_details=counts_of_output("reasoning_tokens"),
            total_tokens=_COUNT,
        ),
        "OutputLogprobs": list_of(
            whole_object(**token, top_logprobs=list_of(whole_object(**token)))
        ),
        "ResponseEvent": {"anyOf": _events()},
        "Conversation": whole_object(
            id=TEXT, object={"const": "conversation"}, created_at=_COUNT, metadata=metadata_row()
        ),
        "ConversationDeleted": whole_object(
            id=TEXT, object={"const": "conversation.deleted"}, deleted=FLAG
        ),
        "ConversationItem": {"anyOf": input_items()},
        "ResponseTokens": whole_object(
            object={"const": "response.input_tokens"}, input_tokens=_COUNT
        ),
        "ResponseDeleted": whole_object(id=TEXT, object={"const": "response"}, deleted=FLAG),
        "InputItemList": whole_object(
            object={"const": "list"},
            data=list_of({"anyOf": input_items()}),
            first_id=or_null(TEXT),
            last_id=or_null(TEXT),
            has_more=FLAG,
        ),
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _item(kind: str, needed: dict[str, Schema], **optional: Schema) -> Schema:
    own = {"id": or_null(TEXT), "status": or_null(TEXT)}
    return object_of(
        {"type": {"const": kind}, **own, **needed, **optional}, needed=("type", *needed)
    )


def _text_part(kind: str, key: str = "text") -> Schema:
    unread: dict[str, Schema] = {"annotations": {}, "logprobs": {}, "parsed": {}}
    unread["prompt_cache_breakpoint"] = breakpoint_row()
    return object_of({"type": {"const": kind}, key: TEXT, **unread}, needed=("type", key))


def input_items() -> list[Schema]:
    """Return the schemas of items of input."""
    said = {"anyOf": [TEXT, list_of(_text_part("input_text"))]}
    parts = [_text_part("output_text"), _text_part("refusal", "refusal")]
    wrote = {"anyOf": [TEXT, list_of({"anyOf": parts})]}
    caller = or_null(whole_object(type={"const": "direct"}))
    others = {"enum": ["user", "system", "developer"]}
    call = {"call_id": _NAMED, "name": _NAMED, "arguments": TEXT}
    messages = [
        _item("message", {"role": role, "content": content}, phase={"enum": [*PHASES, None]})
        for role, content in ((others, said), ({"const": "assistant"}, wrote))
    ]
    for message in messages:
        message["properties"]["type"] = {"enum": ["message", None]}
        message["required"].remove("type")
    reference = object_of(
        {"type": {"enum": ["item_reference", None]}, "id": _NAMED}, needed=("id",)
    )
    return [
        *messages,
        _item("function_call", call, parsed_arguments={}, namespace=or_null(_NAMED), caller=caller),
        _item(
            "function_call_output",
            {"call_id": _NAMED, "output": said},
            name=or_null(_NAMED),
            namespace=or_null(_NAMED),
            caller=caller,
        ),
        _item(
            "reasoning",
            {},
            summary=or_null(list_of(_text_part("summary_text"))),
            content=or_null(list_of(_text_part("reasoning_text"))),
            encrypted_content=or_null(TEXT),
        ),
        reference,
    ]


def _tool() -> Schema:
    function = object_of(
        {
            "type": {"const": "function"},
            "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
            "description": or_null(TEXT),
            "parameters": or_null(OBJECT),
            "strict": or_null(FLAG),
        },
        needed=("type", "name"),
    )
    namespace = object_of(
        {
            "type": {"const": "namespace"},
            "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
            "description": or_null(TEXT),
            "tools": list_of(function),
        },
        needed=("type", "name", "tools"),
    )
    return {"anyOf": [function, namespace]}


def _tool_choice() -> Schema:
    named: dict[str, Schema] = {"name": _NAMED, "namespace": or_null(_NAMED)}
    one = object_of({"type": {"const": "function"}, **named}, needed=("type", "name"), closed=False)
    several = object_of(
        {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": list_of(one, least=1),
        },
        needed=("type", "tools"),
        closed=False,
    )
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, one, several]}


def _format() -> Schema:
    schema = object_of(
        {
            "type": {"const": "json_schema"},
            "name": or_null(TEXT),
            "description": or_null(TEXT),
            "schema": {"type": ["object", "boolean"]},
            "strict": or_null(FLAG),
        },
        needed=("type", "schema"),
    )
    plain = whole_object(type={"enum": ["text", "json_object"]})
    return {"anyOf": [plain, schema]}


def _response() -> Schema:
    codes = {"enum": sorted(FAILURES.values())}
    error = whole_object(code=codes, message=TEXT, param=or_null(TEXT), type=TEXT)
    repeated = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    response = whole_object(
        id=TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        completed_at=or_null(_COUNT),
        status={"enum": ["queued", "in_progress", *_ENDED]},
        background=FLAG,
        conversation=or_null(whole_object(id=TEXT)),
        error=or_null(error),
        incomplete_details=or_null(whole_object(reason={"const": "max_output_tokens"})),
        instructions=or_null(TEXT),
        max_output_tokens=or_null(_COUNT),
        metadata={"type": "object", "additionalProperties": TEXT},
        model=TEXT,
        output=list_of(_ref("OutputItem")),
        parallel_tool_calls=FLAG,
        previous_response_id=or_null(TEXT),
        reasoning=whole_object(
            effort=or_null(TEXT),
            summary={"type": "null"},
            context={"const": "auto"},
            mode={"const": "standard"},
        ),
        **dict.fromkeys(repeated, or_null(TEXT)),
        max_tool_calls={"type": ["number", "null"]},
        prompt_cache_options=or_null(whole_object(mode=TEXT, ttl=TEXT)),
        prompt={"type": "null"},
        moderation={"type": "null"},
        service_tier={"const": "default"},
        store=FLAG,
        temperature={"type": "number"},
        text=whole_object(format=OBJECT, verbosity=TEXT),
        tool_choice={"type": ["string", "object"]},
        tools=list_of(OBJECT),
        top_logprobs=_COUNT,
        top_p={"type": "number"},
        truncation={"enum": list(TRUNCATIONS)},
        usage=or_null(_ref("ResponseUsage")),
        seed={"type": ["integer", "null"]},
    )
    response["properties"]["kv_transfer_params"] = OBJECT  # not needed
    return response


def _parts() -> dict[str, Schema]:
    logprobs = _ref("OutputLogprobs")
    text: dict[str, Schema] = {"text": TEXT, "annotations": list_of(OBJECT), "logprobs": logprobs}
    return {
        "output_text": whole_object(type={"const": "output_text"}, **text),
        "reasoning_text": whole_object(type={"const": "reasoning_text"}, text=TEXT),
    }


def _output_items() -> list[Schema]:
    own: dict[str, Schema] = {"id": TEXT, "status": {"enum": list(_STATUSES)}}
    parts = {name: list_of(part, most=1) for name, part in _parts().items()}
    role = {"const": "assistant"}
    reasoning = {
        **own,
        "type": {"const": "reasoning"},
        "summary": list_of(OBJECT),
        "content": parts["reasoning_text"],
    }
    call = dict.fromkeys(("call_id", "name", "arguments"), TEXT)
    called = {**own, "type": {"const": "function_call"}, **call}
    message = {**own, "type": {"const": "message"}, "role": role, "content": parts["output_text"]}
    return [
        object_of({**message, "phase": {"enum": list(PHASES)}}, needed=tuple(message)),
        object_of({**reasoning, "encrypted_content": TEXT}, needed=tuple(reasoning)),
        object_of({**called, "namespace": TEXT}, needed=tuple(called)),
    ]


def _events() -> list[Schema]:
    of_item: dict[str, Schema] = {"item_id": TEXT, "output_index": _COUNT}
    at = {**of_item, "content_index": _COUNT}
    item = {"output_index": _COUNT, "item": _ref("OutputItem")}
    part = {**at, "part": {"anyOf": [*_parts().values()]}}
    logprobs = {"logprobs": _ref("OutputLogprobs")}
    states = ("created", "queued", "in_progress", "completed", "incomplete", "failed")
    events: dict[str, dict[str, Schema]] = {
        **{state: {"response": _ref("Response")} for state in states},
        "output_item.added": item,
        "output_item.done": item,
        "content_part.added": part,
        "content_part.done": part,
        "output_text.delta": {**at, "delta": TEXT, **logprobs},
        "output_text.done": {**at, "text": TEXT, **logprobs},
        "reasoning_text.delta": {**at, "delta": TEXT},
        "reasoning_text.done": {**at, "text": TEXT},
        "function_call_arguments.delta": {**of_item, "delta": TEXT},
        "function_call_arguments.done": {**of_item, "name": TEXT, "arguments": TEXT},
    }
    number: dict[str, Schema] = {"sequence_number": _COUNT}
    error = {"code": or_null(TEXT), "message": TEXT, "param": or_null(TEXT)}
    return [
        *(
            whole_object(type={"const": f"response.{kind}"}, **more, **number)
            for kind, more in events.items()
        ),
        whole_object(type={"const": "error"}, **error, **number),
    ]

"""JSON Schemas of Ollama's API: fields of requests, answers, lines of streams, errors.

Fields that this API shares with others are in field_schemas.py. Knows no route.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.api.embeddings.inputs import MAX_INPUTS
from quire.api.generation.conversation import MAX_MESSAGES
from quire.api.ollama.embed import COUNTS as EMBED_COUNTS
from quire.api.ollama.fields import (
    NEUTRAL_OPTIONS,
    NUM_CTX,
    NUM_KEEP,
    OPTIONS,
    RENAMED,
    RUNTIME_OPTIONS,
)
from quire.api.ollama.history import ROLES
from quire.api.ollama.request import THINK_LEVELS
from quire.api.openapi.field_schemas import (
    FLAG,
    OBJECT,
    TEXT,
    Known,
    Schema,
    list_of,
    object_of,
    or_null,
    sampling_rows,
    token_id_row,
    whole_object,
)
from quire.base import sampling_checks as sampling

_COUNT: Schema = {"type": "integer", "minimum": 0}
_TYPES: Mapping[object, str] = {int: "integer", bool: "boolean"}


def ollama_rows(known: Known) -> dict[str, Schema]:
    """Return the fields that have another form than in other APIs, or exist here only."""
    text = {
        "description": "The prompt; it is rendered by the model's template as a message of a user."
    }
    return {
        "messages": {
            **list_of({"anyOf": [_message(role) for role in ROLES]}, most=MAX_MESSAGES),
            "description": "The conversation: texts, thinking and tool_calls. Without messages "
            "nothing is generated.",
        },
        "prompt": {**TEXT, **text},
        "system": {**TEXT, "description": "A system message before the prompt."},
        "suffix": {
            **TEXT,
            "description": "The text after the gap to fill in; for models with infill tokens.",
        },
        "options": _options(known),
        "format": {"anyOf": [{"enum": ["", "json"]}, OBJECT]},
        "think": {"anyOf": [FLAG, {"enum": list(THINK_LEVELS)}]},
        "keep_alive": {
            "anyOf": [
                {"type": "number"},
                {"type": "string", "pattern": r"^[ -~]{1,32}$"},
            ]
        },
        "truncate": {
            **FLAG,
            "default": True,
            "description": "Leave out the oldest messages of a chat, or the middle of a prompt, if "
            "all do not fit the context; with false they are refused.",
        },
        "shift": {**FLAG, "description": "A hint: accepted, not used."},
        "template": {"const": ""},
        "images": {"const": []},
        "raw": FLAG,
        "verbose": FLAG,
        "context": list_of(token_id_row(known)),
        "name": {"enum": list(known.models)} if known.models else TEXT,
        "logprobs": FLAG,
        "stream": {
            **FLAG,
            "default": True,
            "description": "Send the answer as lines of JSON while it is generated; true by "
            "default.",
        },
    }


def ollama_show_rows(known: Known) -> dict[str, Schema]:
    """Return the schemas of the fields of /api/show."""
    said = {"description": "Accepted if it is empty: the model is shown as it is served."}
    return {
        **ollama_rows(known),
        "system": {"const": "", **said},
        "template": {"const": "", **said},
        "options": {"const": {}, **said},
    }


def ollama_embed_rows(known: Known) -> dict[str, Schema]:
    """Return the schemas of the fields of /api/embed and /api/embeddings."""
    texts = list_of(TEXT, most=MAX_INPUTS)
    options = _options(known)
    options["properties"] |= {key: {"type": "null"} for key in (*OPTIONS, *RENAMED)}
    return {
        "input": {"anyOf": [TEXT, texts], "description": "A text or texts; one vector for each."},
        "prompt": {**TEXT, "description": "The text."},
        "truncate": {
            **FLAG,
            "description": "Cut inputs beyond the context at their end; true by default. With "
            "false they are refused.",
        },
        "dimensions": {"type": "integer", "minimum": 1},
        "normalize": {
            **FLAG,
            "description": "Bring vectors to length 1; by default /api/embed does, and "
            "/api/embeddings does not.",
        },
        "prompt_name": TEXT,
        "options": {
            **options,
            "description": "How Ollama computes; without effect. Options of sampling are refused.",
        },
        "keep_alive": ollama_rows(known)["keep_alive"],
    }


def ollama_answers() -> dict[str, Schema]:
    """Return answers, lines and errors by name."""
    counts = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration")
    ended: dict[str, Schema] = {
        "done": {"const": True},
        "done_reason": {"enum": ["stop", "length"]},
        **dict.fromkeys((*counts, "eval_count", "eval_duration"), _COUNT),
        "seed": {"type": "integer"},
    }
    loaded: dict[str, Schema] = {
        "done": {"const": True},
        "done_reason": {"enum": ["load", "unload"]},
    }
    chat: dict[str, Schema] = {"message": _ref("OllamaMessage")}
    completion: dict[str, Schema] = {"response": TEXT}
    thinking: dict[str, Schema] = {"thinking": TEXT, "logprobs": list_of(_logprob())}
    line: dict[str, Schema] = {"done": {"const": False}}
    of_chat: dict[str, Schema] = {"logprobs": thinking["logprobs"]}
    context: dict[str, Schema] = {"context": list_of({"type": "integer"})}
    listed = _listed()
    running: dict[str, Schema] = {"expires_at": TEXT, "size_vram": _COUNT, "context_length": _COUNT}
    return {
        "OllamaMessage": object_of(
            {
                "role": {"const": "assistant"},
                "content": TEXT,
                "thinking": TEXT,
                "tool_calls": list_of(_answered_call(), least=1),
            },
            needed=("role", "content"),
        ),
        "OllamaChat": {"anyOf": [_framed(chat, ended, of_chat), _framed(chat, loaded, {})]},
        "OllamaChatLine": {"anyOf": [_framed(chat, line, of_chat), _framed(chat, ended, {})]},
        "OllamaCompletion": {
            "anyOf": [
                _framed(completion, ended, {**thinking, **context}),
                _framed(completion, loaded, {}),
            ]
        },
        "OllamaCompletionLine": {
            "anyOf": [_framed(completion, line, thinking), _framed(completion, ended, context)]
        },
        "OllamaEmbed": whole_object(
            model=TEXT,
            embeddings=list_of(list_of({"type": "number"})),
            **dict.fromkeys(EMBED_COUNTS, _COUNT),
        ),
        "OllamaEmbedding": whole_object(embedding=list_of({"type": "number"})),
        "OllamaModels": whole_object(
            models=list_of(whole_object(**listed, capabilities=_capabilities()))
        ),
        "OllamaRunning": whole_object(models=list_of(whole_object(**listed, **running))),
        "OllamaModel": _described(),
        "OllamaVersion": whole_object(version=TEXT),
        "OllamaError": whole_object(error=TEXT),
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _framed(
    said: Mapping[str, Schema], more: Mapping[str, Schema], optional: Mapping[str, Schema]
) -> Schema:
    needed = {"model": TEXT, "created_at": TEXT, **said, **more}
    return object_of({**needed, **optional}, needed=tuple(needed))


def _message(role: str) -> Schema:
    own: dict[str, dict[str, Schema]] = {
        "assistant": {
            "thinking": or_null(TEXT),
            "tool_calls": or_null(list_of(_call())),
        },
        "tool": {"tool_name": or_null(TEXT), "tool_call_id": or_null(TEXT)},
    }
    properties = {
        "role": {"const": role},
        "content": or_null(TEXT),
        "images": {"enum": [None, []]},
        **own.get(role, {}),
    }
    return object_of(properties, needed=("role",))


def _call() -> Schema:
    function = object_of(
        {"name": {**TEXT, "minLength": 1}, "arguments": or_null(OBJECT)},
        needed=("name",),
        closed=False,
    )
    properties = {"id": or_null(TEXT), "type": {"const": "function"}, "function": function}
    return object_of(properties, needed=("function",), closed=False)


def _answered_call() -> Schema:
    return whole_object(id=TEXT, function=whole_object(index=_COUNT, name=TEXT, arguments=OBJECT))


def _options(known: Known) -> Schema:
    rows = sampling_rows(known)
    options: dict[str, Schema] = {name: rows[name] for name in sorted(OPTIONS)}
    for name, ours in RENAMED.items():
        options[name] = {**rows[ours], "description": f"{ours} of other APIs."}
    limit = {"type": "integer", "minimum": 1, "maximum": known.max_output_tokens or 2**31 - 1}
    options["num_predict"] = {"anyOf": [limit, {"enum": [0, -1, -2]}]}
    for name, kind in RUNTIME_OPTIONS.items():
        options[name] = {"type": _TYPES.get(kind, "number")}
    for name, (allowed, why) in NEUTRAL_OPTIONS.items():
        options[name] = {"const": allowed[0], "description": f"Not served: {why}."}
    options[NUM_CTX] = {"type": "integer", "description": "A hint: accepted, not used."}
    options[NUM_KEEP] = {
        "type": "integer",
        "description": "Tokens at the beginning of a prompt that stay if it is cut; 4 by default.",
    }
    return object_of(
        {name: or_null(schema) for name, schema in options.items()}, closed=not known.warns_unknown
    )


def _logprob() -> Schema:
    token: dict[str, Schema] = {
        "token": TEXT,
        "logprob": or_null({"type": "number"}),
        "bytes": list_of(_COUNT),
    }
    alternatives = list_of(whole_object(**token), most=sampling.MAX_TOP_LOGPROBS)
    return whole_object(**token, top_logprobs=alternatives)


def _listed() -> dict[str, Schema]:
    return {
        "name": TEXT,
        "model": TEXT,
        "modified_at": TEXT,
        "size": _COUNT,
        "digest": TEXT,
        "details": _details(),
    }


def _details() -> Schema:
    names = ("parent_model", "format", "family", "parameter_size", "quantization_level")
    return whole_object(**dict.fromkeys(names, TEXT), families=list_of(TEXT), context_length=_COUNT)


def _capabilities() -> Schema:
    return list_of({"enum": ["embedding", "completion", "tools", "thinking", "insert"]})


def _described() -> Schema:
    return whole_object(
        modelfile=TEXT,
        parameters=TEXT,
        template=TEXT,
        details=_details(),
        model_info=OBJECT,
        capabilities=_capabilities(),
        modified_at=TEXT,
    )

"""Read the fields of the Responses API as those of the neutral code.

`as_named_here` puts the names of this API into errors of the neutral code. Always holds: a field is
honoured, without effect by its nature, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.generation.continued_answer import CONTINUATION, CONTINUED_STREAMS
from quire.api.generation.conversation import EFFORTS
from quire.api.generation.fields import flag
from quire.api.generation.request_context import RequestContext
from quire.api.openai.responses.fields import INCLUDABLE, LOGPROBS, OWN_NAMES, TRUNCATIONS
from quire.base.errors import InvalidParameter
from quire.base.parameter_checks import whole
from quire.base.sampling_checks import MAX_TOP_LOGPROBS
from quire.base.show import show

SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")
_FORMAT = '{"type": "json_schema", "name": "...", "schema": {...}}'
# Fields without effect that a response repeats.
_LABELS = (
    *("user", "safety_identifier", "max_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
# Keys of `reasoning` with one value, which is what responses are made with.
_REASONING = {"context": "auto", "mode": "standard"}
_SCHEMA_KEYS = ("name", "description", "schema", "strict")


def sampling_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields under our names. Raises InvalidParameter."""
    fields = dict(given)
    if "max_output_tokens" in given:
        limit = whole("max_output_tokens", given["max_output_tokens"], 1, 2**31 - 1)
        fields["max_tokens"] = limit
    requested = _text(given).get("format")
    if requested is not None:
        fields["response_format"] = _response_format(requested)
    return fields


def text_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `text` as a response repeats it."""
    requested = _text(given).get("format") or {"type": "text"}
    if requested["type"] == "json_schema":
        requested = {**dict.fromkeys(_SCHEMA_KEYS), **requested}
        requested["name"] = requested["name"] or "answer"
    return {"format": requested, "verbosity": _text(given).get("verbosity") or "medium"}


def reasoning_of(given: Mapping[str, Any], context: RequestContext | None) -> dict[str, Any]:
    """Return `reasoning`, checked. context: notes what is ignored; None: notes nothing."""
    reasoning = given.get("reasoning", {})
    known = {"effort", "summary", "generate_summary", *_REASONING}
    if not isinstance(reasoning, dict) or reasoning.keys() - known:
        raise InvalidParameter(
            f"reasoning is {show(reasoning)}; an object with effort, summary, context and mode is "
            "allowed",
            param="reasoning",
        )
    for name, neutral in _REASONING.items():
        if reasoning.get(name, neutral) not in (None, neutral):
            raise InvalidParameter(
                f'reasoning.{name} is {show(reasoning[name])}; "{neutral}" is allowed: the '
                "model's template decides what it reads of earlier reasoning; there is one mode",
                param="reasoning",
            )
    found: dict[str, Any] = {"effort": reasoning.get("effort"), "summary": None, **_REASONING}
    if found["effort"] is not None and found["effort"] not in EFFORTS:
        raise InvalidParameter(
            f"reasoning.effort is {show(found['effort'])}; {', '.join(EFFORTS)} are allowed",
            param="reasoning",
        )
    for name in ("summary", "generate_summary"):
        summary = reasoning.get(name)
        if summary is None:
            continue
        if summary not in SUMMARIES:
            raise InvalidParameter(
                f"reasoning.{name} is {show(summary)}; {', '.join(SUMMARIES)} are allowed",
                param="reasoning",
            )
        if context is not None:
            context.ignore(f"reasoning.{name}")
    return found


def echoed_fields(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels that a response repeats; they have no other effect. sent: a whole body."""
    labels = {name: sent.get(name) for name in _LABELS}
    labels |= {"prompt": None, "moderation": None}  # which are not served
    options = sent.get("prompt_cache_options")
    if options is not None:  # with OpenAI's defaults
        labels["prompt_cache_options"] = {
            "mode": options.get("mode") or "implicit",
            "ttl": options.get("ttl") or "30m",
        }
    return labels


def check_text(given: Mapping[str, Any], context: RequestContext) -> None:
    """Check `text`; its verbosity is a hint that is not used."""
    verbosity = _text(given).get("verbosity")
    if verbosity is not None and verbosity not in VERBOSITIES:
        raise InvalidParameter(
            f"text.verbosity is {show(verbosity)}; {', '.join(VERBOSITIES)} are allowed",
            param="text",
        )
    if verbosity not in (None, "medium"):
        context.ignore("text.verbosity")


def included(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the additions that `include` asks for."""
    listed = given.get("include", [])
    if not isinstance(listed, list):
        raise InvalidParameter(
            f"include is {show(listed)}; a list is allowed, of {', '.join(INCLUDABLE)}",
            param="include",
        )
    for name in listed:
        if name not in INCLUDABLE:
            raise InvalidParameter(
                f"include holds {show(name)}; {', '.join(INCLUDABLE)} are allowed",
                param="include",
            )
    return frozenset(listed)


def num_top(given: Mapping[str, Any], include: frozenset[str]) -> int | None:
    """Return the alternatives of each token; None for no log-probabilities."""
    wanted = whole("top_logprobs", given.get("top_logprobs", 0), 0, MAX_TOP_LOGPROBS)
    if LOGPROBS in include:
        return wanted
    if wanted:
        raise InvalidParameter(
            f"top_logprobs is {wanted} without log-probabilities; add include: "
            f'["{LOGPROBS}"], or leave it out',
            param="top_logprobs",
        )
    return None


def truncates(given: Mapping[str, Any]) -> bool:
    """Return whether the oldest items may be dropped."""
    truncation = given.get("truncation", TRUNCATIONS[0])
    if truncation not in TRUNCATIONS:
        raise InvalidParameter(
            f"truncation is {show(truncation)}; {' and '.join(TRUNCATIONS)} are allowed",
            param="truncation",
        )
    return bool(truncation == "auto")


def instructions_of(given: Mapping[str, Any]) -> str | None:
    """Return the text of the system message."""
    instructions = given.get("instructions")
    if not isinstance(instructions, str | None):
        raise InvalidParameter(
            f"instructions is {show(instructions)}; a text is allowed", param="instructions"
        )
    return instructions


def check_stream_options(given: Mapping[str, Any]) -> None:
    """Refuse options of other APIs' streams; generate.py checks the rest."""
    options = given.get("stream_options", {})
    for name in options if isinstance(options, dict) else ():
        if name != "include_obfuscation" and options[name] is not None:
            raise InvalidParameter(
                f"stream_options has {show(name)}; include_obfuscation is allowed: the last event "
                "has the usage anyway, and a response with background: true can be resumed",
                param="stream_options",
            )


def check_continuation(given: Mapping[str, Any]) -> None:
    """Refuse to continue what cannot be continued exactly. Raises InvalidParameter."""
    for name in CONTINUED_STREAMS & given.keys() if flag(given, "background") else ():
        raise InvalidParameter(
            f"{name} is given with background: true; such a response goes on without its client: "
            "leave one of them out",
            param=name,
        )
    if CONTINUATION.isdisjoint(given):
        return
    if not flag(given, "stream"):
        why = "without stream: true; only a streamed response can be continued"
    elif LOGPROBS in included(given):
        why = f"with {LOGPROBS} in include; the last events would need those of all tokens"
    else:
        return
    raise InvalidParameter(f"output_ids is given {why}", param="output_ids")


def includes_reasoning(given: Mapping[str, Any]) -> bool:
    """Return whether the output has the reasoning."""
    return flag(given, "include_reasoning", default=True)


def as_named_here(error: InvalidParameter, given: Mapping[str, Any]) -> InvalidParameter:
    """Return an error with the names that the fields have in this API."""
    if error.param == "response_format":
        said = str(error).replace("response_format.json_schema.schema", "text.format.schema")
        said = said.replace("response_format.json_schema", "text.format")
        return InvalidParameter(said.replace("response_format", "text.format"), param="text")
    name = OWN_NAMES.get(error.param or "")
    if error.param is None or name is None:
        return error
    return InvalidParameter(str(error).replace(error.param, name), param=name)


def _text(given: Mapping[str, Any]) -> Mapping[str, Any]:
    text = given.get("text", {})
    if not isinstance(text, dict) or text.keys() - {"format", "verbosity"}:
        raise InvalidParameter(
            f"text is {show(text)}; an object with format and verbosity is allowed", param="text"
        )
    return text


def _response_format(requested: Any) -> dict[str, Any]:
    """Return the format in the form of chats."""
    kind = requested.get("type") if isinstance(requested, dict) else None
    if kind in ("text", "json_object") and requested.keys() == {"type"}:
        return {"type": kind}
    if kind != "json_schema" or requested.keys() - {"type", *_SCHEMA_KEYS}:
        raise InvalidParameter(
            f'text.format is {show(requested)}; {{"type": "text"}}, {{"type": "json_object"}} and '
            f"{_FORMAT} are allowed",
            param="text",
        )
    schema = {name: value for name, value in requested.items() if name != "type"}
    return {"type": kind, "json_schema": schema}

"""Read the fields of Ollama's API as those of the neutral code.

`sampling_fields` makes sampling fields of `options`, `format` and the log-probabilities;
`as_named_here` puts the names of this API into errors of the neutral code. Always holds: an option
is honoured, without effect by its nature, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.api.generation.fields import flag
from quire.api.generation.foreign_fields import same_json
from quire.api.generation.generate import GenerationRequest
from quire.api.generation.request_context import RequestContext
from quire.api.generation.sampler_order import OLLAMA_ORDER, has_penalties, with_order
from quire.api.ollama.fields import (
    NEUTRAL_OPTIONS,
    NUM_CTX,
    NUM_KEEP,
    OPTIONS,
    RENAMED,
    RUNTIME_OPTIONS,
    is_whole,
)
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import MAX_TOP_LOGPROBS
from quire.base.sampling_params import SamplingParams
from quire.base.show import show

# Values of num_predict without a limit of their own.
_NO_LIMIT = (0, -1, -2)
# Tokens that its penalties count, and those that are kept of the beginning of a prompt that is cut,
# unless a request says otherwise.
REPEAT_LAST_N = 64
_NUM_KEEP = 4
# What a duration of no length is written with.
_ZERO_DURATION = frozenset("0.hmnsu")
THINK_LEVELS = ("low", "medium", "high", "max")
_OURS = {ours: name for name, ours in RENAMED.items()}


def sampling_fields(context: RequestContext) -> dict[str, Any]:
    """Return the sampling fields under our names. Raises InvalidParameter."""
    given, fields = context.given, _read_options(context)
    limit = fields.get("max_tokens")
    if limit in _NO_LIMIT and not isinstance(limit, bool):
        del fields["max_tokens"]
    if fields.get("seed") == -1:
        del fields["seed"]
    if (requested := given.get("format", "")) != "":
        fields["response_format"] = _response_format(requested)
    return fields


def check_options_of_vectors(context: RequestContext) -> None:
    """Refuse options of sampling, since nothing is generated. Raises InvalidParameter."""
    for name in _read_options(context):
        raise _fault(
            f"options.{_OURS.get(name, name)} is an option of generation, and a vector is computed "
            "without sampling; leave it out"
        )


def num_top_logprobs(given: Mapping[str, Any]) -> int | None:
    """Return the alternatives of each token; None for no log-probabilities."""
    wanted, num_top = flag(given, "logprobs"), given.get("top_logprobs", 0)
    if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise InvalidParameter(
            f"top_logprobs is {show(num_top)}; a whole number from 0 to {MAX_TOP_LOGPROBS} is "
            "allowed",
            param="top_logprobs",
        )
    if num_top and not wanted:
        raise InvalidParameter(
            f"top_logprobs is {num_top} without logprobs: true; add it", param="top_logprobs"
        )
    return num_top if wanted else None


def effort_of(given: Mapping[str, Any]) -> str | None:
    """Return the degree of reasoning of `think`; None leaves it to the template."""
    think = given.get("think")
    if think is None:
        return None
    if isinstance(think, bool):
        return "medium" if think else "none"
    if think not in THINK_LEVELS:
        raise InvalidParameter(
            f"think is {show(think)}; true, false, {', '.join(map(show, THINK_LEVELS))} are "
            "allowed",
            param="think",
        )
    return str(think)


def check_plain_fields(request: GenerationRequest) -> None:
    """Check fields that cannot change an answer, and `shift`, a hint: an answer ends where the
    context is full.

    Also those that only some requests read, so that a malformed one is refused in each.
    """
    given = request.given
    effort_of(given)
    check_keep_alive(given)
    if flag(given, "shift"):
        request.context.ignore("shift")


def check_keep_alive(given: Mapping[str, Any]) -> None:
    """Check `keep_alive`, which has no effect."""
    if not is_keep_alive(given.get("keep_alive")):
        raise InvalidParameter(
            f'keep_alive is {show(given["keep_alive"])}; seconds or a duration such as "5m" is '
            "allowed; it has no effect: the model stays loaded",
            param="keep_alive",
        )


def unloads(given: Mapping[str, Any]) -> bool:
    """Return whether `keep_alive` asks to unload the model: a number or a duration of zero."""
    value = given.get("keep_alive")
    if isinstance(value, str):
        return "0" in value and _ZERO_DURATION.issuperset(value)
    return value == 0 and not isinstance(value, bool)


def as_ollama_does(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with Ollama's window of the penalties and its place of min_p."""
    if sampling.repeat_last_n is None and has_penalties(sampling):
        sampling = replace(sampling, repeat_last_n=REPEAT_LAST_N)
    return with_order(OLLAMA_ORDER, sampling)


def num_keep(given: Mapping[str, Any]) -> int:
    """Return how many tokens at the beginning of a prompt are kept if it is cut; below 0 all."""
    value: int | None = given.get("options", {}).get(NUM_KEEP)
    return _NUM_KEEP if value is None else value


def is_keep_alive(value: Any) -> bool:
    """Return whether a value has the form of keep_alive: a number of seconds, or a duration."""
    if isinstance(value, str):
        return bool(value) and value.isascii() and value.isprintable() and len(value) <= 32
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def as_named_here(error: InvalidParameter, given: Mapping[str, Any]) -> InvalidParameter:
    """Return an error with the names that the fields have in this API."""
    param, said = error.param or "", str(error)
    if param == "response_format":
        said = said.replace("response_format.json_schema.schema", "format")
        said = said.replace("response_format.json_schema", "format")
        return InvalidParameter(said.replace("response_format", "format"), param="format")
    if param == "max_tokens" or param in RENAMED.values():
        return InvalidParameter(said.replace(param, f"options.{_OURS[param]}"), param="options")
    if param in OPTIONS:
        said = f"options.{said}" if said.startswith(param) else said
        return InvalidParameter(said.replace("max_tokens", "num_predict"), param="options")
    if param == "context":
        return InvalidParameter(said.replace("the prompt", "context", 1), param=param)
    if param == "reasoning_effort":
        return InvalidParameter(said.replace(param, "think"), param="think")
    return error


def _read_options(context: RequestContext) -> dict[str, Any]:
    """Return the entries of `options` for sampling, under our names, and check the others."""
    options = context.given.get("options", {})
    if not isinstance(options, dict):
        raise _fault(
            f'options is {show(options)}; an object such as {{"temperature": 0}} is allowed'
        )
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            _read_option(context, name, value, fields)
    return fields


def _read_option(context: RequestContext, name: str, value: Any, fields: dict[str, Any]) -> None:
    """Store the value of an option under our name, or check one that has no effect."""
    ours = RENAMED.get(name) or (name if name in OPTIONS else None)
    if isinstance(value, float) and value.is_integer() and is_whole(name, ours):
        value = int(value)  # as Ollama reads it
    if ours is not None:
        fields[ours] = value
    elif name in RUNTIME_OPTIONS:
        kind = RUNTIME_OPTIONS[name]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            words = "true or false" if kind is bool else "a number"
            raise _fault(f"options.{name} is {show(value)}; {words} is allowed")
    elif name in NEUTRAL_OPTIONS:
        allowed, why = NEUTRAL_OPTIONS[name]
        if not any(same_json(value, one) for one in allowed):
            raise _fault(
                f"options.{name} is {show(value)}: {why}; leave it out ({show(allowed[0])} is "
                "accepted)"
            )
    elif name in (NUM_CTX, NUM_KEEP):
        if type(value) is not int:
            raise _fault(f"options.{name} is {show(value)}; a whole number is allowed")
        if name == NUM_CTX:  # the context is the server's
            context.ignore(f"options.{name}")
    elif context.warns:
        context.ignore(f"options.{name}"[:64])
    else:
        raise _unknown_option(name)


def _unknown_option(name: str) -> InvalidParameter:
    instead = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}.get(name)
    advice = f"write it as options.{instead}" if instead else "leave it out"
    return _fault(f"options.{name[:64]} is not an option of this server; {advice}")


def _response_format(requested: Any) -> dict[str, Any]:
    """Return the format in OpenAI's form."""
    if requested == "json":
        return {"type": "json_object"}
    if not isinstance(requested, dict):
        raise InvalidParameter(
            f'format is {show(requested)}; "json" or a JSON schema is allowed', param="format"
        )
    return {"type": "json_schema", "json_schema": {"schema": requested}}


def _fault(message: str) -> InvalidParameter:
    return InvalidParameter(message, param="options")

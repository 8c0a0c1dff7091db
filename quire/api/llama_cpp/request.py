"""Read the fields of llama.cpp's native routes as those of the neutral code.

Always holds: a field is honoured, without effect by its nature, or refused by name; `id_slot` is
checked and has no effect, since tokens do not depend on the place of a request. What llama.cpp
does by default is done: penalties count the last 64 tokens, the temperature comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.api.generation.fields import flag, sampling_of
from quire.api.generation.generate import GenerationRequest
from quire.api.generation.sampler_order import (
    LLAMA_CPP_ORDER,
    ORDERS,
    has_penalties,
    neutral_unlisted,
    sampler_names,
    with_order,
)
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import MAX_TOP_LOGPROBS
from quire.base.sampling_params import SamplingParams
from quire.base.show import show

# Values of n_predict without a limit of their own.
_NO_LIMIT = (-1, -2)
# Seeds that ask for a random one: -1, also as its server reads it, in 32 bits without a sign.
_ANY_SEEDS = (-1, 2**32 - 1)
_MAX_SLOT = 2**31 - 1
_MAX_ID_DIGITS = 10
# Tokens that llama.cpp's server searches for repetitions, unless a request says otherwise.
DRY_LAST_N = 64
# And those that its penalties count.
REPEAT_LAST_N = 64
MAX_RESPONSE_FIELDS = 256
# A sampler that compares the sums of tokens that begin alike. It is not implemented.
_INFILL = "infill"
_SHOWN_STEPS = {"typical_p": "typ_p"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What an answer has beside its text. num_probs: alternatives of each token; 0: no
    log-probabilities. id_slot: as sent; -1 without one. response_fields: paths of the parts that
    the last object has; none for all. samplers: as listed; none for the order of llama.cpp."""

    num_probs: int = 0
    returns_tokens: bool = False
    id_slot: int = -1
    timings_per_token: bool = False
    streams: bool = False
    response_fields: tuple[str, ...] = ()
    samplers: tuple[str, ...] = ()


def read_sampling(request: GenerationRequest) -> tuple[SamplingParams, Returned]:
    """Return the parameters, and what the answer has. Raises InvalidParameter."""
    given, engine = request.given, request.engine
    returned = Returned(
        num_probs=_num_probs(given),
        returns_tokens=flag(given, "return_tokens"),
        id_slot=_whole(given, "id_slot", -1, -1, _MAX_SLOT),
        timings_per_token=flag(given, "timings_per_token"),
        streams=flag(given, "stream"),
        response_fields=_response_fields(given),
    )
    fields = {**given, **_own_forms(given)}
    if (limit := _limit(given)) is not None:
        fields["max_tokens"] = limit
    if limit == 0:  # the prompt is computed, and nothing is generated
        fields["prompt_logprobs"] = 0
    if given.get("seed") in _ANY_SEEDS:
        del fields["seed"]
    listed = sampler_names(given.get("samplers"))
    if isinstance(listed, list):
        off, listed = _sampler_fields(request, listed)
        fields = {**fields, **off, "samplers": listed}
    defaults = engine.default_sampling()
    sampling = sampling_of(
        fields,
        defaults,
        logprobs=returned.num_probs or None,
        tokenizer=engine.tokenizer,
    )
    if sampling.repeat_last_n is None and has_penalties(sampling):
        sampling = replace(sampling, repeat_last_n=REPEAT_LAST_N)
    if not listed and not (ORDERS.keys() - {"samplers"}) & given.keys():
        sampling = with_order(LLAMA_CPP_ORDER, sampling)
    if not listed and defaults.samplers:
        listed = shown_order(sampling)
    return sampling, replace(returned, samplers=tuple(listed or ()))


def shown_order(sampling: SamplingParams) -> list[str]:
    """Return the order that the model's files have by llama.cpp's names; none without one."""
    named = [_SHOWN_STEPS.get(step, step) for step in sampling.samplers]
    return ["penalties", "dry", *named] if named else []


def as_named_here(error: InvalidParameter, given: Mapping[str, Any]) -> InvalidParameter:
    """Return an error with the names that the fields have in this API."""
    if error.param == "max_tokens" and "n_predict" in given:
        return InvalidParameter(str(error).replace("max_tokens", "n_predict"), param="n_predict")
    return error


def _limit(given: Mapping[str, Any]) -> Any:
    """Return the largest number of tokens; None for the rest of the context."""
    if "n_predict" not in given:
        return given.get("max_tokens")
    limit = given["n_predict"]
    if "max_tokens" in given and given["max_tokens"] != limit:
        raise InvalidParameter(
            f"n_predict is {show(limit)} and max_tokens is {show(given['max_tokens'])}; they mean "
            "the same: give one",
            param="n_predict",
        )
    return None if limit in _NO_LIMIT and not isinstance(limit, bool) else limit


def _num_probs(given: Mapping[str, Any]) -> int:
    """Return the alternatives of each token; some programs send their number under two names."""
    found = [_whole(given, name, 0, 0, MAX_TOP_LOGPROBS) for name in ("n_probs", "logprobs")]
    if "n_probs" in given and "logprobs" in given and found[0] != found[1]:
        raise InvalidParameter(
            f"n_probs is {found[0]} and logprobs is {found[1]}; they mean the same: give one",
            param="n_probs",
        )
    return max(found)


def _whole(given: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise InvalidParameter(
            f"{name} is {show(value)}; a whole number from {least} to {most} is allowed", param=name
        )
    return value


def _own_forms(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have another form or default in this API than in others."""
    changed: dict[str, Any] = {}
    if isinstance(biases := given.get("logit_bias"), dict):  # keys are ids, or texts
        changed["logit_bias"] = [[_id_or_text(key), bias] for key, bias in biases.items()]
    if given.get("dry_multiplier") and "dry_penalty_last_n" not in given:
        changed["dry_penalty_last_n"] = DRY_LAST_N
    stop = given.get("stop")
    if stop == "" or (isinstance(stop, list) and "" in stop):
        changed["stop"] = [text for text in stop if text != ""]
    temperature = given.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        changed["temperature"] = 0
    return changed


def _id_or_text(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS else key


def _sampler_fields(
    request: GenerationRequest, listed: list[Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the parameters of samplers that a list leaves out, which are off, and the others."""
    known = [name for name in listed if name != _INFILL]
    if len(known) < len(listed):
        request.context.ignore(f"samplers.{_INFILL}")
    names = [name for name in known if isinstance(name, str)]
    is_ordered = listed and not request.given.get("mirostat")  # which has no use for the list
    return neutral_unlisted("samplers", names) if is_ordered else {}, known


def _response_fields(given: Mapping[str, Any]) -> tuple[str, ...]:
    paths = given.get("response_fields", [])
    if (
        not isinstance(paths, list)
        or len(paths) > MAX_RESPONSE_FIELDS
        or not all(isinstance(path, str) for path in paths)
    ):
        raise InvalidParameter(
            f"response_fields is {show(paths)}; a list of up to {MAX_RESPONSE_FIELDS} names of "
            'parts of the answer is allowed, such as "content" and "timings/prompt_n"',
            param="response_fields",
        )
    return tuple(paths)

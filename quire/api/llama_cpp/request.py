"""Read the fields of llama.cpp's native routes as those of the neutral code.

Always holds: a field is honoured, without effect by its nature, or refused by name; `id_slot` is
checked and has no effect, since tokens do not depend on the place of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.api.generation.fields import flag, sampling_of
from quire.api.generation.generate import GenerationRequest
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import MAX_TOP_LOGPROBS
from quire.base.sampling_params import SamplingParams
from quire.base.show import show

# Values of n_predict without a limit of their own.
_NO_LIMIT = (-1, -2)
_ANY_SEED = -1
_MAX_SLOT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What an answer has beside its text. num_probs: alternatives of each token; 0: no
    log-probabilities. id_slot: as sent; -1 without one."""

    num_probs: int = 0
    returns_tokens: bool = False
    id_slot: int = -1
    timings_per_token: bool = False
    streams: bool = False


def read_sampling(request: GenerationRequest) -> tuple[SamplingParams, Returned]:
    """Return the parameters, and what the answer has. Raises InvalidParameter."""
    given, engine = request.given, request.engine
    returned = Returned(
        num_probs=_whole(given, "n_probs", 0, 0, MAX_TOP_LOGPROBS),
        returns_tokens=flag(given, "return_tokens"),
        id_slot=_whole(given, "id_slot", -1, -1, _MAX_SLOT),
        timings_per_token=flag(given, "timings_per_token"),
        streams=flag(given, "stream"),
    )
    fields = dict(given)
    if (limit := _limit(given)) is not None:
        fields["max_tokens"] = limit
    if limit == 0:  # the prompt is computed, and nothing is generated
        fields["prompt_logprobs"] = 0
    if given.get("seed") == _ANY_SEED:
        del fields["seed"]
    sampling = sampling_of(
        fields,
        engine.default_sampling(),
        logprobs=returned.num_probs or None,
        tokenizer=engine.tokenizer,
    )
    _check_window(given, sampling)
    return sampling, returned


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


def _whole(given: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise InvalidParameter(
            f"{name} is {show(value)}; a whole number from {least} to {most} is allowed", param=name
        )
    return value


def _check_window(given: Mapping[str, Any], sampling: SamplingParams) -> None:
    """Refuse a window of the penalties that is smaller than the context, if one is on."""
    window = given.get("repeat_last_n", -1)
    if type(window) is not int or window < -1:
        raise InvalidParameter(
            f"repeat_last_n is {show(window)}; a whole number from -1 is allowed",
            param="repeat_last_n",
        )
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if window != -1 and penalties != (1.0, 0.0, 0.0):
        raise InvalidParameter(
            f"repeat_last_n is {show(window)}: penalties cover the whole context; write -1, or "
            "switch the penalties off",
            param="repeat_last_n",
        )

"""Fields of chats that few requests have: labels, log-probabilities, the newer name of max_tokens.

Not entered by a plain chat. Always holds: a value is returned checked, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.api.generation.fields import flag
from quire.api.generation.foreign_fields import check_unserved
from quire.api.openai.metadata import checked_metadata
from quire.base.errors import InvalidParameter
from quire.base.parameter_checks import whole
from quire.base.sampling_checks import ALL_LOGPROBS, MAX_TOP_LOGPROBS
from quire.base.show import show

LOGPROBS = frozenset({"logprobs", "top_logprobs"})
# Fields that an answer repeats.
LABELS = frozenset({"service_tier", "metadata"})
# In place of a limit, as the pages of llama.cpp and LM Studio send it: the rest of the context.
NO_LIMIT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedFields:
    """Optional fields of a chat's answer. prompt_ids: of the prompt, if token ids are returned.
    num_prompt_top: alternatives of each prompt token; None for no log-probabilities of it.
    names_ids: log-probabilities name tokens by their ids. labels: of LABELS. echo: a text before
    the answer's."""

    logprobs: bool = False
    all_logprobs: bool = False
    num_prompt_top: int | None = None
    prompt_ids: Sequence[int] | None = None
    names_ids: bool = False
    num_choices: int = 1
    labels: Mapping[str, Any] = field(default_factory=dict)
    echo: str = ""


def echoed_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of an answer: the one tier if one was asked for, and metadata as sent."""
    labels: dict[str, Any] = {}
    if "service_tier" in given:
        check_unserved("service_tier", given["service_tier"])
        labels["service_tier"] = "default"
    if "metadata" in given:
        labels["metadata"] = checked_metadata(given["metadata"])
    return labels


def max_tokens_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return max_tokens from its newer name; both may be given if they agree. NO_LIMIT is none."""
    newer = given.get("max_completion_tokens", given.get("max_tokens"))
    if given.get("max_tokens", newer) != newer:
        raise InvalidParameter(
            f"max_completion_tokens is {show(newer)} and max_tokens is "
            f"{show(given['max_tokens'])}; they mean the same: give one",
            param="max_completion_tokens",
        )
    if newer == NO_LIMIT and type(newer) is int:
        return {"max_tokens": None}
    if "max_completion_tokens" not in given:
        return {}  # checked under its own name
    smallest = 0 if "prompt_logprobs" in given else 1
    return {"max_tokens": whole("max_completion_tokens", newer, smallest, 2**31 - 1)}


def num_top_of(given: Mapping[str, Any]) -> int | None:
    """Return the alternatives of each token; None for no log-probabilities."""
    wants_logprobs, num_top = flag(given, "logprobs"), given.get("top_logprobs")
    if num_top is None:
        return 0 if wants_logprobs else None
    is_whole = isinstance(num_top, int) and not isinstance(num_top, bool)
    if not is_whole or not ALL_LOGPROBS <= num_top <= MAX_TOP_LOGPROBS:
        raise InvalidParameter(
            f"top_logprobs is {show(num_top)}; a whole number from 0 to {MAX_TOP_LOGPROBS} is "
            "allowed, or -1 for the whole vocabulary",
            param="top_logprobs",
        )
    if not wants_logprobs and num_top != 0:
        raise InvalidParameter(
            f"top_logprobs is {num_top} without logprobs: true; add it", param="top_logprobs"
        )
    return num_top if wants_logprobs else None

"""From request fields to SamplingParams, and how many tokens a request may make.

What the request leaves open comes from the model's generation_config.json, then from OpenAI's
defaults. Values are checked by SamplingParams itself; here only the JSON's shapes are undone
(a stop string alone, logit_bias with text keys) and the limits of this server applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from quire.api.generation.fields import SAMPLING, flag
from quire.api.generation.grammar_fields import grammar_asked_for
from quire.base.errors import InvalidParameter
from quire.base.sampling_params import MAX_LOGIT_BIAS, SamplingParams, random_seed
from quire.base.show import show

# OpenAI's default for completions; chats default to the rest of the context.
COMPLETION_TOKENS = 16
_MAX_ID_DIGITS = 10


def sampling_of(
    given: Mapping[str, Any], defaults: SamplingParams, *, logprobs: int | None
) -> SamplingParams:
    """The parameters a request asks for: with a seed, but no max_tokens where it names none.

    Raises InvalidParameter naming the field.
    """
    fields: dict[str, Any] = {name: given[name] for name in SAMPLING & given.keys()}
    for name in ("ignore_eos", "include_stop_str_in_output"):
        fields[name] = flag(given, name)
    fields["skip_special_tokens"] = flag(given, "skip_special_tokens", default=True)
    if "stop" in fields:
        fields["stop"] = _stops(fields["stop"])
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = _listed("stop_token_ids", fields["stop_token_ids"])
    if "logprob_token_ids" in fields:
        fields["logprob_token_ids"] = _listed("logprob_token_ids", fields["logprob_token_ids"])
        if fields["logprob_token_ids"] and logprobs is None:
            raise InvalidParameter(
                "logprob_token_ids is given without logprobs; add logprobs (0 for completions, "
                "true for chats)",
                param="logprob_token_ids",
            )
    if isinstance(fields.get("dry_sequence_breakers"), str):
        fields["dry_sequence_breakers"] = _list_in_text(fields["dry_sequence_breakers"])
    fields["structured_outputs"] = grammar_asked_for(given)
    if "logit_bias" in fields:
        fields["logit_bias"] = _biases(fields["logit_bias"])
    fields.setdefault("seed", random_seed())
    return defaults.changed(logprobs=logprobs, **fields)


def limited(
    sampling: SamplingParams, *, default_tokens: int, room_tokens: int, cap_tokens: int | None
) -> SamplingParams:
    """`sampling` with max_tokens: what was asked for, else the least of default, room and cap.

    More than the server's cap is refused, not cut. What was asked for beyond the room in the
    context is left as it is: the engine refuses it with both numbers.
    """
    if sampling.max_tokens is not None:
        if cap_tokens is not None and sampling.max_tokens > cap_tokens:
            raise InvalidParameter(
                f"max_tokens is {sampling.max_tokens}; this server makes at most {cap_tokens} "
                "tokens a request (--max-output-tokens); ask for fewer",
                param="max_tokens",
            )
        return sampling
    limit = min(default_tokens, room_tokens)
    if cap_tokens is not None:
        limit = min(limit, cap_tokens)
    if limit < 1:  # no room at all: the engine refuses the prompt with both numbers
        return sampling
    if sampling.min_tokens > limit:
        raise InvalidParameter(
            f"min_tokens is {sampling.min_tokens}, more than the {limit} tokens this request may "
            "make; lower it, or ask for more with max_tokens",
            param="min_tokens",
        )
    return replace(sampling, max_tokens=limit)


def completion_tokens(sampling: SamplingParams) -> int:
    """How many tokens a completion may make where the request's own word is all that counts."""
    return COMPLETION_TOKENS if sampling.max_tokens is None else sampling.max_tokens


def _stops(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else _listed("stop", value)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidParameter(f"{name} is {show(value)}; a list is allowed", param=name)
    return tuple(value)


def _list_in_text(text: str) -> Any:
    """Return the list that `text` holds as JSON, as text clients send it; else the text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError):
        return text
    return tuple(value) if isinstance(value, list) else text


def _biases(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise InvalidParameter(
            f"logit_bias is {show(value)}; an object of token ids and numbers is allowed",
            param="logit_bias",
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidParameter(
            f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed",
            param="logit_bias",
        )
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS
        if not is_id or int(key) in biases:
            raise InvalidParameter(
                f"logit_bias has the key {show(key)}; each key must be one token id, as in "
                '"50256", given once',
                param="logit_bias",
            )
        biases[int(key)] = bias
    return biases

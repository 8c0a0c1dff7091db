"""The request fields of each route, sorting a body by them, and sampling fields as parameters.

A field that would change the answer is honoured or refused. null means "not given", for any name.
foreign_fields.py lists what other servers and clients send: exact synonyms are renamed, fields that
cannot change the answer are accepted, hints are accepted and reported. Any other name is refused,
or, with unknown_fields="warn", ignored and reported. Sampling fields that a request leaves out come
from the model's generation_config.json, then from OpenAI's defaults; SamplingParams checks values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import msgspec

from quire.api.generation.foreign_fields import (
    EMPTY_SYNONYMS,
    HINTS,
    NO_EFFECT,
    OTHER_NAMES,
    SYNONYMS,
    UNSERVED,
    same_json,
)
from quire.api.generation.grammar_fields import grammar_asked_for
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import MAX_LOGIT_BIAS
from quire.base.sampling_params import SamplingParams, random_seed
from quire.base.show import show

# OpenAI's default for completions; chats default to the rest of the context.
COMPLETION_TOKENS = 16
_MAX_ID_DIGITS = 10

SAMPLING = frozenset(
    {
        "n",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "prompt_logprobs",
        "logprob_token_ids",
        "typical_p",
        "top_n_sigma",
        "epsilon_cutoff",
        "eta_cutoff",
        "xtc_probability",
        "xtc_threshold",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "no_repeat_ngram_size",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "bad_words",
        "allowed_token_ids",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "structured_outputs",
    }
)
# Scheduling fields; no token depends on them.
SCHEDULING = frozenset(
    {
        "priority",
        "deadline_ms",
        "ttft_slo_ms",
        "tpot_slo_ms",
        "return_cached_tokens_details",
    }
)
_EVERYWHERE = (
    SAMPLING
    | SCHEDULING
    | {
        "model",
        "stream",
        "stream_options",
        "logprobs",
        "cache_salt",
        "truncate_prompt_tokens",
        "return_timings",
        "timings",
        "timings_per_token",
        "return_progress",
    }
)
# Routes with texts as answers.
_TEXTS = _EVERYWHERE | {"add_special_tokens", "response_format", "return_token_ids"}
COMPLETIONS = _TEXTS | {"prompt", "echo", "suffix"}
# Fields beside messages that change the prompt.
_TEMPLATE = frozenset(
    {
        "tools",
        "tool_choice",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
    }
)
_CHAT_ONLY = {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "parallel_tool_calls",
    "include_reasoning",
}
CHAT = _TEXTS | _TEMPLATE | _CHAT_ONLY
# Token ids in and out: no fields of texts.
GENERATE = (_EVERYWHERE - {"logprob_token_ids"}) | {"tokens"}
CONVERSATION = _TEMPLATE | {"messages"}
TOKENIZE = CONVERSATION | {"model", "prompt", "add_special_tokens", "return_token_strs"}
DETOKENIZE = frozenset({"model", "tokens", "skip_special_tokens"})
APPLY_TEMPLATE = CONVERSATION | {"model"}

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "object": dict,
    "number": (int, float),
    "boolean": bool,
}


def known_fields(
    body: Mapping[str, Any], honoured: frozenset[str], *, warn_unknown: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the honoured fields that were given, and the names that are ignored.

    Hints are ignored, and unknown names with warn_unknown. Raises InvalidParameter naming a field
    that is not served or not known, with its value.
    """
    given: dict[str, Any] = {}
    ignored: list[str] = []
    synonyms: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in honoured:
            given[name] = value
        elif name in SYNONYMS and SYNONYMS[name][0] in honoured:
            synonyms[name] = value
        elif name in UNSERVED:
            _check_unserved(name, value, body)
        elif name in NO_EFFECT:
            _check_type(name, value)
        elif name in HINTS:
            if not any(same_json(value, neutral) for neutral in HINTS[name]):
                ignored.append(name)
        elif warn_unknown:
            ignored.append(name)
        else:
            raise _unknown(name, honoured)
    for name, value in synonyms.items():
        if not any(same_json(value, empty) for empty in EMPTY_SYNONYMS.get(name, ())):
            _rename(name, value, given)
    return given, tuple(ignored)


def ignored_header(names: tuple[str, ...]) -> str:
    """Return the names as a header value: printable ASCII, bounded."""
    shown = [name.encode("ascii", "backslashreplace").decode()[:64] for name in names[:32]]
    return ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in shown)


def flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean field, or `default` if it was not given."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} is {show(value)}; true or false is allowed", param=name)
    return value


def _rename(name: str, value: Any, given: dict[str, Any]) -> None:
    """Store the value of a synonym under the field that it stands for.

    Raises InvalidParameter if both are given and differ.
    """
    field, *keys = SYNONYMS[name]
    target, key = given, field
    if keys:
        inner = given.get(field, {})
        if not isinstance(inner, dict):
            return  # the check of the field itself refuses it
        target = given[field] = dict(inner)
        [key] = keys
    if not same_json(target.setdefault(key, value), value):
        raise InvalidParameter(
            f"{name} is {show(value)} and {'.'.join((field, *keys))} is {show(target[key])}; they "
            "mean the same: give one",
            param=name,
        )


def _check_type(name: str, value: Any) -> None:
    kind = NO_EFFECT[name]
    if isinstance(value, bool) != (kind == "boolean") or not isinstance(value, _TYPES[kind]):
        words = f"an {kind}" if kind == "object" else f"a {kind}"
        raise InvalidParameter(f"{name} is {show(value)}; {words} is allowed", param=name)


def _check_unserved(name: str, value: Any, body: Mapping[str, Any]) -> None:
    rule = UNSERVED[name]
    if any(same_json(value, allowed) for allowed in rule.allowed):
        return
    if rule.unless is not None:
        neutral, other, of_other = rule.unless
        if same_json(value, neutral) and same_json(body.get(other), of_other):
            return
    allowed = " or ".join(["null", *map(show, rule.allowed)])
    raise InvalidParameter(
        f"{name} is {show(value)}: {rule.why}; leave it out ({allowed} is accepted)", param=name
    )


def _unknown(name: str, honoured: frozenset[str]) -> InvalidParameter:
    other = OTHER_NAMES.get(name) or SYNONYMS.get(name, ("",))[0]
    near = [other] if other in honoured else get_close_matches(name[:64], honoured, 1)
    hint = f"did you mean {show(near[0])}? " if near else ""
    return InvalidParameter(
        f"{show(name)} is not a field of this request; {hint}leave it out, or start the server "
        "with --unknown-fields warn",
        param=name[:64],
    )


def sampling_of(
    given: Mapping[str, Any], defaults: SamplingParams, *, logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a request: with a seed, but no max_tokens unless given.

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
    if "structured_outputs" in given or "response_format" in given:
        fields["structured_outputs"] = grammar_asked_for(given)
    if "logit_bias" in fields:
        fields["logit_bias"] = _biases(fields["logit_bias"])
    fields.setdefault("seed", random_seed())
    return defaults.changed(logprobs=logprobs, **fields)


def limited(
    sampling: SamplingParams, *, default_tokens: int, room_tokens: int, cap_tokens: int | None
) -> SamplingParams:
    """Return `sampling` with max_tokens: the request's, else the least of default, room and cap.

    More than the server's cap is refused, not cut. More than the context has room for is left
    unchanged: the engine refuses it with both numbers.
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
    """Return the output tokens of a completion by its request alone."""
    return COMPLETION_TOKENS if sampling.max_tokens is None else sampling.max_tokens


def _stops(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else _listed("stop", value)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidParameter(f"{name} is {show(value)}; a list is allowed", param=name)
    return tuple(value)


def _list_in_text(text: str) -> Any:
    """Return the list that `text` holds as JSON, as some clients send it; else the text."""
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

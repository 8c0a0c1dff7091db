"""The fields each route honours, and how the fields of a body are sorted by name.

A field that would change the answer is honoured or refused. null means "not given", for any name.
What other servers and clients send is in foreign_fields.py: exact synonyms are renamed, fields that
cannot change the answer are accepted, hints are accepted and reported. Any other name is refused,
or, with unknown_fields="warn", left out and reported. Values are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from quire.api.generation.foreign_fields import (
    EMPTY_SYNONYMS,
    HINTS,
    NO_EFFECT,
    OTHER_NAMES,
    SYNONYMS,
    UNSERVED,
    same_json,
)
from quire.base.errors import InvalidParameter
from quire.base.show import show

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
# On what terms a request is served; no token depends on them.
TERMS = frozenset(
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
    | TERMS
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
# Where answers are texts.
_TEXTS = _EVERYWHERE | {"add_special_tokens", "response_format", "return_token_ids"}
COMPLETIONS = _TEXTS | {"prompt", "echo", "suffix"}
# What goes with messages and shapes the prompt.
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
# Token ids in and out: nothing that is said of texts.
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
    """Return the honoured fields that were given, and the names left out.

    Names are left out where they are hints, or unknown with warn_unknown. Raises InvalidParameter
    naming a field that is not served or not known, with its value.
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
    """The names as a header value: printable ASCII, bounded."""
    shown = [name.encode("ascii", "backslashreplace").decode()[:64] for name in names[:32]]
    return ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in shown)


def flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A boolean field, `default` where it was not given."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} is {show(value)}; true or false is allowed", param=name)
    return value


def _rename(name: str, value: Any, given: dict[str, Any]) -> None:
    """Put the value of a synonym where the field that it stands for has it.

    Raises InvalidParameter where both are given and differ.
    """
    field, *keys = SYNONYMS[name]
    target, key = given, field
    if keys:
        inner = given.get(field, {})
        if not isinstance(inner, dict):
            return  # refused where the field itself is read
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

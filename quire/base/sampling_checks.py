"""Limits of sampling parameters, and the checks of the fields that few requests name.

Takes and returns fields by name: SamplingParams (sampling_params.py) keeps them. Knows nothing of
logits or HTTP. Always holds: what comes back has the types of the fields and lies within the
limits, and no two fields contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, grammar_of
from quire.base.parameter_checks import MAX_TOKEN_ID, number, texts, token_ids, whole
from quire.base.show import show

MAX_N = 128
MAX_TOP_LOGPROBS = 20
ALL_LOGPROBS = -1  # in place of a number of alternatives: those of the whole vocabulary
MAX_LOGPROB_TOKEN_IDS = 1_024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_PATTERNS = 4
MAX_STOP_PATTERN_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1_024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 32_768
MAX_DRY_BREAKERS = 32
MAX_DRY_BREAKER_CHARS = 40
# Repeats are followed back over so many tokens, so that a step is linear in the history.
MAX_REPEAT_TOKENS = 50
MAX_TEMPERATURE = 100.0
# Below, the noise could not turn a difference that f32 shows: such temperatures are 0.
SMALLEST_TEMPERATURE = 2.0**-40
MAX_SEED = 2**63 - 1
# Below, logits that are divided by it leave the range of f32, and of sense long before.
MIN_REPETITION_PENALTY = 0.01
EARLY_STOPPING = (True, False, "never")
# How the final hidden rows of a prompt become one vector.
POOLING = ("last", "mean")
_BEAMS_ONLY: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}

# The filters of token choice, with the values that keep every token.
FILTERS_OFF: Mapping[str, float] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "xtc_probability": 0.0,
}
STEPS_OFF: Mapping[str, float] = {"temperature": 1.0, **FILTERS_OFF}
# The steps that may have an order of their own, with the fields that switch them on.
SAMPLERS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_n_sigma", "min_p", "top_k", "typical_p")},
    **{name: name for name in ("top_p", "epsilon_cutoff", "eta_cutoff")},
    "xtc": "xtc_probability",
}
# What must be off beside mirostat, and beside beams, which are found, not drawn. A caller that asks
# for one of them gets these where it names no others: a model's own defaults must not forbid it.
MIROSTAT_OFF: Mapping[str, Any] = {**FILTERS_OFF, "samplers": ()}
BEAMS_OFF: Mapping[str, Any] = {"temperature": 0.0, **FILTERS_OFF, "mirostat": 0, "samplers": ()}
EXCLUDING = frozenset({"mirostat", "use_beam_search"})
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_beam_search")
MAY_BE_NONE = frozenset(
    {"seed", "max_tokens", "logprobs", "prompt_logprobs", "best_of", "repeat_last_n"}
)
WHOLE_NUMBERS = (
    ("n", 1, MAX_N),
    ("best_of", 1, MAX_N),
    ("top_k", -1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("seed", -(2**63), MAX_SEED),
    ("max_tokens", 0, 2**31 - 1),
    ("logprobs", ALL_LOGPROBS, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", ALL_LOGPROBS, MAX_TOP_LOGPROBS),
    ("dry_allowed_length", 1, MAX_REPEAT_TOKENS),
    ("repeat_last_n", -1, 2**31 - 1),
    ("dry_penalty_last_n", -1, 2**31 - 1),
    ("no_repeat_ngram_size", 0, MAX_REPEAT_TOKENS),
    ("mirostat", 0, 2),
)
MUST_BE_ABOVE = frozenset({"typical_p"})
NUMBERS = (
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("typical_p", 0.0, 1.0),
    ("top_n_sigma", -1.0, 100.0),
    ("epsilon_cutoff", 0.0, 1.0),
    ("eta_cutoff", 0.0, 1.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 100.0),
    ("mirostat_tau", 0.0, 100.0),
    ("mirostat_eta", 0.0, 10.0),
    ("length_penalty", -10.0, 10.0),
)

# Fields that requests and models' defaults often name; SamplingParams checks them itself.
USUAL = frozenset(
    {"n", "temperature", "top_k", "top_p", "seed", "max_tokens", "min_tokens", "logprobs"}
)
USUAL_WHOLE_NUMBERS = tuple(row for row in WHOLE_NUMBERS if row[0] in USUAL)
USUAL_NUMBERS = tuple(row for row in NUMBERS if row[0] in USUAL)


# Names of other libraries, with what there is here.
_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "num_predict", "n_predict", "max_gen_len"),
        "write max_tokens",
    ),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "write repetition_penalty"),
    **dict.fromkeys(("temp", "t"), "write temperature"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "write stop"),
    **dict.fromkeys(
        ("guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        'write structured_outputs={"json": schema}, or regex, choice or grammar',
    ),
    "response_format": 'write structured_outputs={"json": schema}',
    "do_sample": "temperature=0 always takes the most likely token",
    "num_beams": "write use_beam_search=True, best_of=NUM, temperature=0",
    "num_return_sequences": "write n",
    "random_seed": "write seed",
    "detokenize": "answers have text and token_ids; leave it out",
    "spaces_between_special_tokens": "leave it out",
    "output_kind": "AsyncLLM streams, LLM returns whole answers; leave it out",
    "truncate_prompt_tokens": "give a prompt as token ids, and cut those",
    "logits_processors": "no code runs between the tokens; logit_bias, bad_words, "
    "allowed_token_ids and structured_outputs say what may be chosen",
    "priority": "write terms=SchedulingParams(priority=...) beside it (quire.base."
    "scheduling_params)",
}


def unknown_fields(
    values: Sequence[object], named: Mapping[str, object], known: Iterable[str]
) -> TypeError:
    """Return the error of SamplingParams for values without a name, or names that it lacks."""
    if values:
        return TypeError(
            f"SamplingParams takes its fields by name, not {show(values[0])}; write "
            "SamplingParams(temperature=0.7), or **fields for a dict"
        )
    known = list(known)
    parts = []
    for name in named.keys() - set(known):
        near = get_close_matches(name[:60], known, 1)
        hint = _OTHER_NAMES.get(name) or (f"did you mean {near[0]!r}?" if near else "leave it out")
        parts.append(f"{name!r} is not a field of SamplingParams; {hint}")
    return TypeError("; ".join(sorted(parts)))


def yielded(defaults: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that give way to the fields a caller names, at the values they then have.

    defaults: all fields of a SamplingParams. named: not checked yet. Beams and mirostat exclude
    filters; a filter or temperature 0 excludes a default mirostat, temperature 0 a default XTC. A
    step that a default order does not name comes after the others.
    """
    if named.get("use_beam_search") is True:
        return dict(BEAMS_OFF)
    if named.get("mirostat") in (1, 2):
        return dict(MIROSTAT_OFF)
    changed: dict[str, Any] = {}
    steps = [step for step, field in SAMPLERS.items() if not _is_off(field, named)]
    if any(step != "temperature" for step in steps) or named.get("samplers"):
        changed["mirostat"] = 0
    temperature = named.get("temperature")
    if isinstance(temperature, int | float) and temperature < SMALLEST_TEMPERATURE:
        changed |= {"mirostat": 0, "xtc_probability": 0.0}
    if defaults["samplers"]:
        changed["samplers"] = tuple(dict.fromkeys([*defaults["samplers"], *steps]))
    return changed


def _is_off(field: str, values: Mapping[str, Any]) -> bool:
    """Return whether the step of a field is off, at its value or without one."""
    off = STEPS_OFF[field]
    value = values.get(field, off)
    return bool(value == off) or (field == "top_k" and value == -1)


def checked_rare_fields(
    given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Check the fields outside of USUAL and FLAGS and all combinations; return the fields that have
    another value or type then.

    given: all fields of a SamplingParams; those of USUAL and FLAGS are checked already, and so are
    `defaults`. Raises InvalidParameter naming a field.
    """
    values = dict(given)
    named = {
        name
        for name, off in defaults.items()
        if name not in USUAL and (type(values[name]) is not type(off) or values[name] != off)
    }
    for name, low, high in WHOLE_NUMBERS:
        if name in named and (values[name] is not None or name not in MAY_BE_NONE):
            values[name] = whole(name, values[name], low, high)
    for name, least, most in NUMBERS:
        if name in named:
            open_low = name in MUST_BE_ABOVE
            values[name] = number(name, values[name], least, most, open_low=open_low)
    if values["top_n_sigma"] < 0:  # off, as in llama.cpp
        values["top_n_sigma"] = 0.0
    for name, check in _FORMS.items():
        if name in named:
            values[name] = check(values[name])
    if values["logprob_token_ids"]:
        values["logprobs"] = _beside_listed(values["logprobs"])
    values["samplers"] = _samplers(values)
    _check_mirostat_and_xtc(values)
    _check_best_of(values)
    _check_beams(values)
    _check_pooling(values)
    if values["max_tokens"] == 0:
        _check_no_output(values)
    return [(name, value) for name, value in values.items() if value is not given[name]]


def _beside_listed(logprobs: int | None) -> int:
    """Return `logprobs` as it is beside logprob_token_ids."""
    if logprobs == ALL_LOGPROBS:
        raise InvalidParameter(
            "logprobs is -1 (the whole vocabulary) and logprob_token_ids is given, a part of it; "
            "leave one out",
            param="logprob_token_ids",
        )
    return logprobs or 0


def _grammar(value: Any) -> Grammar | None:
    """Return a grammar as it is, or the one that an object of vLLM's form is."""
    return value if isinstance(value, Grammar | None) else grammar_of(value)


def _logit_bias(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise InvalidParameter(
            f"logit_bias is {show(biases)}; token ids with their numbers are allowed",
            param="logit_bias",
        )
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidParameter(
            f"logit_bias has {len(biases)} entries; at most {MAX_LOGIT_BIAS} are allowed",
            param="logit_bias",
        )
    return {
        whole("logit_bias", token_id, 0, MAX_TOKEN_ID, is_entry=True): _bias(token_id, bias)
        for token_id, bias in biases.items()
    }


def _bias(token_id: Any, bias: Any) -> float:
    """Return a bias as a float; minus infinity bans the token."""
    if isinstance(bias, float) and bias == -math.inf:
        return bias
    try:
        return number("logit_bias", bias, -100.0, 100.0)
    except InvalidParameter:
        raise InvalidParameter(
            f"logit_bias of token {show(token_id)} is {show(bias)}; a finite number from -100.0 to "
            "100.0 is allowed",
            param="logit_bias",
        ) from None


def _bad_words(words: Any) -> tuple[str, ...]:
    bad_words = texts("bad_words", words, most=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS)
    if blank := next((word for word in bad_words if not word.strip()), None):
        raise InvalidParameter(
            f"bad_words holds {show(blank)}, which is white space only; give words",
            param="bad_words",
        )
    return bad_words


def _breakers(breakers: Any) -> tuple[str, ...]:
    if isinstance(breakers, str):
        raise InvalidParameter(
            f"dry_sequence_breakers is the text {show(breakers)}; a list of strings is allowed (a "
            "list written as a text, as some programs send it, is not read)",
            param="dry_sequence_breakers",
        )
    return texts(
        "dry_sequence_breakers", breakers, most=MAX_DRY_BREAKERS, max_chars=MAX_DRY_BREAKER_CHARS
    )


def _allowed_ids(ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    allowed = token_ids("allowed_token_ids", ids, most=MAX_ALLOWED_TOKEN_IDS)
    if not allowed:
        raise InvalidParameter(
            "allowed_token_ids is an empty list, so nothing could be chosen; give at least "
            "one id, or leave it out to allow all",
            param="allowed_token_ids",
        )
    return tuple(dict.fromkeys(allowed)) if len(set(allowed)) < len(allowed) else allowed


def _samplers(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the order of samplers, which names each step that is on."""
    given = values["samplers"]
    names = list(given) if isinstance(given, list | tuple) else [given]
    for name in names:
        if not isinstance(name, str) or name not in SAMPLERS:
            raise InvalidParameter(
                f"samplers holds {show(name)}; a list of {', '.join(SAMPLERS)} is allowed",
                param="samplers",
            )
    if len(set(names)) < len(names):
        raise InvalidParameter(
            f"samplers is {show(names)}, which names a step twice; name each once", param="samplers"
        )
    for name, field in SAMPLERS.items():
        if names and name not in names and not _is_off(field, values):
            raise InvalidParameter(
                f"samplers does not name {name}, and {field} is {values[field]}; add it, or set "
                f"{field} to {STEPS_OFF[field]}",
                param="samplers",
            )
    return tuple(names)


def _check_mirostat_and_xtc(values: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for fields that mirostat and XTC exclude."""
    if values["mirostat"] and values["samplers"]:
        raise InvalidParameter(
            f"mirostat is {values['mirostat']} and samplers is given; mirostat alone decides which "
            "tokens are kept, after the temperature: leave samplers out, or set mirostat to 0",
            param="samplers",
        )
    if values["mirostat"]:
        for name, off in FILTERS_OFF.items():
            if values[name] > 0 and values[name] != off:
                raise InvalidParameter(
                    f"mirostat is {values['mirostat']} and {name} is {values[name]}; mirostat "
                    f"alone decides which tokens are kept: set {name} to {off}, or mirostat to 0",
                    param="mirostat",
                )
    if values["temperature"] < SMALLEST_TEMPERATURE:
        for name in ("mirostat", "xtc_probability"):
            if values[name]:
                raise InvalidParameter(
                    f"{name} is {values[name]} and temperature is {values['temperature']}, which "
                    f"always takes the likeliest token; raise temperature, or leave {name} out",
                    param=name,
                )


def _check_best_of(values: Mapping[str, Any]) -> None:
    n, best_of = values["n"], values["best_of"]
    if best_of is not None and best_of < n:
        raise InvalidParameter(
            f"best_of is {best_of} and n is {n}; best_of counts all sequences that are computed, "
            f"of which the n best are returned: raise it to at least {n}",
            param="best_of",
        )


def _check_pooling(values: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for fields that pooling excludes.

    pooling: "last", the final hidden row of the prompt's last token; "mean", the mean of all rows.
    """
    pooling = values["pooling"]
    if pooling is None:
        return
    if not isinstance(pooling, str) or pooling not in POOLING:
        raise InvalidParameter(
            f'pooling is {show(pooling)}; "last" or "mean" is allowed', param="pooling"
        )
    if values["max_tokens"] != 0:
        raise InvalidParameter(
            f"pooling is {pooling} and max_tokens is {values['max_tokens']}; a request that is "
            "pooled generates nothing: set max_tokens to 0",
            param="max_tokens",
        )
    if values["prompt_logprobs"] is not None:
        raise InvalidParameter(
            "pooling and prompt_logprobs are both given; send two requests",
            param="prompt_logprobs",
        )


def _check_no_output(values: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for fields that max_tokens 0 excludes."""
    if values["prompt_logprobs"] is None and values["pooling"] is None:
        raise InvalidParameter(
            "max_tokens is 0 and the prompt's log-probabilities are not asked for; a whole "
            f"number from 1 to {2**31 - 1} is allowed, or 0 with prompt_logprobs",
            param="max_tokens",
        )
    param = "n" if values["best_of"] is None else "best_of"
    if values[param] > 1:
        raise InvalidParameter(
            f"{param} is {values[param]} and max_tokens is 0; choices without tokens cannot "
            f"differ: leave {param} out",
            param=param,
        )
    if values["logprob_token_ids"]:
        raise InvalidParameter(
            "logprob_token_ids is given and max_tokens is 0; they come with generated tokens: set "
            "max_tokens to at least 1, or leave them out",
            param="logprob_token_ids",
        )


def _check_beams(values: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for fields that beam search excludes, and for its own without it."""
    given = values["early_stopping"]
    if not isinstance(given, bool | str) or given not in EARLY_STOPPING:
        raise InvalidParameter(
            f'early_stopping is {show(given)}; true, false or "never" is allowed',
            param="early_stopping",
        )
    if not values["use_beam_search"]:
        for name, off in _BEAMS_ONLY.items():
            if values[name] != off:
                raise InvalidParameter(
                    f"{name} is {show(values[name])} without use_beam_search: it "
                    "belongs to beam search; set use_beam_search, or leave it out",
                    param=name,
                )
        return
    if values["stop_regex"]:
        raise InvalidParameter(
            "stop_regex is given and use_beam_search is true; beams end by stop strings only: "
            "write the end as stop, or leave beam search out",
            param="stop_regex",
        )
    if values["logprobs"] == ALL_LOGPROBS:
        raise InvalidParameter(
            "logprobs is -1 (the whole vocabulary) and use_beam_search is true; with beams 0 to "
            f"{MAX_TOP_LOGPROBS} are allowed",
            param="logprobs",
        )
    for name, off in BEAMS_OFF.items():
        value = values[name]
        if value != off and not (name == "top_k" and value == -1):
            raise InvalidParameter(
                f"{name} is {show(value)} and use_beam_search is true; beams are found, not drawn: "
                f"set {name} to {show(off)}, or leave beam search out",
                param=name,
            )
    if values["max_tokens"] == 0:
        raise InvalidParameter(
            "max_tokens is 0 and use_beam_search is true; beams need tokens: set max_tokens to at "
            "least 1, or leave beam search out",
            param="max_tokens",
        )


# The checks of fields that are no numbers.
_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "stop": partial(texts, "stop", most=MAX_STOP_STRINGS, max_chars=MAX_STOP_STRING_CHARS),
    "stop_regex": partial(
        texts, "stop_regex", most=MAX_STOP_PATTERNS, max_chars=MAX_STOP_PATTERN_CHARS
    ),
    "stop_token_ids": partial(token_ids, "stop_token_ids", most=MAX_STOP_TOKEN_IDS),
    "logprob_token_ids": partial(token_ids, "logprob_token_ids", most=MAX_LOGPROB_TOKEN_IDS),
    "bad_words": _bad_words,
    "dry_sequence_breakers": _breakers,
    "allowed_token_ids": _allowed_ids,
    "logit_bias": _logit_bias,
    "structured_outputs": _grammar,
}

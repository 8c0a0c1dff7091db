"""The table of request fields: what is honoured, what is refused by name, what cannot matter.

A field that would change the answer is honoured or refused. null means "not given". A field we do
not serve is accepted at the value that asks for nothing (its documented default), and fields that
cannot change the answer are accepted at any value of their type. Any other name is refused, or,
with unknown_fields="warn", left out and reported. Knows nothing of values beyond this: they are
checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

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

# What other programs call fields of ours; told in the hint.
OTHER_NAMES = {
    "typical": "typical_p",
    "typ_p": "typical_p",
    "top_sigma": "top_n_sigma",
    "nsigma": "top_n_sigma",
    "dry_range": "dry_penalty_last_n",
    "dry_breakers": "dry_sequence_breakers",
    "mirostat_mode": "mirostat",
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
    "content": "prompt",
    "input": "prompt",
    "text": "prompt",
    "add_special": "add_special_tokens",
    "with_pieces": "return_token_strs",
    "ids": "tokens",
    "token_ids": "tokens",
    "input_ids": "tokens",
    "prompt_token_ids": "tokens",
    "conversation": "messages",
    "enable_thinking": "chat_template_kwargs",
    "reasoning": "reasoning_effort",
    "separate_reasoning": "include_reasoning",
    "thinking": "chat_template_kwargs",
    "banned_strings": "bad_words",
    "ban_eos_token": "ignore_eos",
    "add_bos_token": "add_special_tokens",
    "n_probs": "logprobs",
    "num_beams": "use_beam_search",
    "beam_width": "use_beam_search",
    "num_return_sequences": "n",
    "deadline": "deadline_ms",
    "ttft_slo": "ttft_slo_ms",
    "tpot_slo": "tpot_slo_ms",
}

# They label a request or steer a service around it; no token depends on them. Of what type they
# are, as OpenAI has it: another is a caller's mistake, told before it meets a server that minds.
LABELS: dict[str, type] = {
    "user": str,
    "metadata": dict,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict,
    "request_id": str,
}
NO_EFFECT = frozenset(LABELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """A field accepted only at values that ask for nothing, and why it is refused otherwise."""

    allowed: tuple[Any, ...]
    why: str


def _guided(form: str) -> Unserved:
    return Unserved(allowed=(), why=f'write it as structured_outputs: {{"{form}": ...}}')


_TAIL_FREE = "tail-free sampling is not served (min_p is like it)"
_ONE_TEMPERATURE = "a request has one temperature"
_WHOLE_HISTORY = "repetition_penalty looks at all tokens of prompt and answer"

UNSERVED: dict[str, Unserved] = {
    "store": Unserved(allowed=(False,), why="answers are not stored"),
    "service_tier": Unserved(allowed=("auto", "default"), why="there is one tier"),
    "guided_json": _guided("json"),
    "guided_regex": _guided("regex"),
    "guided_choice": _guided("choice"),
    "guided_grammar": _guided("grammar"),
    "guided_json_object": _guided("json_object"),
    "structural_tag": _guided("structural_tag"),
    "grammar": _guided("grammar"),
    "json_schema": _guided("json"),
    "functions": Unserved(allowed=([],), why="functions are given as tools"),
    "function_call": Unserved(
        allowed=("none", "auto"), why="which function is called is chosen by tool_choice"
    ),
    "modalities": Unserved(allowed=(["text"],), why="the model writes text only"),
    "audio": Unserved(allowed=(), why="the model writes text only"),
    "prediction": Unserved(allowed=(), why="predicted outputs are not served"),
    "moderation": Unserved(allowed=(), why="nothing is moderated here"),
    "web_search_options": Unserved(allowed=(), why="the server searches nothing"),
    "verbosity": Unserved(allowed=("medium",), why="the model has no verbosity to set"),
    # Other programs send these with every request, mostly off.
    "tfs": Unserved(allowed=(1, 1.0), why=_TAIL_FREE),
    "tfs_z": Unserved(allowed=(1, 1.0), why=_TAIL_FREE),
    "top_a": Unserved(allowed=(0, 0.0), why="top_a is not served (min_p is like it)"),
    "smoothing_factor": Unserved(allowed=(0, 0.0), why="quadratic sampling is not served"),
    "smoothing_curve": Unserved(allowed=(1, 1.0), why="quadratic sampling is not served"),
    "dynamic_temperature": Unserved(allowed=(False,), why=_ONE_TEMPERATURE),
    "dynatemp_range": Unserved(allowed=(0, 0.0), why=_ONE_TEMPERATURE),
    "dynatemp_exponent": Unserved(allowed=(1, 1.0), why=_ONE_TEMPERATURE),
    "temperature_last": Unserved(
        allowed=(False,), why="filters see the distribution at the request's temperature"
    ),
    "penalty_alpha": Unserved(allowed=(0, 0.0), why="contrastive search is not served"),
    "guidance_scale": Unserved(allowed=(1, 1.0), why="classifier-free guidance is not served"),
    "encoder_repetition_penalty": Unserved(
        allowed=(1, 1.0), why="the prompt's tokens are not favoured"
    ),
    "repetition_penalty_range": Unserved(allowed=(0,), why=_WHOLE_HISTORY),
    "repeat_last_n": Unserved(allowed=(-1,), why=_WHOLE_HISTORY),
    "spaces_between_special_tokens": Unserved(
        allowed=(True, False), why="special tokens are written as the tokenizer's decoder says"
    ),
    "prompt_embeds": Unserved(allowed=(), why="prompts are text or token ids"),
}


def known_fields(
    body: Mapping[str, Any], honoured: frozenset[str], *, warn_unknown: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The honoured fields that were given, and names left out (only with warn_unknown).

    Raises InvalidParameter naming a field that is not served or not known, with its value.
    """
    given: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if name in honoured:
            if value is not None:
                given[name] = value
        elif name in UNSERVED:
            _check_unserved(name, value)
        elif name in NO_EFFECT:
            _check_type(name, value)
        else:
            if not warn_unknown:
                raise _unknown(name, honoured)
            ignored.append(name)
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


def _check_type(name: str, value: Any) -> None:
    kind = LABELS[name]
    if value is not None and not isinstance(value, kind):
        words = "a string" if kind is str else "an object"
        raise InvalidParameter(f"{name} is {show(value)}; {words} is allowed", param=name)


def _check_unserved(name: str, value: Any) -> None:
    rule = UNSERVED[name]
    # False == 0 and 1 == True in Python, not in JSON.
    fine = value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in rule.allowed
    )
    if not fine:
        allowed = " or ".join(["null", *map(show, rule.allowed)])
        raise InvalidParameter(
            f"{name} is {show(value)}: {rule.why}; leave it out ({allowed} is accepted)",
            param=name,
        )


def _unknown(name: str, honoured: frozenset[str]) -> InvalidParameter:
    other = OTHER_NAMES.get(name)
    near = [other] if other in honoured else get_close_matches(name[:64], honoured, 1)
    hint = f"did you mean {show(near[0])}? " if near else ""
    return InvalidParameter(
        f"{show(name)} is not a field of this request; {hint}leave it out, or start the server "
        "with --unknown-fields warn",
        param=name[:64],
    )

"""Sampling parameters under llama.cpp's names, as answers and /props have them.

Knows no request. Always holds: a parameter of llama.cpp that this server lacks has the value at
which it is off there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.llama_cpp.request import REPEAT_LAST_N, Returned
from quire.base.grammar import Grammar, GrammarKind
from quire.base.sampling_params import SamplingParams

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability"),
    *("xtc_threshold", "typical_p", "presence_penalty", "frequency_penalty", "dry_multiplier"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau"),
    *("mirostat_eta", "ignore_eos"),
)
# llama.cpp's order, which a request without a list has.
_SAMPLERS = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
)
# Parameters that no request changes here. A completion is not parsed as a chat's answer.
_FIXED: Mapping[str, Any] = {
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}


def settings_json(sampling: SamplingParams, returned: Returned) -> dict[str, Any]:
    """Return `generation_settings`. n_predict is -1 before there is a limit."""
    limit = -1 if sampling.max_tokens is None else sampling.max_tokens
    biases = [{"bias": bias, "token": token} for token, bias in sampling.logit_bias.items()]
    return {
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if sampling.seed is None else sampling.seed,
        **{name: getattr(sampling, name) for name in _SAME},
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "repeat_last_n": REPEAT_LAST_N
        if sampling.repeat_last_n is None
        else sampling.repeat_last_n,
        "repeat_penalty": sampling.repetition_penalty,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "stop": list(sampling.stop),
        "n_keep": 0,
        "n_discard": 0,
        "stream": returned.streams,
        "n_probs": returned.num_probs,
        "min_keep": 0,
        "logit_bias": biases,
        "grammar": _text_of(sampling.structured_outputs),
        "samplers": list(returned.samplers or _SAMPLERS),
        "timings_per_token": returned.timings_per_token,
        **_FIXED,
    }


def _text_of(grammar: Grammar | None) -> str:
    """Return the grammar of a request with one; "" for none, and for other formats."""
    is_text = grammar is not None and grammar.kind is GrammarKind.GRAMMAR
    return grammar.text if grammar is not None and is_text else ""

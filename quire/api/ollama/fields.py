"""The request fields of Ollama's API, and the entries of `options`.

Sampling fields are entries of `options`, under Ollama's names where it has one and under ours for
the others. Fields of scheduling, which Ollama lacks, are beside `options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.generation.continued_answer import CONTINUED_STREAMS
from quire.api.generation.field_set import FieldSet
from quire.api.generation.fields import SAMPLING, SCHEDULING
from quire.api.generation.foreign_fields import SYNONYMS
from quire.base.sampling_checks import WHOLE_NUMBERS

# Several choices, numbers of prompts, and formats, which have a field of their own.
_NOT_CARRIED = frozenset(
    {
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "prompt_logprobs",
        "logprob_token_ids",
        "structured_outputs",
    }
)
_EVERYWHERE = (SCHEDULING - {"return_cached_tokens_details"}) | {
    "model",
    "options",
    "format",
    "stream",
    *CONTINUED_STREAMS,
    "think",
    "keep_alive",
    "truncate",
    "shift",
    "logprobs",
    "top_logprobs",
    "cache_salt",
    "speculation",
}
_CHAT = _EVERYWHERE | {"messages", "tools", "prediction", "thinking_token_budget"}
_GENERATE = _EVERYWHERE | {
    "prompt",
    "suffix",
    "system",
    "template",
    "context",
    "raw",
    "images",
}
_OF_VECTORS = frozenset(
    {
        "model",
        "options",
        "keep_alive",
        "dimensions",
        "normalize",
        "prompt_name",
        "cache_salt",
        "priority",
        "deadline_ms",
    }
)


def _is_option(name: str) -> bool:
    """Return whether a field of ours, or one read as such, is an entry of options here."""
    return name in SAMPLING or SYNONYMS.get(name, ("",))[0] in SAMPLING


def _advice(name: str, body: Mapping[str, Any]) -> str | None:
    """Return what Ollama's API has in place of a field of another one."""
    if name in ("response_format", "structured_outputs", "json_schema"):
        return '; write it as format: "json", or a JSON schema'
    if name == "reasoning_effort":
        return "; write it as think"
    own = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}.get(name, name)
    if _is_option(name):
        return f'; write it as an entry of options, such as "options": {{"{own}": ...}}'
    return None


def _advice_of_vectors(name: str, body: Mapping[str, Any]) -> str | None:
    """Return why a field of generation is not one of a request for vectors."""
    if name not in _EVERYWHERE and not _is_option(name):
        return None
    return ", which computes vectors, without sampling; leave it out"


OLLAMA_CHAT = FieldSet(_CHAT, advice=_advice)
OLLAMA_GENERATE = FieldSet(_GENERATE, advice=_advice)
OLLAMA_EMBED = FieldSet(
    _OF_VECTORS | {"input", "truncate"}, input_names="input", advice=_advice_of_vectors
)
OLLAMA_EMBEDDINGS = FieldSet(
    _OF_VECTORS | {"prompt"}, input_names="prompt", advice=_advice_of_vectors
)
OLLAMA_SHOW = FieldSet(
    {"model", "name", "verbose", "system", "template", "options"}, input_names="model"
)

# Entries of options with our names, and those that have another name in Ollama.
RENAMED: Mapping[str, str] = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OPTIONS = SAMPLING - _NOT_CARRIED - frozenset(RENAMED.values())
# How Ollama computes, which no token depends on; the type of each.
RUNTIME_OPTIONS: Mapping[str, type | tuple[type, ...]] = {
    "num_batch": int,
    "num_gpu": int,
    "main_gpu": int,
    "num_thread": int,
    "draft_num_predict": int,
    "num_gqa": int,
    "low_vram": bool,
    "f16_kv": bool,
    "use_mmap": bool,
    "use_mlock": bool,
    "numa": bool,
    "rope_frequency_base": (int, float),
    "rope_frequency_scale": (int, float),
}
# Entries that are accepted at the values that ask for nothing, and why others are refused.
NEUTRAL_OPTIONS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tfs_z": ((1, 1.0), "tail-free sampling is not implemented (min_p is similar)"),
    "penalize_newline": ((True,), "repeat_penalty covers all tokens; use logit_bias"),
    "logits_all": ((False,), "ask for logprobs"),
    "vocab_only": ((False,), "the weights are loaded"),
    "embedding_only": ((False,), "the model generates text"),
}
# Read where a prompt is cut; a hint about memory.
NUM_KEEP, NUM_CTX = "num_keep", "num_ctx"
_WHOLE = frozenset(name for name, _, _ in WHOLE_NUMBERS)


def is_whole(name: str, ours: str | None) -> bool:
    """Return whether an option is a whole number. ours: our name of it, if it is of sampling."""
    return ours in _WHOLE or name in (NUM_KEEP, NUM_CTX) or RUNTIME_OPTIONS.get(name) is int

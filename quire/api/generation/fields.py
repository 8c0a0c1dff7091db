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
from typing import Any

from quire.api.generation.field_forms import biases, listed, one_or_listed, parsed_list
from quire.api.generation.foreign_fields import take_foreign
from quire.api.generation.grammar_fields import grammar_asked_for
from quire.api.generation.sampler_order import ORDERS, in_order
from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams, random_seed
from quire.base.show import show
from quire.text.tokenizer import Tokenizer

# OpenAI's default for completions; chats default to the rest of the context.
COMPLETION_TOKENS = 16

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
        "repeat_last_n",
        "logit_bias",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_regex",
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
        "truncation_side",
        "return_timings",
        "timings",
        "timings_per_token",
        "return_progress",
        "speculation",
    }
)
# Routes with texts as answers.
_CONTINUED = {"output_ids", "output_cursor"}
_TEXTS = _EVERYWHERE | _CONTINUED | {"add_special_tokens", "response_format", "return_token_ids"}
_TEXTS |= {"echo", "return_tokens_as_token_ids", "kv_transfer_params"}
COMPLETIONS = _TEXTS | {"prompt", "suffix", "thinking_token_budget"}
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
    "metadata",
    "service_tier",
    "prediction",
    "thinking_token_budget",
}
CHAT = _TEXTS | _TEMPLATE | _CHAT_ONLY
# Token ids in and out: no fields of texts.
GENERATE = (_EVERYWHERE - {"logprob_token_ids"}) | _CONTINUED | {"tokens"}
CONVERSATION = _TEMPLATE | {"messages"}
APPLY_TEMPLATE = CONVERSATION | {"model"}
TOKENIZE = APPLY_TEMPLATE | {"prompt", "content", "add_special_tokens", "return_token_strs"}
DETOKENIZE = frozenset({"model", "tokens", "skip_special_tokens"})


def known_fields(
    body: Mapping[str, Any], honoured: frozenset[str], *, warn_unknown: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the honoured fields that were given, and the names that are ignored.

    Hints are ignored, and unknown names with warn_unknown. Raises InvalidParameter naming a field
    that is not served or not known, with its value.
    """
    given: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in body.items():
        if value is not None:
            (given if name in honoured else others)[name] = value
    if not others:
        return given, ()
    return given, take_foreign(others, given, body, honoured, warn_unknown=warn_unknown)


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


def sampling_of(
    given: Mapping[str, Any],
    defaults: SamplingParams,
    *,
    logprobs: int | None,
    tokenizer: Tokenizer | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request: with a seed, but no max_tokens unless given.

    tokenizer: of the texts in a logit_bias; without one they are refused. Raises InvalidParameter
    naming the field.
    """
    fields: dict[str, Any] = {name: given[name] for name in SAMPLING & given.keys()}
    for name in ("ignore_eos", "include_stop_str_in_output"):
        fields[name] = flag(given, name)
    fields["skip_special_tokens"] = flag(given, "skip_special_tokens", default=True)
    for name in ("stop", "stop_regex"):
        if name in fields:
            fields[name] = one_or_listed(name, fields[name])
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = listed("stop_token_ids", fields["stop_token_ids"])
    if "logprob_token_ids" in fields:
        fields["logprob_token_ids"] = listed("logprob_token_ids", fields["logprob_token_ids"])
        if fields["logprob_token_ids"] and logprobs is None:
            raise InvalidParameter(
                "logprob_token_ids is given without logprobs; add logprobs (0 for completions, "
                "true for chats)",
                param="logprob_token_ids",
            )
    if isinstance(fields.get("dry_sequence_breakers"), str):
        fields["dry_sequence_breakers"] = parsed_list(fields["dry_sequence_breakers"])
    if "structured_outputs" in given or "response_format" in given:
        fields["structured_outputs"] = grammar_asked_for(given)
    if "logit_bias" in fields:
        fields["logit_bias"] = biases(fields["logit_bias"], tokenizer)
    fields.setdefault("seed", random_seed())
    sampling = defaults.changed(logprobs=logprobs, **fields)
    if sampling.logprob_token_ids:  # in place of the most probable ids, as in vLLM
        sampling = replace(sampling, logprobs=0)
    return sampling if ORDERS.keys().isdisjoint(given) else in_order(given, sampling)


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

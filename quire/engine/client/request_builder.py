"""From a prompt and sampling parameters to Requests: the checks that need to know the model.

What can never be served is refused here, with the numbers, before it crosses to the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.records import NO_RULES, Request, TokenRules
from quire.base.sampling_checks import ALL_LOGPROBS
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.engine.client.logprob_numbers import check_all_logprobs
from quire.engine.client.output_ids import check_output_ids
from quire.engine.client.pooling_checks import check_task
from quire.engine.client.speculation import NO_SPECULATION, speculation_of
from quire.engine.client.token_rules import Encoder, token_rules
from quire.engine.model_card import ModelCard
from quire.structured.stop_patterns import check_patterns

# Clients recognize a prompt that does not fit by these words, and shorten it.
_TOO_LONG_BEGINS = "this model's maximum context length is "


def make_requests(
    card: ModelCard,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    request_id: str,
    arrival_ms: float,
    first_stream: int = 0,
    cache_salt: str = "",
    terms: SchedulingParams = DEFAULT_SCHEDULING,
    encoder: Encoder | None = None,
    shown_ids: Collection[int] = (),
    output_ids: Sequence[int] = (),
) -> tuple[Request, ...]:
    """Return the streams of one caller's request; stream i has the id "<request_id>/<i>".

    There are n, or best_of where the best of them are to be found; beams have n: the scheduler
    knows how many it needs. All have the same seed; their noise differs by stream, numbered from
    `first_stream`. encoder: the model's tokenizer, needed where the parameters hold words.
    shown_ids: special tokens that are text in the answer in any case. output_ids: known tokens of
    the answer. Raises InvalidParameter for ids the model does not have and for an empty prompt,
    ContextTooLong where no output fits (none is needed where max_tokens is 0).
    """
    prompt = _prompt(card, prompt_ids)
    if sampling.pooling is not None or not card.generates:
        check_task(card, sampling)
    _check_ids(card, "stop_token_ids", sampling.stop_token_ids)
    _check_ids(card, "logit_bias", tuple(sampling.logit_bias))
    _check_ids(card, "logprob_token_ids", sampling.logprob_token_ids)
    _check_ids(card, "allowed_token_ids", sampling.allowed_token_ids or ())
    room_tokens = _room_tokens(card, len(prompt), sampling)
    resolved, num_streams = sampling.resolve(), sampling.n
    if sampling.is_ranked:
        num_streams = sampling.num_sequences
        resolved = replace(resolved, logprobs=resolved.logprobs or 0)
    eos_ids = () if sampling.ignore_eos else card.eos_ids
    stop_ids = tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids)))
    rules = _rules(card, sampling, encoder, shown_ids)
    _check_choosable(sampling, rules, stop_ids)
    if sampling.stop_regex:
        check_patterns(sampling.stop_regex)
    speculation = None
    if terms.speculation is not None or card.speculates:
        speculation = speculation_of(card, terms.speculation or NO_SPECULATION)
    limit = room_tokens if sampling.max_tokens is None else sampling.max_tokens
    if ALL_LOGPROBS in (sampling.logprobs, sampling.prompt_logprobs):
        sizes = {"prompt_tokens": len(prompt), "max_tokens": limit}
        check_all_logprobs(sampling, card.vocab_size, **sizes)
    if len(output_ids):
        check_output_ids(output_ids, sampling, stop_ids, card.vocab_size, max_tokens=limit)
    return tuple(
        Request(
            request_id=f"{request_id}/{stream}",
            group_id=request_id,
            stream=stream,
            prompt_ids=prompt,
            sampling=resolved,
            stop_ids=stop_ids,
            max_total_tokens=len(prompt) + limit,
            arrival_ms=arrival_ms - terms.waited_ms,
            cache_salt=cache_salt,
            rules=rules,
            tenant=terms.tenant,
            priority=terms.priority,
            deadline_ms=terms.deadline_ms,
            ttft_slo_ms=terms.ttft_slo_ms,
            tpot_slo_ms=terms.tpot_slo_ms,
            explain_cache=terms.return_cached_tokens_details or bool(terms.cache_pins),
            cache_pins=terms.cache_pins,
            report_progress=terms.report_progress and stream == first_stream,
            speculation=speculation,
            output_ids=np.array(output_ids, np.int32),
            transfer=terms.kv_transfer,
            background=terms.background,
        )
        for stream in range(first_stream, first_stream + num_streams)
    )


def default_sampling(card: ModelCard, *, num_prompt_tokens: int | None = None) -> SamplingParams:
    """SamplingParams with the model's own generation defaults.

    Its default number of new tokens is taken only for a known prompt, cut to what the context
    has room for: a default never makes a request that cannot be served.
    """
    given: dict[str, Any] = dict(card.generation_defaults)
    given.pop("max_new_tokens", None)
    max_tokens = None if num_prompt_tokens is None else default_max_tokens(card, num_prompt_tokens)
    return SamplingParams(**given, max_tokens=max_tokens)


def default_max_tokens(card: ModelCard, num_prompt_tokens: int) -> int | None:
    """Return the model's own default number of new tokens, as default_sampling has it."""
    limit: Any = card.generation_defaults.get("max_new_tokens")
    room_tokens = card.max_model_len - num_prompt_tokens
    return None if limit is None or room_tokens <= 0 else min(limit, room_tokens)


def prompt_too_long(found: str, max_model_len: int, *, min_output: int) -> str:
    """Return the error message of a prompt that does not fit the context.

    found: the length of the prompt. min_output: output tokens it must leave room for, 0 or 1.
    """
    needed = ", and at least one token of output is needed" * min_output
    return (
        f"{_TOO_LONG_BEGINS}{max_model_len} tokens, prompt and output together; the prompt has "
        f"{found}{needed}; shorten the prompt"
    )


def _prompt(
    card: ModelCard, prompt_ids: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if len(prompt_ids) == 0:
        raise InvalidParameter(
            "the prompt is empty; give at least one token (a model with a begin-of-text token "
            "gets one from its tokenizer)",
            param="prompt",
        )
    for token_id in () if set(map(type, prompt_ids)) == {int} else prompt_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise InvalidParameter(
                f"the prompt holds {token_id!r}; token ids are whole numbers", param="prompt"
            )
    _check_ids(card, "prompt", prompt_ids)
    return np.array(prompt_ids, np.int32)


def _room_tokens(card: ModelCard, num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """Return the output tokens for which the context has room.

    Raises ContextTooLong where they are fewer than the parameters need.
    """
    room_tokens = card.max_model_len - num_prompt_tokens
    if room_tokens < 0 or (room_tokens == 0 and sampling.max_tokens != 0):
        message = prompt_too_long(
            f"{num_prompt_tokens} tokens",
            card.max_model_len,
            min_output=0 if sampling.max_tokens == 0 else 1,
        )
        raise ContextTooLong(message, param="prompt")
    if sampling.max_tokens is not None and sampling.max_tokens > room_tokens:
        raise ContextTooLong(
            f"{_TOO_LONG_BEGINS}{card.max_model_len} tokens; max_tokens is "
            f"{sampling.max_tokens} and the prompt has {num_prompt_tokens} tokens; "
            f"lower max_tokens to {room_tokens} or shorten the prompt",
            param="max_tokens",
        )
    if sampling.min_tokens > room_tokens:
        raise ContextTooLong(
            f"min_tokens is {sampling.min_tokens} and the prompt has {num_prompt_tokens} tokens; "
            f"together they may be {card.max_model_len}; lower min_tokens",
            param="min_tokens",
        )
    return room_tokens


def _rules(
    card: ModelCard,
    sampling: SamplingParams,
    encoder: Encoder | None,
    shown_ids: Collection[int],
) -> TokenRules:
    """Return the token rules of the parameters and of the model. Arguments as of make_requests."""
    rules = NO_RULES
    if sampling.bad_words or sampling.dry_multiplier or card.banned_sequences:
        rules = token_rules(sampling, encoder, card.banned_sequences)
    if sampling.ends_beams_by_text and shown_ids:
        rules = replace(rules, shown_ids=tuple(sorted(shown_ids)))
    return rules


def _check_choosable(
    sampling: SamplingParams, rules: TokenRules, stop_ids: tuple[int, ...]
) -> None:
    """Refuse allowed ids that are all banned; what is banned only at times is found then."""
    if sampling.allowed_token_ids is None:
        return
    never = {ids[0] for ids in rules.banned_sequences if len(ids) == 1}
    if sampling.min_tokens:
        never.update(stop_ids)
    if never.issuperset(sampling.allowed_token_ids):
        raise InvalidParameter(
            f"allowed_token_ids holds {len(sampling.allowed_token_ids)} ids, all banned (by "
            "bad_words, by the model, or as stop tokens while min_tokens is not reached); allow "
            "more, or ban less",
            param="allowed_token_ids",
        )


def _check_ids(card: ModelCard, param: str, token_ids: Sequence[int]) -> None:
    if len(token_ids) == 0 or (min(token_ids) >= 0 and max(token_ids) < card.vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidParameter(
                f"{param} holds token id {token_id}; the model has ids 0 to {card.vocab_size - 1}",
                param=param,
            )

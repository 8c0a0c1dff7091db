"""JSON parts of answers that several APIs share: usage, timings, log-probabilities of prompts.

JSON has no infinity: an impossible token has -9999.0. Alternatives of a prompt's positions are
encoded at once, so a long prompt holds only bytes; those of the whole vocabulary are encoded when
they are sent (parted_answer.py). Knows no API. Always holds: the numbers that one answer reports of
its prompts are bounded by MAX_PROMPT_NUMBERS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from quire.api.generation.usage import Usage
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import ALL_LOGPROBS, MAX_TOP_LOGPROBS
from quire.engine.client.logprob_numbers import MAX_NUMBERS
from quire.engine.output.token_text import TokenText

_IMPOSSIBLE = -9999.0
MAX_PROMPT_NUMBERS = MAX_NUMBERS  # for each request


def check_prompt_numbers(num_numbers: int, *, param: str) -> None:
    """Refuse an answer that would report too many numbers of its prompts."""
    if num_numbers > MAX_PROMPT_NUMBERS:
        raise InvalidParameter(
            f"the answer would have {num_numbers} numbers of prompts (of each token, for each "
            "choice: its id, its log-probability, those of alternatives); at most "
            f"{MAX_PROMPT_NUMBERS} a request are allowed: send fewer or shorter prompts, or ask "
            "for fewer alternatives or choices",
            param=param,
        )


class PartedList(Iterable[msgspec.Raw | None]):
    """A list of entries that are large together, and encoded one by one whenever it is iterated."""

    def __init__(self, entries: Callable[[], Iterator[msgspec.Raw | None]]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[msgspec.Raw | None]:
        return self._entries()


def prompt_logprobs(
    tokens: Iterable[TokenText | None], num_top: int
) -> Iterable[msgspec.Raw | None]:
    """Return vLLM's `prompt_logprobs`: null first, then the token and the `num_top` best, by id.

    num_top: -1 for all, in a PartedList.
    """

    def entries() -> Iterator[msgspec.Raw | None]:
        for token in tokens:
            if token is None:
                yield None
                continue
            top = token.top if num_top == ALL_LOGPROBS else token.top[:num_top]
            ranked = {str(other.token_id): _ranked(other) for other in (token, *top)}
            yield msgspec.Raw(msgspec.json.encode(ranked))

    return PartedList(entries) if num_top == ALL_LOGPROBS else list(entries())


def refuse_streamed_prompt(num_top: int | None, *, stream: bool) -> None:
    """Refuse a stream with all log-probabilities of its prompt: one event would have them all."""
    if stream and num_top == ALL_LOGPROBS:
        raise InvalidParameter(
            "prompt_logprobs is -1 and stream is true; all log-probabilities of a prompt are sent "
            "with a whole answer only, part by part: leave stream out, or ask for 0 to "
            f"{MAX_TOP_LOGPROBS}",
            param="prompt_logprobs",
        )


def finite(logprob: float) -> float | None:
    """Return a log-probability as JSON has it: null for NaN, -9999.0 for minus infinity."""
    return None if math.isnan(logprob) else max(logprob, _IMPOSSIBLE)


def _ranked(token: TokenText) -> dict[str, Any]:
    return {"logprob": finite(token.logprob), "rank": token.rank, "decoded_token": token.text}


def speeds_json(usage: Usage) -> dict[str, Any]:
    """Return `timings`, which goes beside `usage`, if it was requested.

    Of an answer with proposed tokens it has their numbers, as in llama.cpp.
    """
    if not usage.speeds:
        return {}
    timings = msgspec.to_builtins(usage.speeds)
    if num_drafts := usage.accepted_drafts + usage.rejected_drafts:
        timings |= {"draft_n": num_drafts, "draft_n_accepted": usage.accepted_drafts}
    return {"timings": timings}


def usage_json(usage: Usage, *, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return the object of `usage` of generated answers.

    reasoning_tokens: of answers that were parsed for reasoning. cache_write_tokens counts tokens
    that a request pins, which one of this form cannot.
    """
    counts = prompt_usage_json(usage)
    counts["prompt_tokens_details"]["cache_write_tokens"] = 0
    details = {"reasoning_tokens": reasoning_tokens, **drafts_json(usage)}
    counts["completion_tokens_details"] = details
    if usage.timings:
        counts["timings"] = msgspec.to_builtins(usage.timings)
    return counts


def drafts_json(usage: Usage) -> dict[str, int]:
    """Return the counts of proposed tokens if there are any, a prediction's by OpenAI's names."""
    kind = "prediction" if usage.has_prediction else "draft"
    counts = {"accepted": usage.accepted_drafts, "rejected": usage.rejected_drafts}
    is_known = usage.has_prediction or any(counts.values())
    return {f"{name}_{kind}_tokens": num for name, num in counts.items() if is_known}


def prompt_usage_json(usage: Usage) -> dict[str, Any]:
    """Return the object of `usage` of prompts alone."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **_cache_json(usage)},
    }


def _cache_json(usage: Usage) -> dict[str, Any]:
    """Return the tiers of cached tokens and the first miss of each prompt, if requested."""
    if not usage.cache_uses:
        return {}
    return {
        "cached_tokens_details": {
            "pool": sum(use.pool_tokens for use in usage.cache_uses),
            "host": sum(use.host_tokens for use in usage.cache_uses),
            "disk": sum(use.disk_tokens for use in usage.cache_uses),
            "misses": [
                None if use.miss is None else {"reason": use.miss.reason, "token": use.miss.token}
                for use in usage.cache_uses
            ],
        }
    }

"""Usage of a request: token counts, times and rates, of one answer or several streams.

Times are milliseconds of the engine's clock since the arrival of the request. Knows no API:
answer_json.py writes usage as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quire.base.cache_usage import CacheUsage
from quire.base.records import RequestTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Milliseconds from a request's arrival in the engine; of several streams the earliest start
    and the latest end. queue and first_token are None before they happen."""

    queue_ms: float | None
    first_token_ms: float | None
    total_ms: float

    @property
    def prefill_ms(self) -> float:
        """Milliseconds from the first scheduling to the first token; 0 before there is one."""
        if self.queue_ms is None or self.first_token_ms is None:
            return 0.0
        return max(self.first_token_ms - self.queue_ms, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Counts, times and rates of prefill and decoding, with the names and units of llama.cpp.

    cache_n: prompt tokens found in the prefix cache; prompt_n: those computed. Prefill is from the
    first scheduling to the first token, decoding from there to the last token; of several streams,
    from the first of them to the last. A rate over no time is 0.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_uses: tuple[CacheUsage, ...] = ()  # of each prompt, if requested
    timings: Timings | None = None  # if requested
    speeds: Speeds | None = None  # if requested
    # Proposed tokens that were those of the answer, and others; of a prediction of the request.
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    has_prediction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions:
    """What usage reports. has_several_users: users share cached prefixes and may not learn of
    each other's prompts, so the details of cached tokens are hidden."""

    has_several_users: bool = False
    timings: bool = False
    speeds: bool = False


PLAIN_USAGE = UsageOptions()


def timings_of(times: Iterable[RequestTimes | None]) -> Timings | None:
    """Return the timings of several streams; None while none has any."""
    known = [each for each in times if each is not None]
    if not known:
        return None
    arrival_ms = min(each.arrival_ms for each in known)

    def first(moments_ms: Iterable[float]) -> float | None:
        happened = [moment_ms for moment_ms in moments_ms if not math.isnan(moment_ms)]
        return round(min(happened) - arrival_ms, 3) if happened else None

    return Timings(
        queue_ms=first(each.first_scheduled_ms for each in known),
        first_token_ms=first(each.first_token_ms for each in known),
        total_ms=round(max(each.last_token_ms for each in known) - arrival_ms, 3),
    )


def speeds_of(usage: Usage, timings: Timings | None) -> Speeds:
    """Return counts, times and rates of an answer so far."""
    queue_ms = first_ms = total_ms = 0.0
    if timings is not None:
        total_ms = 0.0 if math.isnan(timings.total_ms) else timings.total_ms
        queue_ms = timings.queue_ms or 0.0
        first_ms = total_ms if timings.first_token_ms is None else timings.first_token_ms
    prompt_n = usage.prompt_tokens - usage.cached_tokens
    prompt_ms, predicted_ms = max(first_ms - queue_ms, 0.0), max(total_ms - first_ms, 0.0)
    return Speeds(
        cache_n=usage.cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=round(prompt_ms, 3),
        prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
        prompt_per_second=_ratio(1e3 * prompt_n, prompt_ms),
        predicted_n=usage.completion_tokens,
        predicted_ms=round(predicted_ms, 3),
        predicted_per_token_ms=_ratio(predicted_ms, usage.completion_tokens),
        predicted_per_second=_ratio(1e3 * usage.completion_tokens, predicted_ms),
    )


def _ratio(amount: float, divisor: float) -> float:
    return round(amount / divisor, 3) if divisor > 0 else 0.0

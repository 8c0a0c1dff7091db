"""Request times and their summary: rates, percentiles, goodput.

Times are seconds on one clock that is zero at the start of the run. Plain arithmetic: independent
of engine, clock and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One request: when it was sent, when its first and last token arrived, its lengths.

    error: the failure, empty if it succeeded; its times then mean nothing.
    """

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Return the time to first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Return the time per output token after the first; 0 where there was only one."""
        return (self.last_s - self.first_s) / max(self.output_tokens - 1, 1)

    @property
    def decode_tokens_per_s(self) -> float:
        """Return output tokens per second without the first; 0 where there was only one."""
        return (self.output_tokens - 1) / (self.last_s - self.first_s) if self.tpot_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The latency goals that a request must meet to count for goodput."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def met_by(self, times: RequestTimes) -> bool:
        """Return whether a request succeeded and met both goals."""
        return not times.error and times.ttft_s <= self.ttft_s and times.tpot_s <= self.tpot_s


def run_rates(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """Return the rates of a run in which all requests were submitted at once."""
    start_s = min(times.sent_s for times in requests)
    wall_s = max(times.last_s for times in requests) - start_s
    output = sum(times.output_tokens for times in requests)
    total = output + sum(times.prompt_tokens for times in requests)
    rates = {
        "wall_s": wall_s,
        "output_tokens_per_s": output / wall_s,
        "total_tokens_per_s": total / wall_s,
        "ttft_s": float(np.median([times.ttft_s for times in requests])),
    }
    if len(requests) == 1:
        [only] = requests
        rates["decode_tokens_per_s"] = only.decode_tokens_per_s
        rates["prefill_tokens_per_s"] = only.prompt_tokens / only.ttft_s
    return rates


def percentiles(values: Iterable[float], shares: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """Return p50, p90, p95 and p99, or those of `shares`; empty where there are no values."""
    found = np.array(list(values), np.float64)
    if not len(found):
        return {}
    return {f"p{share}": float(np.percentile(found, share)) for share in shares}


def rate_summary(
    requests: Sequence[RequestTimes], *, offered_per_s: float, seconds: float, goals: Goals
) -> dict[str, object]:
    """Summarize the requests of one arrival rate.

    offered_per_s: requests per second that arrived; seconds: duration of the arrivals.
    goodput_per_s counts requests that met the goals over the longer of that and the time until the
    last one ended.
    """
    ended = [times for times in requests if not times.error]
    last_s = max((times.last_s for times in ended), default=0.0)
    good = sum(goals.met_by(times) for times in requests)
    return {
        "offered_per_s": offered_per_s,
        "num_requests": len(requests),
        "num_errors": len(requests) - len(ended),
        "good_share": good / len(requests) if requests else 0.0,
        "goodput_per_s": good / max(seconds, last_s) if requests else 0.0,
        "output_tokens_per_s": sum(times.output_tokens for times in ended) / max(seconds, last_s),
        "ttft_s": percentiles(times.ttft_s for times in ended),
        "tpot_s": percentiles(times.tpot_s for times in ended if times.output_tokens > 1),
    }


def knee(summaries: Sequence[dict[str, object]], *, good_share: float = 0.9) -> int | None:
    """Return the index of the highest rate at which `good_share` of requests met the goals."""
    good = [
        index for index, one in enumerate(summaries) if _number(one, "good_share") >= good_share
    ]
    return max(good, key=lambda index: _number(summaries[index], "offered_per_s"), default=None)


def _number(summary: dict[str, object], name: str) -> float:
    value = summary[name]
    assert isinstance(value, float | int)
    return float(value)

"""What was measured of requests, and what is said about it: rates, percentiles, goodput.

Times are seconds since the start of the run. Plain arithmetic: knows no
engine, no clock and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One request: when it was sent, when its first and last token came, how long it was.

    error: what went wrong, empty if it ended as asked; its times then mean nothing.
    """

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 where there was only one."""
        return (self.last_s - self.first_s) / max(self.output_tokens - 1, 1)

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens a second without the first; 0 where there was only one."""
        return (self.output_tokens - 1) / (self.last_s - self.first_s) if self.tpot_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """When a request counts as well served."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def met_by(self, times: RequestTimes) -> bool:
        """Whether a request ended without an error and in time, first token and each after it."""
        return not times.error and times.ttft_s <= self.ttft_s and times.tpot_s <= self.tpot_s


def run_rates(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """Rates of a run in which all were handed in at once; total tokens are prompt and output."""
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
    """p50, p90, p95 and p99, or those of `shares`; empty where there are no values."""
    found = np.array(list(values), np.float64)
    if not len(found):
        return {}
    return {f"p{share}": float(np.percentile(found, share)) for share in shares}


def rate_summary(
    requests: Sequence[RequestTimes], *, offered_per_s: float, seconds: float, goals: Goals
) -> dict[str, object]:
    """What one rate of arrivals came to.

    offered_per_s: requests a second that arrived; seconds: how long they arrived. goodput_per_s
    counts well served requests over the longer of that and the time until the last one ended.
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
    """Index of the highest offered rate at which `good_share` of the requests were well served."""
    good = [
        index
        for index, summary in enumerate(summaries)
        if float(summary["good_share"]) >= good_share  # type: ignore[arg-type]
    ]
    return max(good, key=lambda index: float(summaries[index]["offered_per_s"]), default=None)  # type: ignore[arg-type]

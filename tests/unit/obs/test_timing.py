"""Rates, percentiles, goodput and the knee: arithmetic checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from quire.obs.timing import (
    Goals,
    RequestTimes,
    knee,
    percentiles,
    rate_summary,
    run_rates,
)


def times(sent: float, first: float, last: float, tokens: int = 11, **more: Any) -> RequestTimes:
    return RequestTimes(
        sent_s=sent, first_s=first, last_s=last, prompt_tokens=100, output_tokens=tokens, **more
    )


def test_one_request_has_times_of_its_first_and_later_tokens() -> None:
    one = times(0.5, 1.0, 3.0)
    assert (one.ttft_s, one.tpot_s, one.decode_tokens_per_s) == (0.5, 0.2, 5.0)
    rates = run_rates([one])
    assert rates["wall_s"] == 2.5
    assert rates["decode_tokens_per_s"] == 5.0
    assert rates["prefill_tokens_per_s"] == 200.0
    assert rates["total_tokens_per_s"] == pytest.approx(111 / 2.5)


def test_one_token_has_no_time_per_token() -> None:
    one = times(0.0, 2.0, 2.0, tokens=1)
    assert (one.tpot_s, one.decode_tokens_per_s) == (0.0, 0.0)


def test_a_run_of_several_counts_prompt_and_output_over_the_wall() -> None:
    rates = run_rates([times(0, 1, 2), times(0, 2, 4), times(0, 3, 3.5)])
    assert rates["wall_s"] == 4
    assert rates["output_tokens_per_s"] == 33 / 4
    assert rates["total_tokens_per_s"] == 333 / 4
    assert rates["ttft_s"] == 2
    assert "decode_tokens_per_s" not in rates


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) == {}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0}


def test_goodput_counts_requests_that_met_both_goals() -> None:
    goals = Goals(ttft_s=1.0, tpot_s=0.1)
    found = [
        times(0, 0.5, 1.0),  # good
        times(0, 1.5, 2.0),  # the first token is late
        times(0, 0.5, 2.5),  # the others are late
        times(1, 1.2, 1.3, error="HTTP 503"),
    ]
    summary = rate_summary(found, offered_per_s=2.0, seconds=2.0, goals=goals)
    assert summary["num_requests"] == 4
    assert summary["num_errors"] == 1
    assert summary["good_share"] == 0.25
    assert summary["goodput_per_s"] == pytest.approx(1 / 2.5)  # until the last one ended
    assert summary["output_tokens_per_s"] == pytest.approx(33 / 2.5)


def test_the_knee_is_the_highest_rate_served_well() -> None:
    def at(offered: float, good: float) -> dict[str, object]:
        return {"offered_per_s": offered, "good_share": good}

    assert knee([at(1, 1.0), at(2, 0.95), at(4, 0.3)]) == 1
    assert knee([at(1, 0.5)]) is None
    assert knee([]) is None

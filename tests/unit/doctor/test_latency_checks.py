"""TTFT, TPOT and tails: each rule fires just beyond its threshold, with its cause and levers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.doctor.finding import Finding, Verdict
from quire.doctor.latency_checks import check_tails, check_tpot, check_ttft
from quire.obs.timing import Goals
from tests.unit.doctor.made import ENGINE, situation


def levers(finding: Finding) -> list[str]:
    return [lever.text for lever in finding.levers]


def test_a_healthy_server_is_ok() -> None:
    healthy = situation()
    for check in (check_ttft, check_tpot, check_tails):
        finding = check(healthy)
        assert finding.verdict is Verdict.OK, finding
        assert not finding.levers


@pytest.mark.parametrize("check", [check_ttft, check_tpot, check_tails])
def test_nine_choices_are_too_few(check: object) -> None:
    slow = {"ttft_ms": 9e3, "queue_ms": 8e3, "tpot_ms": 900.0}
    few = check(situation(choices=9, **slow))  # type: ignore[operator]
    assert few.verdict is Verdict.OK
    assert "fewer than 10" in few.found
    if check is not check_tails:
        assert check(situation(choices=10, **slow)).verdict is Verdict.PROBLEM  # type: ignore[operator]


def test_the_goal_decides_not_the_time_before_the_window() -> None:
    # all observations are in the bucket from 50 to 100 ms, and p95 is 97.5 ms
    slow = {"ttft_ms": 60.0}
    assert check_ttft(situation(goals=Goals(ttft_s=0.098), **slow)).verdict is Verdict.OK
    assert check_ttft(situation(goals=Goals(ttft_s=0.097), **slow)).verdict is Verdict.PROBLEM
    slow = {"tpot_ms": 12.0}  # in the bucket from 10 to 20 ms, and p95 is 19.5 ms
    assert check_tpot(situation(goals=Goals(tpot_s=0.0196), **slow)).verdict is Verdict.OK
    assert check_tpot(situation(goals=Goals(tpot_s=0.0194), **slow)).verdict is Verdict.PROBLEM


def test_queueing_and_prefill_are_told_apart_at_half_of_ttft() -> None:
    finding = check_ttft(situation(ttft_ms=1000.0, queue_ms=500.0, running=(8, 8)))
    assert "50 % is queueing for one of the 8 slots" in finding.found
    finding = check_ttft(situation(ttft_ms=1000.0, queue_ms=490.0, running=(8, 8)))
    assert "51 % is prefill" in finding.found
    assert levers(finding)[0] == "--max-num-batched-tokens 128"
    assert finding.evidence["quire_prompt_tokens_total"] == "50 tokens a prompt"


QUEUED = {"ttft_ms": 1000.0, "queue_ms": 900.0, "waiting": (3, 5)}


def test_a_queue_for_slots() -> None:
    finding = check_ttft(situation(**QUEUED, running=(7, 8)))
    assert "90 % is queueing for one of the 8 slots" in finding.found
    assert levers(finding)[:2] == [
        "--max-num-seqs 16",
        "--max-num-seqs 32",
    ]
    assert finding.evidence["quire_waiting_requests"] == "3, then 5"
    assert finding.evidence["quire_running_requests"] == "8 of 8 slots"
    assert finding.metric == "ttft_p95_ms"
    small = replace(ENGINE, step_tokens=20)
    [first, *_] = levers(check_ttft(situation(**QUEUED, running=(8, 8), engine=small)))
    assert first == "--max-num-seqs 16 --max-num-batched-tokens 32"


def test_a_queue_for_blocks() -> None:
    for used, is_short in ((89, False), (90, True)):
        finding = check_ttft(situation(**QUEUED, used=(10, used)))
        assert ("for KV blocks" in finding.found) is is_short
    assert levers(finding) == [
        "--kv-cache-memory 200MiB",
        "--kv-cache-dtype int8 (changes answers)",
        "a second server for half of the requests",
    ]
    assert finding.evidence["quire_kv_blocks_used"] == "90 of 100, 90 % with reservations"
    finding = check_ttft(situation(**QUEUED, used=(60, 60), reserved=(30, 30)))
    assert "for KV blocks" in finding.found


def test_a_queue_for_the_device() -> None:
    for busy_s, is_busy in ((7.9, False), (8.0, True)):
        finding = check_ttft(situation(**QUEUED, busy_s=busy_s))
        assert ("the device is busy" in finding.found) is is_busy
    assert levers(finding)[0] == "--max-num-batched-tokens 128"


def test_a_queue_in_bursts_and_one_of_admission() -> None:
    finding = check_ttft(situation(**QUEUED, rows=7))
    assert "in bursts, for one of the 8 slots" in finding.found
    finding = check_ttft(situation(**QUEUED, rows=3))
    assert "admission holds them back" in finding.found
    assert "--max-long-prompts" in finding.action
    assert not finding.levers


def test_without_the_engines_limits_levers_have_no_values() -> None:
    finding = check_ttft(situation(**QUEUED, used=(95, 95), engine=None))
    assert levers(finding)[0] == "raise --kv-cache-memory"
    finding = check_ttft(situation(**QUEUED, engine=None))
    assert "/v1/engine was not readable" in finding.action


def test_a_queue_that_nothing_leaves_is_found_by_the_age_of_its_oldest_request() -> None:
    stuck = {"choices": 0, "waiting": (4, 6), "running": (8, 8)}
    old = replace(ENGINE, oldest_wait_ms=201.0)
    finding = check_ttft(situation(**stuck, engine=old))
    assert finding.verdict is Verdict.PROBLEM
    assert "has waited 201 ms for one of the 8 slots" in finding.found
    young = replace(ENGINE, oldest_wait_ms=199.0)
    assert check_ttft(situation(**stuck, engine=young)).verdict is Verdict.OK


SLOW_TOKENS = {"tpot_ms": 80.0}


def test_slow_tokens_by_preemption() -> None:
    for preemptions, fires in ((5, False), (6, True)):
        finding = check_tpot(situation(**SLOW_TOKENS, preemptions=preemptions))
        assert ("preempted requests wait" in finding.found) is fires
    assert finding.evidence["quire_preemptions_total"] == "6 for 100 choices that ended"
    assert levers(finding)[0] == "--kv-cache-memory 200MiB"


def test_slow_tokens_by_prefill_of_other_prompts() -> None:
    for tokens, fires in ((7, False), (8, True)):
        finding = check_tpot(situation(**SLOW_TOKENS, rows=4, tokens=tokens, busy_s=9.0))
        assert ("prefill of other prompts" in finding.found) is fires
    assert levers(finding) == [
        "--tpot-target-ms 50",
        "--max-num-batched-tokens 32",
        "--max-long-prompts 1",
        "a second server for half of the requests",
    ]


def test_slow_tokens_by_the_host() -> None:
    for busy_s, fires in ((7.9, True), (8.0, False)):
        finding = check_tpot(situation(**SLOW_TOKENS, busy_s=busy_s))
        assert ("the host is slow" in finding.found) is fires
    idle = check_tpot(situation(**SLOW_TOKENS, busy_s=1.0, running=(0, 0)))
    assert "the host is slow" not in idle.found


def test_slow_tokens_by_a_large_batch_and_by_the_weights() -> None:
    finding = check_tpot(situation(**SLOW_TOKENS, busy_s=9.0, rows=4, tokens=4))
    assert "a step computes many requests" in finding.found
    # (50 ms - 8 ms) / 0.2 ms a row are more rows than there are slots
    assert levers(finding)[0] == "--max-num-seqs 7"
    finding = check_tpot(situation(**SLOW_TOKENS, busy_s=9.0, rows=3, tokens=3))
    assert "however few requests" in finding.found
    assert levers(finding)[0] == "--quantization int8 (changes answers; at best)"
    quantized = situation(
        **SLOW_TOKENS, busy_s=9.0, rows=3, tokens=3, model={"quantization": "int8"}
    )
    assert levers(check_tpot(quantized)) == ["a second server for half of the requests"]


def test_a_tail_is_a_slow_hundredth_that_the_95th_percentile_hides() -> None:
    fires = check_tails(situation(slow_choices=3, slow_tpot_ms=400.0))
    assert fires.verdict is Verdict.WARNING
    assert "TPOT p99" in fires.found
    assert "prefill of long prompts" in fires.found
    assert fires.metric == "tpot_p99_ms"
    assert check_tails(situation(slow_choices=8, slow_tpot_ms=400.0)).verdict is Verdict.OK
    preempted = check_tails(situation(slow_choices=3, slow_tpot_ms=400.0, preemptions=1))
    assert "preemption" in preempted.found
    burst = check_tails(situation(slow_choices=3, slow_ttft_ms=4000.0))
    assert "TTFT p99" in burst.found
    assert "bursts of arrivals" in burst.found
    # 60 ms is the median: within three times of it there is no tail
    goals = Goals(ttft_s=0.1)
    near = check_tails(situation(slow_choices=3, slow_ttft_ms=120.0, goals=goals))
    assert near.verdict is Verdict.OK

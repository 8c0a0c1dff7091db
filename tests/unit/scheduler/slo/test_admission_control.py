"""Requests rejected before any compute, their errors, and deadlines that expire later."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from quire.base.errors import DeadlineMissed, OverloadedError, TimedOut
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.policy.policies import make_policy
from quire.scheduler.sequence import SequenceState
from quire.scheduler.slo.deadlines import Deadlines
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

# A step of n tokens takes 10 + n ms, exactly.
COST = LinearCost(fixed_ms=10.0, token_ms=1.0, position_ms=0.0)


def harness_of(policy: str = "fcfs", *, knows: bool = True, **settings: object) -> Harness:
    setup = {
        "num_blocks": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "prefix_caching": False,
        **settings,
    }
    harness = Harness(Setup(policy=partial(make_policy, policy), **setup))  # type: ignore[arg-type]
    speed = harness.scheduler.speed
    if knows:
        speed.num_steps, speed._linear = 100, COST
    speed.note = lambda *_: None  # type: ignore[method-assign]
    return harness


def test_a_queue_at_its_token_limit_rejects_with_retry_after() -> None:
    harness = harness_of(max_queued_tokens=100, max_num_seqs=1)
    for name in ("a", "b", "c"):
        harness.add(make_request(name, [1] * 30, max_tokens=20))
    wanted = r"with 90 tokens are waiting.* has 30.* 100 may .* in about"
    with pytest.raises(OverloadedError, match=wanted) as refused:
        harness.add(make_request("d", [1] * 30, max_tokens=20))
    # All three begin before it: three prompts and two answers of 20 tokens, about 11 ms each.
    retry_after_s = refused.value.retry_after_s
    assert retry_after_s is not None
    assert 1.0 <= retry_after_s <= 3.0
    harness.drain()
    harness.check_end()


def test_as_many_streams_that_continue_may_wait_beyond_the_limit() -> None:
    harness = harness_of(max_queued_tokens=100, max_num_seqs=1)
    for name in ("a", "b", "c"):
        harness.add(make_request(name, [1] * 30, max_tokens=20))
    again = [
        replace(make_request(name, [1] * 29, max_tokens=20), output_ids=np.array([5], np.int32))
        for name in ("d", "e", "f", "g")
    ]
    for request in again[:3]:
        harness.scheduler.add(request)
    with pytest.raises(OverloadedError, match="with 180 tokens are waiting"):
        harness.scheduler.add(again[3])


def test_a_prompt_longer_than_the_queue_limit_is_accepted_by_an_empty_queue() -> None:
    harness = harness_of(max_queued_tokens=10)
    harness.add(make_request("a", [1] * 30, max_tokens=2))
    harness.drain()
    assert len(harness.tokens["a"]) == 2


def test_a_request_predicted_to_miss_its_ttft_is_rejected_with_both_times() -> None:
    harness = harness_of(max_num_seqs=1)
    for number in range(10):
        harness.add(make_request(f"r{number}", [1] * 50, max_tokens=20))
    before = harness.scheduler.stats().waiting
    with pytest.raises(DeadlineMissed) as refused:
        harness.add(make_request("late", [1] * 50, max_tokens=20, ttft_slo_ms=500.0))
    predicted = re.search(r"predicted (\d+) ms .* within 500 ms: 10 requests", str(refused.value))
    assert predicted is not None
    # Ten prompts of 50 and ten answers of 20 tokens, 11 ms each: about 2.8 s.
    assert 2_000 <= int(predicted[1]) <= 4_000
    assert refused.value.retry_after_s == pytest.approx((int(predicted[1]) - 500) / 1000, abs=0.01)
    assert harness.scheduler.stats().waiting == before
    harness.add(make_request("patient", [1] * 50, max_tokens=20, ttft_slo_ms=60_000.0))
    harness.drain()
    harness.check_end()


def test_a_request_ranked_first_is_not_rejected_for_those_it_passes() -> None:
    for policy, is_refused in (("fcfs", True), ("priority", False), ("edf", False)):
        harness = harness_of(policy, max_num_seqs=1)
        for number in range(10):
            harness.add(make_request(f"r{number}", [1] * 50, max_tokens=20, priority=5))
        request = make_request("soon", [1] * 50, max_tokens=20, ttft_slo_ms=400.0)
        if is_refused:
            with pytest.raises(DeadlineMissed):
                harness.add(request)
        else:
            harness.add(request)


def test_a_deadline_unreachable_even_alone_suggests_more_time() -> None:
    harness = harness_of()
    request = make_request("long", [1] * 50, max_tokens=100, deadline_ms=300.0)
    with pytest.raises(DeadlineMissed, match=r"end of the answer.*allow more time") as refused:
        harness.add(request)
    assert refused.value.retry_after_s is None
    harness.add(make_request("short", [1] * 50, max_tokens=10, deadline_ms=300.0))


def test_cached_tokens_count_in_the_prediction() -> None:
    harness = harness_of(prefix_caching=True)
    prompt = list(range(10)) * 30
    harness.add(make_request("first", prompt, max_tokens=2))
    harness.drain()
    harness.add(make_request("again", prompt, max_tokens=2, ttft_slo_ms=100.0))
    with pytest.raises(DeadlineMissed):
        harness.add(make_request("other", prompt[::-1], max_tokens=2, ttft_slo_ms=100.0))


def test_no_request_is_rejected_by_prediction_before_steps_were_timed() -> None:
    harness = harness_of(knows=False)
    harness.add(make_request("a", [1] * 50, max_tokens=100, ttft_slo_ms=0.1, deadline_ms=1e6))
    harness.drain()
    assert len(harness.tokens["a"]) == 100


def test_a_deadline_missed_while_waiting_ends_the_request_with_advice() -> None:
    harness = harness_of(max_num_seqs=1, knows=False)
    harness.add(make_request("a", [1] * 5, max_tokens=40))
    harness.add(make_request("b", [1] * 5, max_tokens=4, deadline_ms=20.0))
    harness.drain()
    error = harness.refusals["b"]
    assert isinstance(error, DeadlineMissed)
    assert re.search(r"its deadline, 20 ms after it came, was over; nothing", str(error))
    assert harness.tokens["b"] == []
    assert len(harness.tokens["a"]) == 40
    harness.check_end()


def test_a_deadline_missed_while_running_ends_the_request_and_frees_its_blocks() -> None:
    harness = harness_of(knows=False)
    harness.add(make_request("a", [1] * 5, max_tokens=40, deadline_ms=20.0))
    harness.drain()
    assert isinstance(harness.refusals["a"], TimedOut)
    assert 0 < len(harness.tokens["a"]) < 40
    harness.check_end()


def test_a_request_past_its_ttft_yields_to_those_that_can_still_meet_theirs() -> None:
    harness = harness_of("edf", max_num_seqs=1, knows=False)
    harness.add(make_request("busy", [1] * 5, max_tokens=30))
    harness.step()
    harness.add(make_request("missed", [1] * 5, max_tokens=2, ttft_slo_ms=10.0))
    while harness.now_ms < 20:
        harness.step()
    harness.add(
        make_request("fresh", [1] * 5, max_tokens=2, ttft_slo_ms=500.0, arrival_ms=harness.now_ms)
    )
    harness.drain()
    names = [one.request_id for plan in harness.plans for one in plan.admissions]
    assert names == ["busy", "fresh", "missed"]
    harness.check_end()


def test_absurd_deadlines_of_ended_requests_are_not_kept() -> None:
    deadlines = Deadlines()
    for number in range(5_000):
        request = make_request(f"r{number}", [1], max_tokens=1, deadline_ms=1e12)
        sequence = SequenceState(
            request=request, arrival=number, limit=2, token_ids=request.prompt_ids
        )
        deadlines.note(sequence)
        sequence.alive = False
    assert len(deadlines._moments) < 200
    assert deadlines.passed(1e13) == []


def test_looking_for_missed_deadlines_touches_no_others() -> None:
    deadlines = Deadlines()
    for number in range(10):
        request = make_request(f"r{number}", [1], max_tokens=1, ttft_slo_ms=100.0 * (number + 1))
        deadlines.note(
            SequenceState(request=request, arrival=number, limit=2, token_ids=request.prompt_ids)
        )
    assert [sequence.arrival for sequence, _ in deadlines.passed(250.0)] == [0, 1]
    assert deadlines.passed(250.0) == []
    assert len(deadlines._moments) == 8


def test_a_rejection_before_any_timed_step_has_retry_after_of_a_second() -> None:
    harness = harness_of(max_num_seqs=1, max_queued_tokens=10, knows=False)
    harness.add(make_request("first", [1] * 8, max_tokens=2))
    with pytest.raises(OverloadedError, match=r"try again later$") as refused:
        harness.add(make_request("late", [1] * 8, max_tokens=2))
    assert refused.value.retry_after_s == 1.0


def test_an_answer_that_continues_is_ended_by_its_deadline_and_by_no_prediction() -> None:
    """The engine that it began at has accepted it."""
    harness = harness_of()
    known = np.array([5], np.int32)
    late = make_request("late", [1] * 50, max_tokens=100, deadline_ms=300.0)
    with pytest.raises(DeadlineMissed, match="the end of the answer"):
        harness.scheduler.add(late)
    harness.scheduler.add(replace(late, output_ids=known))
    slow = make_request("slow", [1] * 50, max_tokens=100, ttft_slo_ms=1.0)
    with pytest.raises(DeadlineMissed, match="the first token"):
        harness.scheduler.add(replace(slow, output_ids=known))

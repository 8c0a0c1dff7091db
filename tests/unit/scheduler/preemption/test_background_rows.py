"""Requests in the background: a share of the time beside others, all of it alone, never stuck."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.timeline import WaitReason
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.preemption.background_rows import SHARE
from quire.scheduler.step_budget import MIN_PROMPT_TOKENS
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import NUM_DRAWN, Harness, Setup
from tests.unit.scheduler.test_properties import draw_setup, run_case

# Where a row costs a tenth of a step, and where it costs next to nothing.
DEAR = LinearCost(fixed_ms=10.0, token_ms=1.0, position_ms=0.0)
CHEAP = LinearCost(fixed_ms=10.0, token_ms=0.001, position_ms=0.0)


def harness_of(prices: LinearCost, **setup: int) -> Harness:
    """Return a scheduler with constant prices."""
    harness = Harness(Setup(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=400, **setup))
    background = harness.scheduler._background
    speed = SpeedEstimate(prices)
    speed.note = lambda *_: None  # type: ignore[method-assign]
    background._speed = speed
    return harness


def add(harness: Harness, name: str, num_tokens: int, *, background: bool = False) -> None:
    request = make_request(name, [1, 2, 3, len(name)], max_tokens=num_tokens)
    harness.add(replace(request, background=background))


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_line_takes_its_share_beside_others(plans_in_flight: int) -> None:
    harness = harness_of(DEAR, plans_in_flight=plans_in_flight)
    add(harness, "line", 50, background=True)
    while len(harness.tokens["line"]) < 3:
        harness.step()
    made = len(harness.tokens["line"])
    add(harness, "other", 58)
    num_plans = len(harness.plans)
    while "other" not in harness.ends:
        harness.step()
    steps = len(harness.plans) - num_plans
    extra = len(harness.tokens["line"]) - made
    assert 1 <= extra <= 2 + steps * SHARE * DEAR.fixed_ms / DEAR.token_ms
    assert extra >= steps * SHARE * DEAR.fixed_ms / DEAR.token_ms - 8
    harness.drain()
    harness.check_end()


def test_rows_that_cost_next_to_nothing_all_advance() -> None:
    harness = harness_of(CHEAP)
    for number in range(3):
        add(harness, f"line {number}", 50, background=True)
    while len(harness.tokens["line 2"]) < 2:
        harness.step()
    made = len(harness.tokens["line 2"])
    add(harness, "other", 40)
    while "other" not in harness.ends:
        harness.step()
    assert len(harness.tokens["line 2"]) - made >= 38
    harness.drain()
    harness.check_end()


def test_a_line_waits_for_what_its_prompt_costs() -> None:
    harness = harness_of(DEAR, max_model_len=400)
    add(harness, "other", 200)
    while len(harness.tokens["other"]) < 2:
        harness.step()
    harness.add(replace(make_request("line", list(range(30)), max_tokens=4), background=True))
    steps = 0
    while not harness.tokens["line"]:
        harness.step()
        steps += 1
    assert 80 <= steps <= 150  # 34 ms of 0.3 ms a step, a first token included
    assert "other" not in harness.ends
    harness.drain()
    [report] = harness.timelines(["line"])
    assert any(span.reason is WaitReason.BACKGROUND for span in report.waits)
    harness.check_end()


def test_a_step_of_lines_alone_is_short() -> None:
    harness = harness_of(DEAR, max_model_len=400)
    harness.add(replace(make_request("line", list(range(200)), max_tokens=4), background=True))
    harness.drain()
    assert max(plan.num_tokens for plan in harness.plans) == MIN_PROMPT_TOKENS
    fast = harness_of(LinearCost(fixed_ms=50.0, token_ms=1.0, position_ms=0.0), max_model_len=400)
    fast.add(replace(make_request("line", list(range(200)), max_tokens=4), background=True))
    fast.drain()
    assert max(plan.num_tokens for plan in fast.plans) == 50
    fast.check_end()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_lines_have_all_of_the_time_while_others_are_paused(plans_in_flight: int) -> None:
    """Such as those of a client that is stopped."""
    harness = harness_of(DEAR, plans_in_flight=plans_in_flight)
    names = [f"line {number}" for number in range(3)]
    for name in names:
        add(harness, name, 50, background=True)
    while len(harness.tokens[names[-1]]) < 2:
        harness.step()
    add(harness, "other", 20)
    while len(harness.tokens["other"]) < 2:
        harness.step()
    harness.scheduler.hold("other", is_held=True)
    for _ in range(plans_in_flight):
        harness.step()
    made = [len(harness.tokens[name]) for name in names]
    for _ in range(10):
        harness.step()
    assert [len(harness.tokens[name]) for name in names] == [one + 10 for one in made]
    harness.scheduler.hold("other", is_held=False)
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize(("max_num_seqs", "num_blocks"), [(1, 64), (8, 6)])
def test_a_request_without_room_does_not_stop_the_lines(max_num_seqs: int, num_blocks: int) -> None:
    """All slots or blocks are the line's: it goes on until they are free."""
    harness = Harness(Setup(max_num_seqs=max_num_seqs, num_blocks=num_blocks, block_size=4))
    add(harness, "line", 19, background=True)
    while len(harness.tokens["line"]) < 8:
        harness.step()
    harness.add(make_request("other", list(range(15)), max_tokens=5))
    harness.drain()
    harness.check_end()


def test_without_such_requests_nothing_of_it_runs() -> None:
    harness = Harness(Setup())
    add(harness, "other", 5)
    harness.drain()
    assert not harness.scheduler._background.is_active
    add(harness, "line", 5, background=True)
    harness.drain()
    harness.step()
    assert not harness.scheduler._background._live or not harness.scheduler.has_work


@settings(max_examples=NUM_DRAWN, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False), num_operations=st.integers(0, 60))
def test_held_and_background_requests_get_their_tokens(random: Random, num_operations: int) -> None:
    run_case(random, draw_setup(random), num_operations, hold_share=0.2)

"""Simultaneous prompts with a common prefix: the prefix is computed once."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

SHARED, OWN, REQUESTS, BLOCK = 1024, 32, 16, 16


def sixteen(budget: int, in_flight: int, *, caching: bool = True) -> Harness:
    """Run sixteen simultaneous requests with a shared prefix to their ends."""
    harness = Harness(
        Setup(
            num_blocks=1200,
            block_size=BLOCK,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=budget,
            max_model_len=2048,
            plans_in_flight=in_flight,
            prefix_caching=caching,
        )
    )
    for number in range(REQUESTS):
        prompt = [*(at % 90 for at in range(SHARED)), *([100 + number] * OWN)]
        harness.add(make_request(f"r{number}", prompt, max_tokens=1))
    harness.drain()
    harness.check_end()
    return harness


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [64, 256, 2048, 20_000])
def test_a_prefix_shared_by_sixteen_is_computed_once(budget: int, in_flight: int) -> None:
    harness = sixteen(budget, in_flight)
    computed = sum(plan.num_tokens for plan in harness.plans)
    assert computed == SHARED + REQUESTS * OWN
    assert computed <= REQUESTS * (SHARED + OWN) / 8


def test_without_prefix_caching_each_computes_its_whole_prompt() -> None:
    harness = sixteen(256, 1, caching=False)
    assert sum(plan.num_tokens for plan in harness.plans) == REQUESTS * (SHARED + OWN)


def test_waiting_for_a_prefix_costs_one_step_if_a_step_fits_all() -> None:
    alone, shared = sixteen(20_000, 1, caching=False), sixteen(20_000, 1)
    assert len(shared.plans) == len(alone.plans) + 1


def test_a_request_waiting_for_a_prefix_lets_others_pass() -> None:
    harness = Harness(Setup(max_num_batched_tokens=64))
    harness.add(make_request("first", range(20), max_tokens=3))
    harness.add(make_request("alike", range(20), max_tokens=3))
    harness.add(make_request("other", range(50, 70), max_tokens=3))
    harness.step()
    assert [a.request_id for a in harness.plans[0].admissions] == ["first", "other"]
    harness.drain()
    assert harness.ends["alike"].cached_tokens == 20
    harness.check_end()


def test_no_request_waits_for_an_unscheduled_block() -> None:
    """The first is cut by the budget; the second, under another salt for its start, fits."""
    harness = Harness(Setup(max_num_batched_tokens=8))
    harness.add(make_request("first", range(20), max_tokens=3))
    harness.step()
    harness.add(make_request("alike", range(20), max_tokens=3))
    harness.drain()
    assert harness.ends["alike"].cached_tokens >= 16
    harness.check_end()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_waiting_request_computes_the_prefix_if_the_first_is_aborted(in_flight: int) -> None:
    harness = Harness(Setup(max_num_batched_tokens=64, plans_in_flight=in_flight, run_late=True))
    harness.add(make_request("first", range(20), max_tokens=3))
    harness.add(make_request("alike", range(20), max_tokens=3))
    plan = harness.scheduler.schedule(0.0)
    assert plan is not None
    harness.scheduler.abort("first")
    again = harness.scheduler.schedule(0.0)
    if in_flight == 2:
        assert again is not None
        assert [a.request_id for a in again.admissions] == ["alike"]


def test_no_request_waits_for_less_than_half_of_what_it_could_compute() -> None:
    harness = Harness(Setup(max_num_batched_tokens=64))
    harness.add(make_request("first", range(20), max_tokens=3))
    harness.add(make_request("alike", [*range(4), *range(50, 62)], max_tokens=3))
    harness.add(make_request("more alike", [*range(8), *range(70, 78)], max_tokens=3))
    harness.step()
    assert [a.request_id for a in harness.plans[0].admissions] == ["first", "alike"]
    harness.drain()
    assert harness.ends["more alike"].cached_tokens == 8
    harness.check_end()


def test_scored_prompts_do_not_wait() -> None:
    harness = Harness(Setup(max_num_batched_tokens=64))
    harness.add(make_request("first", range(20), max_tokens=3))
    harness.add(make_request("scored", range(20), max_tokens=3, prompt_logprobs=1))
    harness.step()
    assert [a.request_id for a in harness.plans[0].admissions] == ["first", "scored"]
    harness.drain()
    harness.check_end()

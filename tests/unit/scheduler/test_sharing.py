"""Prefix hits and forks: what is shared, what is recomputed, and when it may be found."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


def run_one(harness: Harness, name: str, prompt: range, **parameters: int) -> int:
    """Run a request to its end; return how many tokens of its prompt were computed."""
    before = len(harness.plans)
    harness.add(make_request(name, prompt, max_tokens=2, **parameters))
    harness.drain()
    return sum(plan.num_tokens for plan in harness.plans[before:]) - 1


def test_a_second_prompt_computes_only_the_difference() -> None:
    harness = Harness(Setup())
    assert run_one(harness, "a", range(11)) == 11
    assert run_one(harness, "b", range(14)) == 6
    assert harness.ends["a"].cached_tokens == 0
    assert harness.ends["b"].cached_tokens == 8
    harness.check_end()


def test_a_fully_cached_prompt_recomputes_its_last_token_without_storing_it() -> None:
    harness = Harness(Setup())
    run_one(harness, "a", range(8))
    assert run_one(harness, "b", range(8)) == 1
    plan = harness.plans[-2]
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([7], [1])
    assert plan.store_from.tolist() == [8]
    assert plan.samples.tolist() == [True]
    assert harness.ends["b"].cached_tokens == 8
    harness.check_end()


def test_prompts_are_found_while_their_request_still_runs() -> None:
    harness = Harness(Setup())
    harness.add(make_request("a", range(12), max_tokens=20))
    harness.step()
    harness.add(make_request("b", range(12), max_tokens=2, seed=3))
    harness.drain()
    assert harness.ends["b"].cached_tokens == 12
    harness.check_end()


def test_generated_tokens_are_found_too() -> None:
    harness = Harness(Setup())
    harness.add(make_request("a", range(6), max_tokens=12))
    harness.drain()
    history = [*range(6), *harness.tokens["a"]]
    harness.add(make_request("b", history[:17], max_tokens=2))
    harness.drain()
    assert harness.ends["b"].cached_tokens == 16
    harness.check_end()


def test_nothing_is_found_across_salts_or_without_prefix_caching() -> None:
    harness = Harness(Setup())
    run_one(harness, "a", range(8))
    harness.add(make_request("b", range(8), max_tokens=2, salt="tenant"))
    harness.drain()
    assert harness.ends["b"].cached_tokens == 0
    harness = Harness(Setup(prefix_caching=False))
    run_one(harness, "a", range(8))
    assert run_one(harness, "b", range(8)) == 8
    assert harness.scheduler.stats().prefix_queried_tokens_total == 0


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_blocks_of_an_aborted_step_are_not_found(plans_in_flight: int) -> None:
    harness = Harness(Setup(max_num_batched_tokens=8, plans_in_flight=plans_in_flight))
    harness.add(make_request("a", range(24), max_tokens=2))
    harness.step()
    harness.schedule()
    harness.abort("a")
    harness.drain()
    harness.add(make_request("b", range(24), max_tokens=2))
    harness.drain()
    assert harness.ends["b"].cached_tokens == 8
    harness.check_end()


def test_blocks_of_a_failed_row_are_not_found() -> None:
    harness = Harness(Setup(max_num_batched_tokens=8))
    harness.add(make_request("a", range(20), max_tokens=2))
    harness.step()
    harness.schedule(fail_rows=[0])
    harness.update()
    assert harness.ends["a"].error is not None
    harness.add(make_request("b", range(20), max_tokens=2))
    harness.drain()
    assert harness.ends["b"].cached_tokens == 8
    harness.check_end()


def add_group(harness: Harness, prompt: range, streams: int, max_tokens: int = 8) -> None:
    for stream in range(streams):
        harness.add(
            make_request(
                f"g{stream}", prompt, max_tokens=max_tokens, seed=9, group="g", stream=stream
            )
        )


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [8, 10])
def test_forks_wait_for_their_leader_and_compute_one_token_of_the_prompt(
    prefix_caching: bool, length: int
) -> None:
    harness = Harness(Setup(max_num_batched_tokens=6, prefix_caching=prefix_caching))
    add_group(harness, range(length), 3)
    harness.step()
    assert harness.scheduler.stats().running == 1
    harness.step()
    harness.schedule()
    plan = harness.plans[-1]
    assert [admission.stream for admission in plan.admissions] == [1, 2]
    assert plan.starts.tolist() == [length, length - 1, length - 1]
    assert plan.counts.tolist() == [1, 1, 1]
    assert plan.store_from.tolist() == [length] * 3
    assert len(plan.copy_from) == (2 if length % 4 else 0)
    harness.drain()
    harness.check_end()
    assert len({tuple(harness.tokens[f"g{stream}"]) for stream in range(3)}) > 1


def test_a_fork_never_waits_for_an_ended_leader() -> None:
    harness = Harness(Setup(max_num_batched_tokens=4))
    add_group(harness, range(10), 3)
    harness.step()
    harness.abort("g0")
    harness.drain()
    harness.check_end()
    assert len(harness.tokens["g1"]) == 8


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_next_stream_leads_if_the_leader_ends_before_its_prompt_is_computed(
    prefix_caching: bool, steps: int
) -> None:
    harness = Harness(Setup(max_num_seqs=16, num_blocks=128, prefix_caching=prefix_caching))
    add_group(harness, range(40), 9, max_tokens=4)
    harness.add(make_request("other", range(50, 54), max_tokens=1))
    for _ in range(min(steps, 2)):
        harness.step()
    harness.abort("g0")
    if steps == 3:  # the new leader is aborted, too
        harness.step()
        harness.abort("g1")
    before = len(harness.plans)
    harness.drain()
    rows = sum(plan.num_tokens for plan in harness.plans[before:])
    assert rows <= 40 + 4 + 8 * 4  # one prompt, the other's, a row per fork and output token
    harness.check_end()


def test_a_leader_that_ends_with_its_first_token_leaves_its_prompt_findable() -> None:
    harness = Harness(Setup())
    add_group(harness, range(10), 2, max_tokens=1)
    harness.drain()
    assert harness.ends["g1"].cached_tokens == 8
    harness.check_end()


def test_others_pass_forks_that_wait_for_their_leader() -> None:
    harness = Harness(Setup(max_num_batched_tokens=8))
    add_group(harness, range(12), 2)
    harness.add(make_request("other", range(50, 53), max_tokens=2))
    harness.step()
    harness.schedule()
    assert [a.request_id for a in harness.plans[-1].admissions] == ["other"]
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_forks_and_their_leader_survive_a_pool_too_small_for_all(plans_in_flight: int) -> None:
    harness = Harness(Setup(num_blocks=7, max_num_seqs=4, plans_in_flight=plans_in_flight))
    add_group(harness, range(10), 4, max_tokens=14)
    harness.drain()
    harness.check_end()
    assert harness.scheduler.stats().preemptions_total > 0

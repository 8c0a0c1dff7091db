"""Blocks evicted to a tier and loaded back: every request gets the tokens it gets alone.

Copies end in random order, some loads fail, tiers break, requests are aborted meanwhile. The fake
tier detects blocks that are saved before they are complete, or loaded from a place without them.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.records import FinishReason
from tests.drawn import examples
from tests.unit.scheduler.fake_worker import VOCAB, make_request
from tests.unit.scheduler.harness import NUM_DRAWN, Harness, Setup
from tests.unit.scheduler.test_properties import COST, LastCome, add_group, draw_setup

MET = ("preempted", "moved", "saved", "fetched", "broken", "vanished")


def run_case(random: Random) -> Harness:
    """Run drawn operations with a tier, and check the end."""
    setup = replace(
        draw_setup(random),
        prefix_caching=True,
        num_blocks=random.choice([6, 8, 12]),
        block_size=random.choice([2, 2, 4]),
        max_num_batched_tokens=random.choice([8, 32]),
        tier_places=random.choice([3, 8, 64, 64]),
    )
    harness = Harness(setup, cost=COST if setup.step_budget_ms else None)
    prefixes = [[random.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    breaks_at = random.randrange(400)
    for number in range(120):
        kind = random.randrange(100)
        if kind < 15:
            add_group(random, harness, f"group-{number}", random.choice(prefixes))
        elif kind < 20 and harness.requests:
            harness.abort(random.choice(sorted(harness.requests)))
        elif kind < 50:
            harness.schedule()
        elif kind < 70:
            harness.arrive(random, most=random.randrange(1, 6))
        else:
            harness.update()
        if number == breaks_at:
            harness.tier.is_broken = True
    harness.drain()
    harness.check_end()
    return harness


@settings(max_examples=NUM_DRAWN, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_requests_match_their_run_alone_under_any_transfers(seed: int) -> None:
    run_case(Random(seed))


def test_beams_take_blocks_reserved_for_a_waiting_request() -> None:
    """Fetched blocks of a waiting request left too few blocks for beams to take their slots."""
    run_case(Random(23470032))


def test_drawn_cases_reach_their_coverage() -> None:
    cases, met = examples(60), dict.fromkeys(MET, 0)
    for seed in range(cases):
        harness = run_case(Random(seed))
        stats = harness.scheduler.stats()
        met["preempted"] += stats.preemptions_total > 0
        met["moved"] += stats.preemptions_moved_total > 0
        met["saved"] += harness.tier.num_saved > 0
        met["fetched"] += harness.tier.num_fetched > 0
        met["broken"] += harness.tier.is_broken
        reasons = {end.finish_reason for end in harness.ends.values()}
        met["vanished"] += FinishReason.ABORT in reasons
    print({name: f"{count / cases:.0%}" for name, count in met.items()})
    assert met["saved"] >= 0.8 * cases
    assert met["fetched"] >= 0.12 * cases
    assert met["moved"] >= 0.2 * cases
    assert met["broken"] >= 0.05 * cases
    assert met["vanished"] >= 0.3 * cases


def prompt(number: int, length: int = 33) -> list[int]:
    """Return a prompt of eight whole blocks of 4 and a token."""
    random = Random(number)
    return [random.randrange(VOCAB) for _ in range(length)]


def ask(harness: Harness, name: str, number: int, **more: int) -> None:
    harness.add(make_request(name, prompt(number), max_tokens=more.get("max_tokens", 3)))


def until(harness: Harness, done) -> None:  # type: ignore[no-untyped-def]
    """Run steps and transfers until the condition holds."""
    for turn in range(300):
        if done():
            return
        assert harness.step() or harness.arrive(Random(turn), most=1)
    raise AssertionError("it never held")


def tiered(**more: Any) -> Harness:
    """Return a pool for one and a half prompts, with a tier for many."""
    return Harness(Setup(**{"num_blocks": 13, "max_model_len": 40, "tier_places": 64, **more}))


def saved_then_evicted(harness: Harness) -> None:
    """Save prompt 0 to the tier and evict it from the pool."""
    for name, number in (("first", 0), ("other", 1), ("third", 2)):
        ask(harness, name, number)
        harness.drain()
    assert harness.tier.num_saved >= 24
    harness.plans.clear()


def test_an_evicted_prompt_is_loaded_instead_of_recomputed() -> None:
    harness = tiered()
    saved_then_evicted(harness)
    ask(harness, "again", 0)
    harness.drain()
    computed = sum(plan.num_tokens for plan in harness.plans)
    stats = harness.scheduler.stats()
    lost = stats.tier_bad_blocks_total
    assert stats.tier_fetched_blocks_total == 8 - lost
    assert computed <= 33 - 8 * 4 + 2 + 4 * 8 * (lost > 0)
    harness.check_end()


def test_aborted_beams_give_back_the_blocks_they_waited_for() -> None:
    """A search that ended in the queue kept its loaded blocks for good."""
    harness = tiered()
    saved_then_evicted(harness)
    beams = make_request(
        "beams", prompt(0), max_tokens=3, n=2, best_of=2, use_beam_search=True, temperature=0.0
    )
    harness.add(beams)
    assert harness.step()
    assert harness.tier.under_way
    harness.abort("beams")
    harness.drain()
    harness.check_end()


def test_blocks_kept_for_one_request_are_released_and_used_in_one_step() -> None:
    """A plan without rows was made in between, so that an idle engine waited before its next."""
    harness = tiered(policy=LastCome)
    saved_then_evicted(harness)
    ask(harness, "again", 0)
    until(harness, lambda: harness.scheduler._kv_loads.any_waits)
    while harness.tier.under_way:
        harness.arrive(Random(1))  # no copy fails
    assert harness.cache.num_free == 5
    ask(harness, "urgent", 7)
    assert harness.step()
    assert harness.plans[-1].num_tokens
    harness.drain()
    harness.check_end()


def test_others_continue_while_one_waits_for_its_blocks() -> None:
    harness = tiered(max_num_seqs=2, num_blocks=24)
    saved_then_evicted(harness)
    for number in range(5, 9):  # evict everything from the larger pool too
        ask(harness, f"push-{number}", number)
        harness.drain()
    ask(harness, "again", 0)
    assert harness.step()
    assert harness.tier.under_way
    ask(harness, "busy", 20)
    for _ in range(12):
        assert harness.step() or "busy" in harness.ends
    assert "busy" in harness.ends
    assert "again" not in harness.ends
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("arrives", [False, True])
def test_aborting_a_request_during_a_transfer_leaks_no_block(
    arrives: bool,
) -> None:
    harness = tiered()
    saved_then_evicted(harness)
    ask(harness, "again", 0)
    assert harness.step()
    assert any(tier == 0 for tier, *_ in harness.tier.under_way)
    if arrives:
        until(harness, lambda: not harness.tier.under_way)
    harness.abort("again")
    harness.drain()
    assert harness.cache.num_free == harness.cache.num_blocks
    assert harness.scheduler.check_integrity() == []
    harness.check_end()


def test_a_broken_tier_only_costs_recomputation() -> None:
    harness = tiered()
    saved_then_evicted(harness)
    ask(harness, "again", 0)
    assert harness.step()
    harness.tier.is_broken = True
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.tier_failures_total == 1
    assert stats.tier_blocks_total == 0
    ask(harness, "later", 3)
    harness.drain()
    assert all(plan.tier_copies is None for plan in harness.plans[-3:])
    harness.check_end()


def test_blocks_loaded_for_a_waiting_request_yield_to_running_ones() -> None:
    harness = tiered(num_blocks=18, max_num_seqs=2, max_model_len=64)
    saved_then_evicted(harness)
    for number in (5, 6, 7):
        ask(harness, f"push-{number}", number)
        harness.drain()
    harness.add(make_request("grows", prompt(30, 20), max_tokens=44))
    until(harness, lambda: harness.cache.num_free <= 12)
    ask(harness, "again", 0)
    until(harness, lambda: harness.scheduler.stats().tier_fetched_blocks_total > 0)
    until(harness, lambda: "grows" in harness.ends)
    harness.drain()
    assert harness.ends["grows"].num_preemptions == 0
    harness.check_end()


def test_after_a_flush_nothing_saved_before_is_loaded() -> None:
    harness = tiered()
    saved_then_evicted(harness)
    harness.cache.flush()
    ask(harness, "again", 0)
    harness.drain()
    assert harness.scheduler.stats().tier_fetched_blocks_total == 0
    harness.check_end()

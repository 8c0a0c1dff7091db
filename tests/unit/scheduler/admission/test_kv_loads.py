"""Blocks that leave the pool for a tier and come back: everybody gets the tokens it gets alone.

Copies end in drawn orders, some kv_loads bring nothing, tiers break, clients vanish meanwhile. The
tier of these tests finds a block that is saved before it is whole, or asked for where it is not.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.records import FinishReason
from tests.unit.scheduler.fake_worker import VOCAB, make_request
from tests.unit.scheduler.harness import Harness, Setup
from tests.unit.scheduler.test_properties import COST, add_group, draw_setup

MET = ("preempted", "moved", "saved", "fetched", "broken", "vanished")


def run_case(random: Random) -> Harness:
    """Drawn operations with a tier; then all has ended as it should."""
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_whatever_moves_each_request_gets_what_it_gets_alone(seed: int) -> None:
    run_case(Random(seed))


def test_beams_take_the_blocks_that_are_kept_for_a_request_which_waits() -> None:
    """Fetched blocks of a waiting request left too few for beams to take their seats."""
    run_case(Random(23470032))


def test_drawn_cases_meet_what_they_are_meant_to_meet() -> None:
    cases, met = 60, dict.fromkeys(MET, 0)
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
    """A prompt of eight whole blocks of 4 and a token."""
    random = Random(number)
    return [random.randrange(VOCAB) for _ in range(length)]


def ask(harness: Harness, name: str, number: int, **more: int) -> None:
    harness.add(make_request(name, prompt(number), max_tokens=more.get("max_tokens", 3)))


def until(harness: Harness, done) -> None:  # type: ignore[no-untyped-def]
    """Steps and arrivals until that holds."""
    for turn in range(300):
        if done():
            return
        assert harness.step() or harness.arrive(Random(turn), most=1)
    raise AssertionError("it never held")


def tiered(**more: int) -> Harness:
    """A pool for one prompt and a half, a tier for many."""
    return Harness(Setup(**{"num_blocks": 13, "max_model_len": 40, "tier_places": 64, **more}))


def saved_then_evicted(harness: Harness) -> None:
    """Prompt 0 lies in the tier and no longer in the pool."""
    for name, number in (("first", 0), ("other", 1), ("third", 2)):
        ask(harness, name, number)
        harness.drain()
    assert harness.tier.num_saved >= 24
    harness.plans.clear()


def test_a_prompt_that_left_the_pool_is_fetched_and_not_computed_again() -> None:
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


def test_others_go_on_while_one_waits_for_its_blocks() -> None:
    harness = tiered(max_num_seqs=2, num_blocks=24)
    saved_then_evicted(harness)
    for number in range(5, 9):  # push everything out of the larger pool too
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
def test_a_client_that_vanishes_while_its_blocks_are_under_way_leaves_no_block_behind(
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


def test_a_tier_that_breaks_while_somebody_waits_costs_computing_and_nothing_else() -> None:
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


def test_what_was_fetched_for_who_waits_gives_way_to_who_runs() -> None:
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


def test_after_a_flush_nothing_saved_before_is_fetched() -> None:
    harness = tiered()
    saved_then_evicted(harness)
    harness.cache.flush()
    ask(harness, "again", 0)
    harness.drain()
    assert harness.scheduler.stats().tier_fetched_blocks_total == 0
    harness.check_end()

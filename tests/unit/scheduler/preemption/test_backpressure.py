"""Held requests are paused: they cost other requests nothing, lose nothing, and resume in place."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.records import FinishReason
from tests.drawn import examples
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import NUM_DRAWN, Harness, Setup
from tests.unit.scheduler.test_properties import draw_setup, run_case


def begun(harness: Harness, *names: str, **fields: object) -> None:
    """Return requests that have made two tokens or more."""
    for name in names:
        given = {"max_tokens": 20, **fields}
        harness.add(make_request(name, [1, 2, len(name)], **given))  # type: ignore[arg-type]
    while min(len(harness.tokens[name]) for name in names) < 2:
        harness.step()


@pytest.mark.parametrize("plans_in_flight", [1, 2, 3])
def test_a_held_request_makes_no_tokens_until_it_is_released(plans_in_flight: int) -> None:
    harness = Harness(Setup(plans_in_flight=plans_in_flight))
    begun(harness, "slow", "other")
    harness.scheduler.hold("slow", is_held=True)
    harness.check()
    for _ in range(plans_in_flight):  # plans in flight when it was held
        harness.step()
    made = len(harness.tokens["slow"])
    while "other" not in harness.ends:
        harness.step()
    assert len(harness.tokens["slow"]) == made
    assert harness.ends["other"].finish_reason is FinishReason.LENGTH
    assert not harness.step()  # only waiting is left
    assert harness.scheduler.has_work
    harness.scheduler.hold("slow", is_held=False)
    harness.drain()
    harness.check_end()


def test_its_slot_and_its_blocks_are_available_to_others() -> None:
    harness = Harness(Setup(max_num_seqs=1, num_blocks=8, block_size=4))
    begun(harness, "slow")
    harness.scheduler.hold("slow", is_held=True)
    harness.add(make_request("next", list(range(20)), max_tokens=10))  # needs all the blocks
    while "next" not in harness.ends:
        assert harness.step()
    stats = harness.scheduler.stats()
    assert (stats.held, stats.held_total, stats.running, stats.waiting) == (1, 1, 0, 0)
    assert stats.blocks_used == 0
    assert stats.preemptions_total == 0  # its blocks were not taken by preemption
    harness.scheduler.hold("slow", is_held=False)
    harness.drain()
    harness.check_end()
    assert harness.ends["slow"].num_preemptions == 0


def test_a_released_request_computes_only_what_was_evicted() -> None:
    harness = Harness(Setup(num_blocks=64, block_size=4, max_num_batched_tokens=64))
    harness.add(make_request("slow", list(range(40)), max_tokens=20))
    while len(harness.tokens["slow"]) < 3:
        harness.step()
    harness.scheduler.hold("slow", is_held=True)
    assert not harness.step()
    harness.scheduler.hold("slow", is_held=False)
    num_plans = len(harness.plans)
    harness.step()
    # 43 known, of which the last token is never stored: 10 blocks of 4 are found, 2 to 3 computed.
    assert harness.plans[num_plans].num_tokens <= 4
    harness.drain()
    harness.check_end()


def test_a_waiting_request_is_held_and_returns_to_its_position() -> None:
    harness = Harness(Setup(max_num_seqs=1))
    begun(harness, "first")
    for name in ("second", "third"):
        harness.add(make_request(name, [3, 4], max_tokens=4))
    harness.scheduler.hold("second", is_held=True)
    assert harness.scheduler.stats().waiting == 1
    while "third" not in harness.ends:
        harness.step()
    assert harness.tokens["second"] == []
    harness.add(make_request("fourth", [5, 6], max_tokens=4))
    harness.scheduler.hold("second", is_held=False)
    while "second" not in harness.ends:
        harness.step()
    assert harness.tokens["fourth"] == []
    harness.drain()
    harness.check_end()


def test_repeated_holds_and_unknown_requests_change_nothing() -> None:
    harness = Harness(Setup())
    begun(harness, "one")
    scheduler = harness.scheduler
    scheduler.hold("nobody", is_held=True)
    scheduler.hold("one", is_held=False)
    for is_held in (True, True, False, False, True, False):
        scheduler.hold("one", is_held=is_held)
    assert scheduler.stats().held == 0
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_held_request_can_be_aborted(plans_in_flight: int, steps_before: int) -> None:
    harness = Harness(Setup(plans_in_flight=plans_in_flight))
    begun(harness, "slow", "other")
    harness.scheduler.hold("slow", is_held=True)
    for _ in range(steps_before):
        harness.step()
    harness.abort("slow")
    assert harness.scheduler.stats().held == 0
    harness.drain()
    harness.check_end()


def test_beams_are_not_held() -> None:
    """They emit nothing before their end, so no reader delays them."""
    harness = Harness(Setup())
    fields = {"n": 2, "best_of": 2, "use_beam_search": True, "temperature": 0.0}
    for stream in range(2):
        request = make_request(
            f"b{stream}", [1, 2], max_tokens=6, group="b", stream=stream, **fields
        )
        harness.add(request)
    harness.scheduler.hold("b0", is_held=True)
    harness.drain()
    harness.check_end()


@settings(max_examples=NUM_DRAWN, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False), num_operations=st.integers(0, 60))
def test_holds_change_no_token_and_the_audit_passes(random: Random, num_operations: int) -> None:
    run_case(random, draw_setup(random), num_operations, hold_share=0.3)


def test_drawn_cases_hold_requests_and_preempt_held_ones() -> None:
    """The property's precondition does occur."""
    held = preempted = 0
    cases = examples(75)
    for seed in range(cases):
        random = Random(f"holding {seed}")
        stats = run_case(random, draw_setup(random), 60, hold_share=0.3).scheduler.stats()
        held += stats.held_total
        preempted += stats.preemptions_total
    assert held > cases
    assert preempted > cases / 2


def test_requests_of_a_stopped_client_pause_and_those_of_others_go_on() -> None:
    harness = Harness(Setup(max_num_seqs=3))
    begun(harness, "1/a", "1/b", "2/a")
    harness.add(make_request("1/waits", [7, 8], max_tokens=4))
    harness.scheduler.hold_client("1/", is_held=True, now_ms=harness.now_ms)
    made = {name: len(harness.tokens[name]) for name in ("1/a", "1/b")}
    while "2/a" not in harness.ends:
        harness.step()
    assert {name: len(harness.tokens[name]) for name in made} == made
    assert harness.tokens["1/waits"] == []
    assert not harness.step()
    assert harness.scheduler.stats().held == 3
    harness.abort("1/b")
    harness.scheduler.hold_client("2/", is_held=False, now_ms=harness.now_ms)
    assert not harness.step()
    harness.scheduler.hold_client("1/", is_held=False, now_ms=harness.now_ms)
    harness.drain()
    harness.check_end()
    assert harness.scheduler.stats().held == 0


def test_a_client_that_goes_on_keeps_those_paused_that_its_readers_do_not_read() -> None:
    harness = Harness(Setup())
    begun(harness, "before", "meanwhile", "stopped")
    scheduler = harness.scheduler
    scheduler.hold("before", is_held=True)
    scheduler.hold_client("", is_held=True, now_ms=harness.now_ms)
    scheduler.hold("meanwhile", is_held=True)
    scheduler.hold_client("", is_held=False, now_ms=harness.now_ms)
    while "stopped" not in harness.ends:
        harness.step()
    assert not harness.step()
    assert scheduler.stats().held == 2
    for name in ("before", "meanwhile"):
        scheduler.hold(name, is_held=False)
    harness.drain()
    harness.check_end()

"""Preemption when blocks run out: the victim, what is kept, and that every request finishes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import each_case
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


def run_until_preempted(harness: Harness) -> None:
    for _ in range(200):
        if harness.scheduler.stats().preemptions_total:
            return
        assert harness.step()
    raise AssertionError("nobody was preempted")


def fill(harness: Harness, number: int, *, max_tokens: int = 24) -> None:
    for name in "abcdef"[:number]:
        prompt = [ord(name) % 11, 1, 2, 3, 4, 5]
        harness.add(make_request(name, prompt, max_tokens=max_tokens, seed=ord(name)))


def test_the_last_admitted_is_preempted_and_readmitted_first() -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=2))
    fill(harness, 3)
    run_until_preempted(harness)
    harness.drain()
    order = [a.request_id for plan in harness.plans for a in plan.admissions]
    assert order[:3] == ["a", "b", "b"]
    assert order.index("c") > order.index("b", 2)
    harness.check_end()


def test_a_readmission_carries_all_known_tokens_and_the_length_of_the_prompt() -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=2, prefix_caching=False))
    fill(harness, 2)
    harness.drain()
    back = [a for plan in harness.plans for a in plan.admissions if a.request_id == "b"][1]
    assert back.num_prompt_tokens == 6
    assert len(back.token_ids) > 6
    known = [*harness.requests["b"].prompt_ids.tolist(), *harness.tokens["b"]]
    assert back.token_ids.tolist() == known[: len(back.token_ids)]
    assert harness.ends["b"].num_preemptions == 1
    assert harness.ends["a"].num_preemptions == 0
    harness.check_end()


def test_a_preempted_request_finds_its_blocks_that_were_not_reallocated() -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=2))
    fill(harness, 2, max_tokens=20)
    run_until_preempted(harness)
    hits = harness.scheduler.stats().prefix_hit_tokens_total
    harness.drain()
    assert harness.scheduler.stats().prefix_hit_tokens_total > hits
    assert harness.ends["b"].cached_tokens == 0
    harness.check_end()


@pytest.mark.parametrize("plans_in_flight", [2, 3])
def test_a_victim_named_in_flight_is_preempted_only_after_its_results(
    plans_in_flight: int,
) -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=2, plans_in_flight=plans_in_flight))
    fill(harness, 2)
    while harness.scheduler.has_work:
        before = harness.scheduler.stats().preemptions_total
        slots = {sequence.slot for sequence in harness.scheduler._requests.sequences.values()}
        named = {slot for plan, _, _ in harness.out for slot in plan.slots.tolist()}
        harness.schedule()
        if harness.scheduler.stats().preemptions_total > before:
            gone = slots - {
                sequence.slot for sequence in harness.scheduler._requests.sequences.values()
            }
            assert not gone & named
        if len(harness.out) == plans_in_flight or not harness.schedule():
            harness.update()
    assert harness.scheduler.stats().preemptions_total > 0
    harness.check_end()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_request_alone_finishes_in_a_pool_that_just_holds_it(
    plans_in_flight: int, prefix_caching: bool
) -> None:
    setup = Setup(num_blocks=4, plans_in_flight=plans_in_flight, prefix_caching=prefix_caching)
    harness = Harness(setup)
    harness.add(make_request("a", range(7), max_tokens=40))
    harness.drain()
    harness.check_end()
    assert len(harness.tokens["a"]) == 16 - 7
    assert harness.scheduler.stats().preemptions_total == 0


@each_case("plans_in_flight", [1, 2, 3])
@each_case("max_num_batched_tokens", [2, 5, 64])
def test_many_requests_in_a_pool_for_one_all_finish(
    plans_in_flight: int, max_num_batched_tokens: int
) -> None:
    setup = Setup(
        num_blocks=6,
        max_num_seqs=6,
        plans_in_flight=plans_in_flight,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    harness = Harness(setup)
    fill(harness, 6, max_tokens=18)
    harness.drain()
    harness.check_end()
    assert harness.scheduler.stats().preemptions_total > 0


def test_the_oldest_running_request_is_never_preempted() -> None:
    harness = Harness(Setup(num_blocks=6, max_num_seqs=6, prefix_caching=False))
    fill(harness, 6, max_tokens=18)
    while harness.scheduler.has_work:
        active = harness.scheduler._batch.active
        oldest = harness.scheduler._batch.sequence(int(active[0])) if len(active) else None
        count = oldest.preemption.count if oldest else 0
        harness.step()
        if oldest is not None:
            assert oldest.preemption.count == count
    harness.check_end()


def test_new_requests_wait_for_blocks_of_all_known_tokens_and_a_margin() -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64))
    harness.add(make_request("a", range(14), max_tokens=10))
    harness.add(make_request("b", range(20, 40), max_tokens=4))
    harness.schedule()
    assert harness.scheduler.stats().running == 1
    assert harness.scheduler.stats().waiting == 1
    harness.drain()
    assert harness.scheduler.stats().preemptions_total == 0
    harness.check_end()


def test_a_chunked_prompt_keeps_its_claim_on_unallocated_blocks() -> None:
    harness = Harness(Setup(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=6))
    harness.add(make_request("a", range(24), max_tokens=2))
    harness.add(make_request("b", range(30, 42), max_tokens=2))
    harness.drain()
    assert harness.scheduler.stats().preemptions_total == 0
    harness.check_end()


def test_fcfs_preempts_the_last_admitted_but_spares_the_nearly_finished() -> None:
    harness = Harness(Setup(num_blocks=64, max_num_seqs=3, max_num_batched_tokens=64))
    for name, max_tokens in (("a", 40), ("b", 10), ("c", 40)):
        harness.add(make_request(name, [1, 2, 3], max_tokens=max_tokens))
    harness.step()
    scheduler = harness.scheduler
    slots = [scheduler._requests.sequences[name].slot for name in "abc"]
    offered = scheduler._policy.victims(np.array(slots, np.intp)).tolist()
    assert offered == [slots[2], slots[0], slots[1]]

"""Tenants: floors reserve blocks, ceilings and request limits bound, and every request ends."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.errors import ContextTooLong, InvalidParameter, SettingError, TenantLimit
from quire.scheduler.tenants.tenant_usage import REPORT_EVERY_MS, TenantLimits
from tests.drawn import examples
from tests.unit.scheduler.fake_worker import VOCAB, make_request
from tests.unit.scheduler.harness import NUM_DRAWN, Harness, Setup
from tests.unit.scheduler.test_properties import LastCome, draw_setup


def limits(**of_tenants: dict[str, Any]) -> tuple[TenantLimits, ...]:
    """Return limits: the default tenant without limits, and these."""
    named = [TenantLimits(name=name, shown=name, **of) for name, of in of_tenants.items()]
    return (TenantLimits(name="", shown="default"), *named)


def harness(tenants: tuple[TenantLimits, ...], **sizes: Any) -> Harness:
    return Harness(replace(Setup(num_blocks=16, max_num_seqs=8, tenants=tenants), **sizes))


def running(found: Harness) -> list[str]:
    sequences = [sequence for sequence in found.scheduler._batch.sequences if sequence is not None]
    return sorted(sequence.request.request_id for sequence in sequences)


def add(found: Harness, name: str, tokens: int, max_tokens: int = 4, **fields: Any) -> None:
    """Add a request of the tenant named before the dash."""
    prompt = [sum(map(ord, name)) * 31 % VOCAB, *range(tokens - 1)]
    found.add(make_request(name, prompt, max_tokens=max_tokens, tenant=name[:-2], **fields))


# ---- request limits


def test_running_requests_of_a_tenant_are_limited_and_others_pass() -> None:
    found = harness(limits(a={"max_running": 2}))
    for name in ("a-1", "a-2", "a-3"):
        add(found, name, 3)
    found.add(make_request("d", [1], max_tokens=4))
    found.schedule()
    assert running(found) == ["a-1", "a-2", "d"]
    found.drain()
    found.check_end()


def test_a_full_tenant_queue_rejects_only_that_tenant() -> None:
    found = harness(limits(a={"max_running": 1, "max_queued": 2}, b={}))
    for number in range(3):  # one can start, two may wait
        add(found, f"a-{number}", 3)
    with pytest.raises(TenantLimit, match="3 requests of tenant a are waiting, at most 2"):
        add(found, "a-9", 3)
    add(found, "b-1", 3)
    found.schedule()  # one runs now, and no longer counts as waiting
    with pytest.raises(TenantLimit, match="2 requests of tenant a"):
        add(found, "a-9", 3)
    found.abort("a-2")
    add(found, "a-8", 3)
    found.drain()
    found.check_end()


def test_as_many_streams_that_continue_may_wait_beside_a_full_tenant_queue() -> None:
    found = harness(limits(a={"max_running": 1, "max_queued": 2}))
    for number in range(3):
        add(found, f"a-{number}", 3)
    request = make_request("r", [1, 2], max_tokens=4, tenant="a")
    request = replace(request, output_ids=np.array([5], np.int32))
    for number in range(2):
        found.scheduler.add(replace(request, request_id=f"c-{number}", group_id=f"c-{number}"))
    with pytest.raises(TenantLimit, match="5 requests of tenant a are waiting, at most 4"):
        found.scheduler.add(request)


def test_more_choices_than_the_limits_are_rejected_permanently() -> None:
    found = harness(limits(a={"max_running": 1, "max_queued": 2}))
    request = make_request("r", [1], max_tokens=2, tenant="a")
    with pytest.raises(InvalidParameter, match="at most 3 are allowed") as caught:
        found.scheduler.add(replace(request, sampling=replace(request.sampling, n=4)))
    assert caught.value.param == "n"


def test_an_unknown_tenant_is_rejected_by_name() -> None:
    found = harness(limits(a={}))
    with pytest.raises(InvalidParameter, match="tenant 'c' is not one of the 2") as caught:
        add(found, "c-1", 3)
    assert caught.value.param == "tenant"


def test_without_tenants_any_name_is_accepted() -> None:
    found = harness(())
    add(found, "anybody-1", 3)
    found.drain()
    found.check_end()


# ---- ceilings


def test_a_tenant_at_its_ceiling_waits_while_others_pass() -> None:
    found = harness(limits(a={"ceiling_blocks": 4}, b={}), max_num_batched_tokens=64)
    add(found, "a-1", 12)
    add(found, "a-2", 12)
    add(found, "b-1", 12)
    found.schedule()
    assert running(found) == ["a-1", "b-1"]
    found.drain()
    found.check_end()


def test_a_large_request_at_its_ceiling_is_not_passed_by_its_own_tenants_small_ones() -> None:
    found = harness(limits(a={"ceiling_blocks": 4}), max_num_batched_tokens=64)
    add(found, "a-1", 8, max_tokens=2)
    add(found, "a-2", 12)
    add(found, "a-3", 2)
    found.schedule()
    assert running(found) == ["a-1"]
    found.drain()
    found.check_end()


def test_growth_above_a_ceiling_preempts_the_tenants_last_request() -> None:
    found = harness(limits(a={"ceiling_blocks": 4}, b={}), max_num_batched_tokens=64)
    add(found, "b-1", 6, max_tokens=20)
    add(found, "a-1", 6, max_tokens=10)
    add(found, "a-2", 6, max_tokens=10)
    found.drain()
    found.check_end()
    assert found.ends["a-2"].num_preemptions > 0
    assert found.ends["a-1"].num_preemptions == found.ends["b-1"].num_preemptions == 0


def test_blocks_shared_by_requests_of_a_tenant_count_once() -> None:
    found = harness(limits(a={"ceiling_blocks": 6}), max_num_batched_tokens=64)
    prompt = list(range(17))  # 4 shared blocks, and one own block each
    found.add(make_request("a-1", prompt, max_tokens=3, tenant="a"))
    found.step()
    found.add(make_request("a-2", prompt, max_tokens=3, tenant="a"))
    found.schedule()
    assert running(found) == ["a-1", "a-2"]
    found.drain()
    found.check_end()


def test_a_request_above_its_ceiling_is_rejected_with_both_numbers() -> None:
    found = harness(limits(a={"ceiling_blocks": 2}))
    with pytest.raises(ContextTooLong, match=r"has 8 tokens.*tenant a have 8 tokens") as caught:
        add(found, "a-1", 8)
    assert caught.value.param == "prompt"
    add(found, "a-2", 7, max_tokens=5)  # ends at the ceiling
    found.drain()
    found.check_end()
    assert len(found.tokens["a-2"]) == 1


# ---- floors


def test_floors_beyond_the_pool_are_rejected_with_both_numbers() -> None:
    with pytest.raises(SettingError, match=r"are 17 KV blocks in all \(a 9, b 8\).* has 16"):
        harness(limits(a={"floor_blocks": 9}, b={"floor_blocks": 8}))


def test_floors_that_leave_a_tenant_nothing_are_rejected() -> None:
    with pytest.raises(SettingError, match="leave tenant default none of the 16"):
        harness(limits(a={"floor_blocks": 9}, b={"floor_blocks": 7}))


def test_a_request_is_limited_to_what_others_floors_leave() -> None:
    found = harness(limits(a={"floor_blocks": 14}, b={}))
    with pytest.raises(ContextTooLong, match=r"has 20 tokens.*tenant b have 8 tokens"):
        add(found, "b-1", 20)
    add(found, "a-1", 20)
    found.drain()
    found.check_end()


def test_a_floor_stays_free_for_its_tenant_however_many_others_wait() -> None:
    found = harness(limits(a={"floor_blocks": 8}, b={}), max_num_batched_tokens=64)
    for number in range(8):
        add(found, f"b-{number}", 12)
    found.schedule()
    assert found.cache.num_free >= 8
    assert "b-0" in running(found)
    add(found, "a-1", 20)  # after all of them in the queue
    found.update()
    found.schedule()
    assert "a-1" in running(found)
    found.drain()
    found.check_end()


def test_a_request_within_its_floor_is_not_preempted_for_others() -> None:
    found = harness(
        limits(a={"floor_blocks": 6}, b={}), max_num_batched_tokens=64, prefix_caching=False
    )
    add(found, "b-1", 12, max_tokens=25)
    add(found, "b-2", 12, max_tokens=25)
    add(found, "a-1", 12, max_tokens=10)  # the last, otherwise the first victim
    found.drain()
    found.check_end()
    assert found.ends["a-1"].num_preemptions == 0
    assert found.ends["b-2"].num_preemptions > 0


def test_an_overtaken_prompt_takes_no_block_of_a_floor_when_it_continues() -> None:
    """Its blocks were free when it began; those that passed it have grown into them since."""
    found = harness(
        limits(a={"floor_blocks": 1}),
        num_blocks=10,
        max_num_batched_tokens=4,
        prefix_caching=False,
        policy=LastCome,
    )

    def steps(number: int) -> None:
        for _ in range(number):
            found.schedule()
            check_limits(found, strictly=True)
            found.update()

    for name, tokens, num_steps in (("first", 10, 2), ("second", 12, 1), ("third", 6, 4)):
        found.add(make_request(name, [1] * tokens, max_tokens=10))
        steps(num_steps)
    found.add(make_request("waits", [1] * 12, max_tokens=3))
    steps(1)
    assert int(found.scheduler._batch.scheduled[0]) == 8  # it waits, and the others continue
    assert sorted(found.plans[-1].slots.tolist()) == [1, 2]
    found.drain()
    found.check_end()


# ---- random tenants


def draw_tenants(random: Random, num_blocks: int) -> tuple[TenantLimits, ...]:
    """Draw three tenants; floors that leave at least a block or two."""
    left = num_blocks - random.choice([1, 2, 3])
    found = []
    for name in ("", "a", "b"):
        floor = random.choice([0, 0, random.randrange(max(left, 0) + 1)])
        left -= floor
        ceiling = random.choice([None, None, random.randrange(max(floor, 1), num_blocks + 1)])
        found.append(
            TenantLimits(
                name=name,
                shown=name or "default",
                floor_blocks=floor,
                ceiling_blocks=ceiling,
                max_running=random.choice([None, None, 1, 2]),
                max_queued=random.choice([None, None, None, 3]),
            )
        )
    return tuple(found)


def check_limits(found: Harness, *, strictly: bool) -> None:
    """Check that no tenant exceeds its limits; strict: that reserved blocks are free."""
    books = found.scheduler._tenants
    books.changed()
    charges = books._charges()
    for number, one in enumerate(books.limits):
        assert one.max_running is None or books.running[number] <= one.max_running
        if strictly and one.ceiling_blocks is not None:
            assert charges[number] <= one.ceiling_blocks + 1e-6
    if strictly:
        held = np.maximum(np.array([one.floor_blocks for one in books.limits]) - charges, 0)
        # Blocks of an aborted request are free when the plan that names them ends.
        quarantined = sum(len(blocks) for _, blocks in found.cache.holds)
        assert found.cache.num_free + quarantined >= held.sum() - 1e-6


def run_case(random: Random, setup: Setup, num_operations: int, *, strictly: bool) -> Harness:
    """Run drawn operations, then run until all has ended."""
    found = Harness(setup)
    prefixes = [[random.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    for number in range(num_operations):
        kind = random.randrange(100)
        if kind < 30:
            add_drawn(random, found, f"r{number}", random.choice(prefixes), alone=strictly)
        elif kind < 36 and found.requests:
            found.abort(random.choice(sorted(found.requests)))
        elif kind < 68:
            found.schedule()
            check_limits(found, strictly=strictly)
        else:
            found.update()
    found.drain()
    found.check_end()
    return found


def add_drawn(random: Random, found: Harness, name: str, prefix: list[int], *, alone: bool) -> None:
    """Add a request or a group of some tenant. alone: no forks, no blocks shared with others."""
    tenant = random.choice(["", "a", "b"])
    prompt = prefix[: random.randrange(1, 20)]
    for stream in range(1 if alone else random.choice([1, 1, 3])):
        request = make_request(
            f"{name}.{stream}",
            prompt,
            max_tokens=random.randrange(1, 30),
            seed=random.randrange(100),
            group=name,
            stream=stream,
            salt=f"{tenant}" if alone else "",
            tenant=tenant,
        )
        try:
            found.add(request)
        except (ContextTooLong, TenantLimit):
            return


@settings(max_examples=NUM_DRAWN, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False), num_operations=st.integers(0, 60))
def test_with_any_floors_and_ceilings_requests_end_with_the_tokens_alone(
    random: Random, num_operations: int
) -> None:
    setup = draw_setup(random)
    setup = replace(setup, tenants=draw_tenants(random, setup.num_blocks), step_budget_ms=0.0)
    run_case(random, setup, num_operations, strictly=False)


@settings(max_examples=NUM_DRAWN, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False), num_operations=st.integers(0, 60))
def test_floors_stay_free_and_ceilings_stay_kept_after_every_plan(
    random: Random, num_operations: int
) -> None:
    setup = replace(draw_setup(random), plans_in_flight=1, step_budget_ms=0.0)
    setup = replace(setup, tenants=draw_tenants(random, setup.num_blocks))
    run_case(random, setup, num_operations, strictly=True)


def test_drawn_cases_reach_every_tenant_limit() -> None:
    """The same cases from fixed seeds: they would prove nothing if limits were never reached."""
    preempted = refused = 0
    cases = examples(75)
    for seed in range(cases):
        random = Random(seed)
        setup = replace(draw_setup(random), plans_in_flight=1, step_budget_ms=0.0)
        setup = replace(setup, tenants=draw_tenants(random, setup.num_blocks))
        found = run_case(random, setup, 80, strictly=True)
        preempted += found.scheduler.stats().preemptions_total > 0
        refused += any(one.ceiling_blocks or one.floor_blocks for one in setup.tenants)
    assert preempted >= cases / 3
    assert refused >= 2 * cases / 3


# ---- statistics


def test_blocks_by_tenant_add_up_to_those_in_use_and_are_summed_rarely() -> None:
    found = harness(limits(a={}, b={}), max_num_batched_tokens=64)
    prompt = list(range(16))
    found.add(make_request("a-1", prompt, max_tokens=20, tenant="a"))
    found.step()
    found.add(make_request("b-1", prompt, max_tokens=20, tenant="b"))
    found.step()
    found.now_ms += REPORT_EVERY_MS
    found.step()
    stats = found.scheduler.stats()
    assert stats.tenant_running == (0, 1, 1)
    assert sum(stats.tenant_blocks) == stats.blocks_used == 6
    assert stats.tenant_blocks == (0, 3, 3)
    found.step()
    assert found.scheduler.stats().tenant_blocks is stats.tenant_blocks
    found.drain()


def test_waiting_tokens_are_those_of_the_queue_including_preempted_requests() -> None:
    found = harness((), max_num_seqs=1)
    add(found, "a-1", 3, max_tokens=10)
    add(found, "b-1", 5)
    assert found.scheduler.stats().waiting_tokens == 8
    for _ in range(3):
        found.step()
    assert found.scheduler.stats().waiting_tokens == 5
    found.scheduler._preemptor.preempt(0)
    assert found.scheduler.stats().waiting_tokens == 5 + 3 + len(found.tokens["a-1"])
    found.drain()
    assert found.scheduler.stats().waiting_tokens == 0


def test_reserved_blocks_named_by_a_plan_in_flight_are_waited_for() -> None:
    found = harness(
        limits(a={"floor_blocks": 8}, b={}), max_num_batched_tokens=64, prefix_caching=False
    )
    add(found, "a-1", 24, max_tokens=2)  # 6 of its 8 blocks
    add(found, "b-1", 24, max_tokens=8)  # 6 of the other 8
    found.schedule()
    found.abort("a-1")  # its blocks are free when the plan ends, not before
    add(found, "a-2", 24, max_tokens=2)
    sequence = next(iter(found.scheduler._queue))
    books = found.scheduler._tenants
    books.changed()
    assert books.has_floor_left(sequence)
    assert found.cache.num_free == 4
    assert not books.fits_floor(sequence, 6)
    found.update()
    books.changed()
    assert books.fits_floor(sequence, 6)
    found.drain()
    found.check_end()

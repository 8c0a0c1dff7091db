"""Prompts beside decoding rows: order, chunk sizes, and the number of long ones at once."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from quire.base.records import StepPlan
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.policy.policies import make_policy
from quire.scheduler.step_budget import MIN_PROMPT_TOKENS
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

# A step of n tokens takes 10 + n ms, exactly.
COST = LinearCost(fixed_ms=10.0, token_ms=1.0, position_ms=0.0)
LONG = 200


def harness_of(policy: str = "fcfs", **settings: object) -> Harness:
    setup = {
        "num_blocks": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "prefix_caching": False,
        **settings,
    }
    harness = Harness(Setup(policy=partial(make_policy, policy), **setup))  # type: ignore[arg-type]
    speed = harness.scheduler.speed
    speed._linear = COST  # as if learned; times of the fake steps carry no information
    speed.note = lambda *_: None  # type: ignore[method-assign]
    return harness


def decoding(harness: Harness, number: int, **fields: object) -> None:
    """Return `number` requests that decode."""
    for place in range(number):
        request = make_request(f"d{place}", [1, 2], max_tokens=400, **fields)  # type: ignore[arg-type]
        harness.add(request)
    while any(len(harness.tokens[f"d{place}"]) < 2 for place in range(number)):
        harness.step()


def parts(harness: Harness, name: str) -> list[int]:
    """Return the tokens of `name`'s prompt in each step until it has its first token."""
    counts = []
    while not harness.tokens[name]:
        harness.step()
        counts.append(tokens_in(harness, harness.plans[-1], name))
    return counts


def tokens_in(harness: Harness, plan: StepPlan, name: str) -> int:
    sequence = harness.scheduler._requests.sequences.get(name)
    slot = -1 if sequence is None else sequence.slot
    return int(plan.counts[plan.slots == slot].sum())


def test_a_prompt_alone_gets_whole_steps() -> None:
    harness = harness_of(tpot_target_ms=12.0, long_prompt_tokens=100)
    harness.add(make_request("p", [1] * 300, max_tokens=4))
    assert parts(harness, "p") == [128, 128, 44]


def test_beside_decoding_requests_a_prompt_keeps_the_target() -> None:
    harness = harness_of(tpot_target_ms=50.0)
    decoding(harness, 4)
    harness.add(make_request("p", [1] * 100, max_tokens=4))
    # 10 + 4 + 36 = 50, and the last 8 of these 40 rows would need another tile.
    assert parts(harness, "p") == [28, 28, 28, 16]


def test_the_tightest_decoding_request_sets_the_target() -> None:
    harness = harness_of(tpot_target_ms=100.0)
    decoding(harness, 2, tpot_slo_ms=40.0)
    harness.add(make_request("p", [1] * 60, max_tokens=4, tpot_slo_ms=1.0))
    assert parts(harness, "p") == [28, 28, 4]  # 10 + 2 + 28 = 40; its own target applies only later


def test_an_unreachable_target_leaves_prompts_a_few_tokens_a_step() -> None:
    harness = harness_of(tpot_target_ms=1.0)
    decoding(harness, 4)
    for name in ("p", "q"):
        harness.add(make_request(name, [1] * 40, max_tokens=4))
    assert parts(harness, "p") == [MIN_PROMPT_TOKENS, MIN_PROMPT_TOKENS, 8]
    assert harness.plans[-1].num_tokens <= 4 + MIN_PROMPT_TOKENS
    harness.drain()
    harness.check_end()


def test_chunks_of_a_long_prompt_take_less_than_the_rest_of_the_step() -> None:
    harness = harness_of(long_prompt_tokens=100, max_num_batched_tokens=512)
    decoding(harness, 6)
    harness.add(make_request("p", [1] * 120, max_tokens=4))
    counts = parts(harness, "p")
    assert max(counts) == MIN_PROMPT_TOKENS  # 0.65 * (10 + 6) = 10.4 would be less
    harness = harness_of(long_prompt_tokens=100, max_num_batched_tokens=512)
    decoding(harness, 6)
    harness.add(make_request("p", [1] * 99, max_tokens=4))
    assert parts(harness, "p") == [99]


def test_a_short_prompt_does_not_wait_for_a_long_one_with_its_share_spent() -> None:
    harness = harness_of(long_prompt_tokens=100)
    decoding(harness, 6)
    harness.add(make_request("long", [1] * LONG, max_tokens=4))
    harness.add(make_request("longer", [1] * LONG, max_tokens=4))
    harness.add(make_request("short", [1] * 60, max_tokens=4))
    assert len(parts(harness, "short")) == 1
    assert not harness.tokens["long"]
    harness.drain()
    harness.check_end()


def test_a_favoured_request_precedes_a_long_prompt_half_computed() -> None:
    for policy, first in (("priority", "new"), ("fcfs", "old")):
        harness = harness_of(policy, max_num_batched_tokens=32)
        harness.add(make_request("old", [1] * 100, max_tokens=4, priority=1))
        harness.step()
        harness.add(make_request("new", [2] * 60, max_tokens=4))
        while not (harness.tokens["old"] or harness.tokens["new"]):
            harness.step()
        assert harness.tokens[first]
        harness.drain()
        harness.check_end()


def test_long_prompts_are_limited_and_short_ones_pass() -> None:
    harness = harness_of(long_prompt_tokens=20, max_long_prompts=1)
    for name in ("l0", "l1", "l2"):
        harness.add(make_request(name, [1] * 30, max_tokens=10))
    for name in ("s0", "s1"):
        harness.add(make_request(name, [1] * 3, max_tokens=10))
    max_long, began = 0, []
    while harness.scheduler.has_work:
        harness.step()
        batch = harness.scheduler._batch
        running = [batch.sequence(slot).request.request_id for slot in batch.active.tolist()]
        max_long = max(max_long, sum(name[0] == "l" for name in running))
        began += [name for name in running if name not in began]
    assert max_long == 1
    assert began == ["l0", "s0", "s1", "l1", "l2"]
    harness.check_end()


def test_short_prompts_have_their_own_limit() -> None:
    harness = harness_of(long_prompt_tokens=20, max_short_prompts=2)
    for name in ("s0", "s1", "s2"):
        harness.add(make_request(name, [1] * 3, max_tokens=10))
    harness.add(make_request("l0", [1] * 30, max_tokens=10))
    harness.step()
    running = {a.request_id for plan in harness.plans for a in plan.admissions}
    assert running == {"s0", "s1", "l0"}
    harness.drain()
    harness.check_end()


def test_waiting_for_a_slot_of_its_kind_adds_no_cost_to_steady_steps() -> None:
    harness = harness_of(long_prompt_tokens=20, max_long_prompts=1)
    for name in ("l0", "l1"):
        harness.add(make_request(name, [1] * 30, max_tokens=100))
    for _ in range(3):
        harness.step()
    harness.scheduler._admitter.admit = None  # type: ignore[assignment, method-assign]
    for _ in range(20):
        harness.step()


def test_few_short_prompts_pass_a_long_one_without_blocks() -> None:
    harness = harness_of(long_prompt_tokens=100, num_blocks=64, max_num_seqs=4)
    harness.add(make_request("holder", [1] * 100, max_tokens=60))  # 25 to 40 of 64 blocks
    harness.step()
    harness.add(make_request("long", [2] * 180, max_tokens=10))  # 45 blocks
    shorts = [f"s{number}" for number in range(60)]
    for name in shorts:
        harness.add(make_request(name, [3] * 4, max_tokens=6))
    while not harness.tokens["long"]:
        harness.step()
    names = [one.request_id for plan in harness.plans for one in plan.admissions]
    before = names[: names.index("long")]
    assert 8 <= sum(name in shorts for name in before) <= 16
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_with_targets_and_caps_every_request_gets_the_tokens_it_gets_alone(
    plans_in_flight: int,
) -> None:
    random = np.random.default_rng(plans_in_flight)
    harness = harness_of(
        "priority",
        long_prompt_tokens=20,
        max_long_prompts=1,
        tpot_target_ms=30.0,
        num_blocks=26,
        plans_in_flight=plans_in_flight,
        prefix_caching=True,
    )
    for number in range(60):
        prompt = [1] * int(random.integers(1, 60)) + [int(random.integers(0, 11))]
        harness.add(
            make_request(
                f"r{number}",
                prompt,
                max_tokens=int(random.integers(1, 40)),
                priority=int(random.integers(-2, 3)),
                arrival_ms=harness.now_ms,
            )
        )
        for _ in range(int(random.integers(0, 4))):
            harness.step()
    harness.drain()
    assert harness.scheduler.stats().preemptions_total > 0
    harness.check_end()

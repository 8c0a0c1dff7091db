"""Paused rows and preemption by rank: which requests, for which, and that all still progress."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from quire.base.records import StepPlan
from quire.scheduler.policy.policies import make_policy
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

LONG_PROMPT = [number % 7 for number in range(40)]


def harness_of(policy: str, **settings: object) -> Harness:
    setup = {"num_blocks": 256, "max_num_seqs": 8, "prefix_caching": False, **settings}
    return Harness(Setup(policy=partial(make_policy, policy), **setup))  # type: ignore[arg-type]


def flooded(harness: Harness, number: int = 8, **fields: object) -> None:
    """Return a harness with `number` running requests of one tenant that have made many tokens."""
    for one in range(number):
        given = {"max_tokens": 50, "tenant": "flood", **fields}
        harness.add(make_request(f"flood-{one}", [1, 2, one], **given))  # type: ignore[arg-type]
    while min(map(len, harness.tokens.values())) < 12:
        harness.step()


def names_in(harness: Harness, plan: StepPlan) -> list[str]:
    """Return the requests with rows in `plan`, by the present owner of the slot."""
    sequences = harness.scheduler._batch.sequences
    return [sequences[slot].request.request_id for slot in plan.slots.tolist() if sequences[slot]]


def run_until_first_token(harness: Harness, name: str) -> list[list[str]]:
    """Return the requests with rows in each step until `name` got its first token."""
    found = []
    while not harness.tokens[name]:
        harness.schedule()
        found.append(names_in(harness, harness.plans[-1]))
        harness.update()
    return found


def test_a_floods_rows_are_paused_while_a_light_tenants_prompt_is_computed() -> None:
    harness = harness_of("fair")
    flooded(harness, 7)
    harness.add(make_request("light", LONG_PROMPT, max_tokens=3, tenant="light"))
    steps = run_until_first_token(harness, "light")
    assert all("light" in step for step in steps)
    assert [len(step) for step in steps] == [2] * len(steps)  # one of 7 continues
    assert len(steps) == 3  # 40 tokens at 15 a step
    going_on = [name for step in steps for name in step if name != "light"]
    assert len(set(going_on)) == 3  # each in its turn
    harness.step()
    assert len(harness.plans[-1].slots) == 8  # all, once the prompt is done
    harness.drain()
    harness.check_end()


def test_no_flood_request_begins_in_a_step_with_a_light_tenants_prompt() -> None:
    """The rest of such a step stays unused: filling it would delay the prompt's last chunk."""
    harness = harness_of("fair", num_blocks=512, max_num_seqs=12, max_num_batched_tokens=64)
    flooded(harness, 7)
    harness.add(make_request("light", LONG_PROMPT, max_tokens=3, tenant="light"))
    for number in range(3):
        harness.add(make_request(f"late-{number}", LONG_PROMPT, max_tokens=3, tenant="flood"))
    harness.add(make_request("other", [9, 8, 7], max_tokens=3, tenant="other"))
    (step,) = run_until_first_token(harness, "light")
    assert {name for name in step if not name.startswith("flood")} == {"light", "other"}
    harness.step()
    assert "late-0" in names_in(harness, harness.plans[-1])
    harness.drain()
    harness.check_end()


def test_no_row_is_paused_for_a_tenant_that_had_its_share() -> None:
    harness = harness_of("fair")
    flooded(harness, 4)
    for number in range(3):
        harness.add(make_request(f"peer-{number}", [1, 2], max_tokens=30, tenant="peer"))
    while min(map(len, harness.tokens.values())) < 10:
        harness.step()
    harness.add(make_request("next", LONG_PROMPT, max_tokens=3, tenant="peer"))
    for step in run_until_first_token(harness, "next"):
        assert len(step) == 8
    harness.drain()
    harness.check_end()


def test_no_row_is_paused_for_its_own_tenant_or_under_another_policy() -> None:
    for policy, tenant in (("fair", "flood"), ("fcfs", "light"), ("sjf", "light")):
        harness = harness_of(policy)
        flooded(harness, 7)
        harness.add(make_request("long", LONG_PROMPT, max_tokens=3, tenant=tenant))
        for step in run_until_first_token(harness, "long"):
            assert len(step) == 8
        harness.drain()


def test_rows_are_not_paused_for_a_request_that_cannot_run() -> None:
    """It waits for a slot: as many of its kind run as allowed."""
    harness = harness_of("fair", long_prompt_tokens=20, max_long_prompts=1)
    harness.add(make_request("slow", LONG_PROMPT, max_tokens=22, tenant="flood"))
    flooded(harness, 4)
    harness.add(make_request("light", LONG_PROMPT[::-1], max_tokens=3, tenant="light"))
    harness.step()
    assert len(harness.plans[-1].slots) == 5
    assert harness.tokens["light"] == []
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_light_tenant_takes_a_slot_of_a_flood_that_holds_all(plans_in_flight: int) -> None:
    harness = harness_of("fair", plans_in_flight=plans_in_flight)
    flooded(harness)
    harness.add(make_request("light", [5, 6, 7], max_tokens=3, tenant="light"))
    assert len(run_until_first_token(harness, "light")) <= 2 * plans_in_flight
    stats = harness.scheduler.stats()
    assert stats.preemptions_for_turns_total == stats.preemptions_total == 1
    harness.drain()
    harness.check_end()


def test_a_light_tenant_takes_blocks_of_a_flood_that_holds_all() -> None:
    harness = harness_of("fair", num_blocks=36, prefix_caching=True)
    flooded(harness, 6)
    harness.add(make_request("light", LONG_PROMPT, max_tokens=3, tenant="light"))
    run_until_first_token(harness, "light")
    assert harness.scheduler.stats().preemptions_for_turns_total >= 1
    harness.drain()
    harness.check_end()


def test_a_priority_level_takes_a_slot_and_half_a_level_of_aging_does_not() -> None:
    harness = harness_of("priority")
    flooded(harness, priority=1, arrival_ms=0.0)
    harness.add(make_request("equal", [5], max_tokens=3, priority=1, arrival_ms=0.0))
    harness.add(make_request("late", [6], max_tokens=3, priority=0, arrival_ms=5_000.0))
    for _ in range(4):
        harness.step()
    assert harness.scheduler.stats().preemptions_total == 0
    harness.add(make_request("urgent", [7], max_tokens=3, priority=-1, arrival_ms=5_000.0))
    assert len(run_until_first_token(harness, "urgent")) == 1
    assert harness.scheduler.stats().preemptions_for_turns_total == 1
    harness.drain()
    harness.check_end()


def test_a_request_preempted_twice_keeps_its_slot() -> None:
    harness = harness_of("priority", max_num_seqs=1)
    harness.add(make_request("low", [1, 2], max_tokens=50, priority=9, arrival_ms=0.0))
    for number in range(4):
        harness.step()
        harness.add(make_request(f"high-{number}", [3], max_tokens=2, arrival_ms=0.0))
        for _ in range(6):
            harness.step()
    assert harness.scheduler.stats().preemptions_for_turns_total == 2
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_of_light_tenants_starves_no_request(seed: int) -> None:
    """A new tenant arrives in each step with a prompt of several steps; the flood progresses, and
    each request gets the tokens it gets alone.
    """
    random = Random(seed)
    harness = harness_of(
        "fair", max_num_seqs=random.choice([3, 8]), num_blocks=random.choice([40, 256])
    )
    flooded(harness, 3)
    for number in range(40):
        prompt = LONG_PROMPT[: random.randrange(1, 40)]
        harness.add(make_request(f"new-{number}", prompt, max_tokens=2, tenant=f"new-{number}"))
        harness.step()
    made = sum(len(tokens) for name, tokens in harness.tokens.items() if "flood" in name)
    assert made > 3 * 12
    harness.drain()
    harness.check_end()


def test_a_single_tenant_preempts_none_of_its_requests() -> None:
    harness = harness_of("fair")
    asked = []
    policy = harness.scheduler._policy
    policy.yields_to = lambda running, sequence: bool(asked.append(sequence))  # type: ignore[method-assign,func-returns-value]
    flooded(harness)
    harness.add(make_request("more", LONG_PROMPT, max_tokens=4, tenant="flood"))
    assert harness.scheduler.predict_ttft_ms("more") is not None
    harness.step()
    assert asked == []
    harness.add(make_request("light", LONG_PROMPT, max_tokens=4, tenant="light"))
    harness.step()
    assert len(asked) >= 8

"""The order of scheduling and of preemption under each policy, and that every request finishes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import get_args, get_type_hints

import numpy as np
import pytest

from quire.base.errors import DeadlineMissed, SettingError
from quire.base.records import Request
from quire.config.groups import SCHEDULING_POLICIES, SchedulerConfig
from quire.scheduler.policy.fair_share import FairShare
from quire.scheduler.policy.policies import POLICY_NAMES, make_policy
from quire.scheduler.policy.policy import Policy
from quire.scheduler.slo.length_history import LengthHistory
from tests.drawn import each_third
from tests.repository.source_files import ROOT
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup
from tests.unit.scheduler.test_effort import calls_of_a_turn, steady


def harness_of(name: str, **settings: object) -> Harness:
    setup = {"num_blocks": 64, "max_num_seqs": 1, "prefix_caching": False, **settings}
    return Harness(Setup(policy=partial(make_policy, name), **setup))  # type: ignore[arg-type]


def order_of(harness: Harness) -> list[str]:
    """Return names by first admission."""
    names = [one.request_id for plan in harness.plans for one in plan.admissions]
    return list(dict.fromkeys(names))


def served(harness: Harness, *requests: Request) -> list[str]:
    for request in requests:
        harness.add(request)
    harness.drain()
    harness.check_end()
    return order_of(harness)


def ask(name: str, **fields: object) -> Request:
    given = {"max_tokens": 3, **fields}
    return make_request(name, [1, 2, 3], **given)  # type: ignore[arg-type]


def test_fcfs_serves_by_arrival() -> None:
    asked = (ask("a", priority=9), ask("b", priority=-9), ask("c", ttft_slo_ms=1.0))
    assert served(harness_of("fcfs"), *asked) == ["a", "b", "c"]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_streams_that_continue_are_admitted_before_those_that_wait(name: str) -> None:
    """They were admitted elsewhere before; among themselves they keep the policy's order."""
    again = [replace(ask(f"r{at}"), output_ids=np.array([5], np.int32)) for at in range(2)]
    asked = (ask("a"), ask("b", priority=-9), *again)
    harness = harness_of(name)
    for request in asked:
        harness.scheduler.add(request)
        harness.requests[request.request_id], harness.tokens[request.request_id] = request, []
    harness.drain()
    order = order_of(harness)
    assert order[0] in ("a", "r0"), "what runs is not preempted for them"
    assert order.index("r0") < order.index("r1") < order.index("b")


def test_priority_serves_the_smallest_number_first_and_ties_by_arrival() -> None:
    asked = (ask("a"), ask("b", priority=1), ask("c", priority=-1), ask("d"))
    assert served(harness_of("priority"), *asked) == ["c", "a", "d", "b"]


def test_ten_seconds_of_waiting_offset_a_level_of_priority() -> None:
    late, later = ask("late", arrival_ms=9_000.0), ask("later", arrival_ms=11_000.0)
    asked = (ask("low", priority=1), late, later)
    assert served(harness_of("priority"), *asked) == ["late", "low", "later"]


def test_without_aging_priority_alone_counts() -> None:
    policy = partial(make_policy, "priority", aging=0.0)
    harness = Harness(Setup(max_num_seqs=1, policy=policy))
    asked = (ask("low", priority=1), ask("much-later", arrival_ms=1e9))
    assert served(harness, *asked) == ["much-later", "low"]


def test_shortest_first_counts_prompt_and_output() -> None:
    long_output = make_request("output", [1], max_tokens=50)
    long_prompt = make_request("prompt", list(range(11)) * 4, max_tokens=3)
    short = make_request("short", [1, 2], max_tokens=3)
    order = served(harness_of("sjf"), long_output, long_prompt, short)
    assert order == ["short", "prompt", "output"]


def test_sjf_learns_a_tenants_output_lengths() -> None:
    harness = harness_of("sjf", max_model_len=64)
    brief = make_request("x", [1, 2], max_tokens=60, stop_ids=(900,), tenant="brief")
    wordy = make_request("x", [1, 2], max_tokens=60, stop_ids=(900,), tenant="wordy")
    for _ in range(20):
        harness.scheduler.lengths.note(brief, 3)
        harness.scheduler.lengths.note(wordy, 55)
    asked = [
        make_request(name, [1, 2], max_tokens=60, stop_ids=(900,), tenant=name)
        for name in ("wordy", "nobody", "brief")
    ]
    assert served(harness, *asked) == ["brief", "nobody", "wordy"]


def test_fair_share_serves_tenants_in_turn_whatever_their_request_counts() -> None:
    flood = [ask(f"flood-{number}", tenant="flood") for number in range(6)]
    light = [ask(f"light-{number}", tenant="light") for number in range(2)]
    order = served(harness_of("fair"), *flood, *light)
    assert order.index("light-0") <= 1
    assert order.index("light-1") <= 3


def test_fair_share_gives_a_tenant_of_weight_three_three_times_the_tokens() -> None:
    harness = Harness(Setup(max_num_seqs=1, policy=lambda: FairShare({"heavy": 3.0})))
    for number in range(24):
        harness.add(ask(f"heavy-{number}", tenant="heavy"))
        harness.add(ask(f"plain-{number}", tenant="plain"))
    harness.drain()
    first = [name.split("-")[0] for name in order_of(harness)[:20]]
    assert 14 <= first.count("heavy") <= 16


def test_fair_share_accumulates_no_credit_while_idle() -> None:
    harness = harness_of("fair")
    for number in range(10):
        harness.add(ask(f"busy-{number}", tenant="busy"))
    while len(order_of(harness)) < 6:
        harness.step()
    for number in range(6):
        harness.add(ask(f"back-{number}", tenant="back"))
    harness.drain()
    after = [name.split("-")[0] for name in order_of(harness)[6:14]]
    assert after.count("busy") >= 3  # by turns from now on; "back" does not get six at once


def test_fair_share_does_not_charge_recomputation() -> None:
    harness = harness_of("fair", num_blocks=8, max_num_seqs=2, max_num_batched_tokens=16)
    for name in "ab":
        harness.add(make_request(name, [1, 2, 3, 4, 5, 6], max_tokens=24, tenant=name))
    harness.drain()
    assert harness.scheduler.stats().preemptions_total > 0
    policy = harness.scheduler._policy
    assert isinstance(policy, FairShare)
    assert policy._served["b"] == pytest.approx(6 + 2 * 24)


def test_earliest_deadline_serves_by_deadline() -> None:
    asked = (
        ask("nothing"),
        ask("soon", ttft_slo_ms=500.0),
        ask("later", ttft_slo_ms=5_000.0),
        ask("whole", deadline_ms=2_000.0),
    )
    assert served(harness_of("edf"), *asked) == ["soon", "whole", "later", "nothing"]


@pytest.mark.parametrize("name", ["priority", "fair"])
def test_the_request_ranked_first_keeps_its_blocks(name: str) -> None:
    """Two run in a pool for one; the one ranked later loses its blocks though it came first."""
    harness = harness_of(name, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=32)
    if name == "fair":  # the other tenant was served a lot
        harness.scheduler._policy._served["low"] = 1e6  # type: ignore[attr-defined]
        harness.add(make_request("first", [3], max_tokens=1, tenant="low"))
        harness.drain()
    prompt = [1, 2, 3, 4, 5, 6]
    harness.add(make_request("low", prompt, max_tokens=24, priority=1, tenant="low"))
    harness.schedule()
    harness.update()
    harness.add(make_request("high", prompt, max_tokens=24, tenant="high"))
    harness.drain()
    lost = {one: harness.ends[one].num_preemptions for one in ("low", "high")}
    if name == "priority":
        assert lost["low"] > 0
        assert lost["high"] == 0
    else:  # by arrival if blocks are short: only later victims are chosen by tenant
        assert sum(lost.values()) > 0
    harness.check_end()


def test_fair_share_preempts_the_tenant_served_most() -> None:
    harness = harness_of("fair", max_num_seqs=3, max_num_batched_tokens=64)
    for name in ("a", "b", "c"):
        harness.add(make_request(name, [1, 2, 3], max_tokens=40, tenant=name))
    harness.step()
    policy, sequences = harness.scheduler._policy, harness.scheduler._requests.sequences
    policy._served["b"] += 100  # type: ignore[attr-defined]
    slots = np.array([sequences[name].slot for name in "abc"], np.intp)
    assert policy.victims(slots).tolist() == [sequences[name].slot for name in "bca"]


FAVOURED: dict[str, Callable[[str, float], Request]] = {
    "fcfs": lambda name, now_ms: ask(name, arrival_ms=now_ms),
    "priority": lambda name, now_ms: ask(name, arrival_ms=now_ms, priority=-3),
    "sjf": lambda name, now_ms: ask(name, arrival_ms=now_ms, max_tokens=1),
    "fair": lambda name, now_ms: ask(name, arrival_ms=now_ms, tenant=f"t{int(now_ms) % 7}"),
    "edf": lambda name, now_ms: ask(name, arrival_ms=now_ms, ttft_slo_ms=1.0),
}


@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name in POLICY_NAMES for seed in each_third(range(4), name)]
)
def test_every_request_finishes_despite_a_stream_of_favoured_ones(name: str, seed: int) -> None:
    """More favoured requests come than can be served; the others still progress."""
    random = Random(seed)
    harness = harness_of(
        name,
        max_num_seqs=random.choice([1, 3]),
        num_blocks=random.choice([8, 24]),
        plans_in_flight=random.choice([1, 2]),
    )
    others = [
        make_request(f"other-{number}", [1, 2, 3, 4], max_tokens=20, priority=2, tenant="other")
        for number in range(3)
    ]
    for request in others:
        harness.add(request)
    for number in range(3_000):
        harness.now_ms += 100.0
        if len(harness.scheduler._queue) < 200:
            with suppress(DeadlineMissed):
                harness.add(FAVOURED[name](f"favoured-{number}", harness.now_ms))
        harness.step()
        if all(request.request_id in harness.ends for request in others):
            break
    assert all(request.request_id in harness.ends for request in others)
    harness.drain()
    harness.check_end()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_each_name_makes_a_working_policy(name: str) -> None:
    asked = [ask(f"r{number}", tenant=f"t{number % 2}") for number in range(4)]
    assert sorted(served(harness_of(name), *asked)) == ["r0", "r1", "r2", "r3"]


def test_flag_page_and_tests_have_all_policies() -> None:
    assert SCHEDULING_POLICIES == POLICY_NAMES
    assert get_args(get_type_hints(SchedulerConfig)["scheduling_policy"]) == POLICY_NAMES
    flag = SchedulerConfig.__dataclass_fields__["scheduling_policy"]
    assert set(POLICY_NAMES) <= set(re.findall(r"\w+", flag.metadata["help"]))
    page = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    table = page.partition("\n| Policy | Order |\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.M)) == POLICY_NAMES
    assert tuple(FAVOURED) == POLICY_NAMES


def test_an_unknown_policy_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="allowed: fcfs, priority, sjf, fair, edf"):
        make_policy("lottery")


def test_a_predicted_length_uses_known_bounds() -> None:
    lengths = LengthHistory()
    known = make_request("x", [1] * 100, max_tokens=500, stop_ids=(3,), tenant="a")
    first = lengths.predict(known, 600)
    assert 1 <= first <= 500
    for _ in range(50):
        lengths.note(known, 40)
    assert lengths.predict(known, 600) == pytest.approx(40, abs=5)
    other = make_request("y", [1] * 100, max_tokens=500, stop_ids=(3,), tenant="b")
    assert 40 < lengths.predict(other, 600) <= first
    assert lengths.predict(known, 110) == 10  # never more than its limit
    endless = make_request("z", [1] * 100, max_tokens=500, tenant="a")
    assert lengths.predict(endless, 600) == 500  # nothing ends it earlier


def test_a_steady_step_costs_the_same_under_each_policy() -> None:
    """Except for the two hooks of the extension of policies with preemption by rank."""

    def max_calls(policy: Policy) -> int:
        scheduler = steady(16, waiting=50, policy=policy)
        return max(calls_of_a_turn(scheduler) for _ in range(16))  # with blocks crossed, and not

    counts = [max_calls(make_policy(name)) for name in POLICY_NAMES]
    assert max(counts) - min(counts) <= 2

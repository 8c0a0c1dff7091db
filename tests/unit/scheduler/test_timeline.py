"""Timelines: why a request waited, what its steps shared, and why its prefix was not found."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.base.cache_usage import MissReason
from quire.base.timeline import MAX_HISTORIES, EventKind, TimelineReport, WaitReason
from quire.obs.timeline import Cause, explain
from quire.scheduler import step_rows
from quire.scheduler.policy.priority import PriorityFirst
from quire.scheduler.request_history import MAX_EVENTS
from quire.scheduler.step_history import BYTES_PER_STEP, PACK_STEPS, StepHistory
from quire.scheduler.tenants.tenant_usage import TenantLimits
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup
from tests.unit.scheduler.test_properties import draw_setup, run_case


def harness_of(**sizes: Any) -> Harness:
    return Harness(replace(Setup(), **sizes))


def add(harness: Harness, name: str, num_tokens: int, max_tokens: int = 4, **fields: Any) -> None:
    """Add a request with a prompt of its own, that arrives now."""
    prompt = [sum(map(ord, name)) % 11, *range(num_tokens - 1)]
    fields = {"arrival_ms": harness.now_ms, **fields}
    harness.add(make_request(name, prompt, max_tokens=max_tokens, **fields))


def report_of(harness: Harness, name: str) -> TimelineReport:
    reports = {report.request_id: report for report in harness.timelines([name])}
    return reports[name]


def timeline(harness: Harness, name: str) -> dict[str, Any]:
    return explain(report_of(harness, name))


def reasons(harness: Harness, name: str) -> list[str]:
    """Return its reasons to wait, the longest first."""
    return [why["reason"] for why in timeline(harness, name)["queue"]["reasons"]]


# ---- queueing


def test_a_request_that_arrives_during_a_step_waits_for_the_next() -> None:
    harness = harness_of()
    add(harness, "one", 4)
    harness.step()
    assert reasons(harness, "one") == [WaitReason.STEP]
    assert timeline(harness, "one")["queue"]["ms"] == 1.0


def test_requests_wait_for_slots_and_later_for_blocks() -> None:
    harness = harness_of(max_num_seqs=1)
    add(harness, "one", 4, max_tokens=9)
    add(harness, "two", 4)
    harness.drain()
    assert reasons(harness, "two")[0] == WaitReason.SLOT
    assert reasons(harness, "one") == [WaitReason.STEP]


def test_a_request_behind_one_that_lacks_blocks_waits_for_the_order() -> None:
    harness = harness_of(num_blocks=8)
    add(harness, "runs", 20, max_tokens=8)
    for _ in range(3):
        harness.step()
    add(harness, "large", 24)
    add(harness, "small", 2)
    harness.drain()
    assert reasons(harness, "large")[0] == WaitReason.BLOCKS
    assert reasons(harness, "small")[0] == WaitReason.ORDER


def test_a_spent_budget_is_a_reason_to_wait() -> None:
    harness = harness_of(max_num_batched_tokens=4)
    add(harness, "one", 12)
    add(harness, "two", 3)
    harness.drain()
    assert reasons(harness, "two")[0] == WaitReason.BUDGET


def test_limits_of_a_tenant_are_reasons_to_wait() -> None:
    named = TenantLimits(name="a", shown="a", max_running=1)
    harness = harness_of(tenants=(TenantLimits(name="", shown="default"), named))
    add(harness, "one", 4, tenant="a")
    add(harness, "two", 4, tenant="a")
    harness.drain()
    assert reasons(harness, "two")[0] == WaitReason.TENANT_LIMIT


def test_a_ceiling_of_a_tenant_is_a_reason_to_wait() -> None:
    named = TenantLimits(name="a", shown="a", ceiling_blocks=4)
    harness = harness_of(tenants=(TenantLimits(name="", shown="default"), named))
    add(harness, "one", 10, tenant="a")
    add(harness, "two", 10, tenant="a")
    harness.drain()
    assert reasons(harness, "two")[0] == WaitReason.TENANT_CEILING


def test_later_requests_that_were_admitted_first_are_counted() -> None:
    harness = harness_of(max_num_seqs=1, policy=PriorityFirst)
    add(harness, "runs", 4, max_tokens=6)
    harness.step()
    add(harness, "last", 4)
    for number in range(3):
        add(harness, f"urgent-{number}", 4, priority=-5)
    harness.drain()
    assert timeline(harness, "last")["queue"]["overtaken_by"] == 3
    assert timeline(harness, "runs")["queue"]["overtaken_by"] == 0


# ---- steps


def test_chunks_of_a_prompt_are_listed_with_their_tokens() -> None:
    harness = harness_of(max_num_batched_tokens=4)
    add(harness, "one", 10)
    harness.drain()
    found = timeline(harness, "one")
    assert [chunk["tokens"] for chunk in found["prefill"]["chunks"]] == [4, 4, 2]
    assert [gap["tokens"] for gap in found["gaps"]] == [1, 1, 1]
    assert found["completion_tokens"] == 4
    assert not found["steps_missing"]


def test_a_gap_names_the_share_of_another_prefill_and_nothing_else_of_it() -> None:
    harness = harness_of(max_num_batched_tokens=16)
    add(harness, "answers", 3, max_tokens=12)
    for _ in range(4):
        harness.step()
    add(harness, "secret-other", 12)
    harness.drain()
    report = report_of(harness, "answers")
    slowed = [gap for gap in explain(report)["gaps"] if gap["other_prefill_tokens"]]
    assert [gap["other_prefill_tokens"] for gap in slowed] == [12]
    assert [gap["other_rows"] for gap in slowed] == [1]
    assert Cause.PREFILL in {part["cause"] for part in slowed[0]["causes"]}
    assert "secret" not in repr(report)
    hidden = explain(report, shows_others=False)
    assert {gap["other_prefill_tokens"] for gap in hidden["gaps"]} == {None}
    assert hidden["causes"] == explain(report)["causes"]


def test_a_preempted_request_shows_its_time_in_the_queue_and_the_recomputation() -> None:
    harness = harness_of(num_blocks=6, prefix_caching=False, max_num_seqs=2)
    add(harness, "first", 10, max_tokens=12)
    add(harness, "second", 4, max_tokens=12)
    harness.drain()
    assert harness.ends["second"].num_preemptions
    found = timeline(harness, "second")
    causes = {part["cause"] for part in found["causes"]}
    assert {Cause.PREEMPTED, Cause.RECOMPUTE} <= causes
    preempted = [event for event in found["events"] if event["event"] == EventKind.PREEMPTED]
    assert preempted[0]["blocks"] == "dropped"
    assert preempted[0]["for"] == "answer"
    assert len(found["gaps"]) == 11


def test_a_slow_reader_is_the_cause_of_the_gap_it_makes() -> None:
    harness = harness_of()
    add(harness, "slow", 3, max_tokens=8)
    for _ in range(3):
        harness.step()
    harness.scheduler.hold("slow", is_held=True, now_ms=harness.now_ms)
    assert not harness.step()
    harness.now_ms += 500.0
    harness.scheduler.hold("slow", is_held=False, now_ms=harness.now_ms)
    harness.drain()
    slowest = max(timeline(harness, "slow")["gaps"], key=lambda gap: gap["ms"])
    assert slowest["causes"][0]["cause"] == Cause.SLOW_READER
    assert slowest["causes"][0]["ms"] >= 500.0


def test_a_load_from_a_tier_is_a_reason_to_wait() -> None:
    harness = harness_of(num_blocks=8, tier_places=32)
    add(harness, "one", 16)
    harness.drain()
    add(harness, "fills", 28)
    harness.drain()
    harness.arrive(Random(1))
    prompt = harness.requests["one"].prompt_ids.tolist()
    again = make_request("again", prompt, max_tokens=3, arrival_ms=harness.now_ms)
    harness.add(again)
    harness.drain()
    found = timeline(harness, "again")
    kinds = [event["event"] for event in found["events"]]
    assert kinds == [EventKind.LOAD_BEGUN, EventKind.LOAD_ENDED, EventKind.ADMITTED]
    assert reasons(harness, "again")[0] == WaitReason.KV_LOAD


def test_a_wait_for_grammar_masks_is_a_cause() -> None:
    harness = harness_of()
    add(harness, "one", 3, max_tokens=5)
    for _ in range(3):
        harness.step()
    harness.scheduler.history.mask_waits.append((harness.now_ms, 0.75))
    harness.drain()
    gap = timeline(harness, "one")["gaps"][-3]
    assert {"cause": Cause.GRAMMAR, "ms": 0.75} in gap["causes"]


@pytest.mark.parametrize("seed", range(12))
def test_causes_add_up_to_the_gaps_whatever_happens(seed: int) -> None:
    """Of requests that are preempted, paused, aborted or fail, too."""
    random = Random(seed)
    harness = run_case(random, draw_setup(random), 60, hold_share=0.1)
    for name, request in harness.requests.items():
        if request.sampling.use_beam_search:
            continue
        report = report_of(harness, name)
        found = explain(report)
        for gap in found["gaps"]:
            assert sum(part["ms"] for part in gap["causes"]) == pytest.approx(gap["ms"], abs=0.02)
        num_tokens = len(harness.tokens[name])
        if found["gaps"]:  # verified drafts may come with the first token
            num_tokens -= found["gaps"][0]["token"] - found["gaps"][0]["tokens"]
            assert sum(gap["tokens"] for gap in found["gaps"]) == num_tokens, name
        else:
            most = 1 + harness.setup.max_drafts
            assert num_tokens <= most, name
        assert found["finish_reason"]
        in_queue = sum(wait.to_ms - wait.from_ms for wait in report.waits)
        assert found["queue"]["ms"] <= in_queue + 0.01


# ---- the first miss


def miss_of(harness: Harness, name: str) -> tuple[str, int]:
    miss = timeline(harness, name)["cache"]["first_miss"]
    return miss["reason"], miss["token"]


def test_the_first_miss_is_named() -> None:
    harness = harness_of(num_blocks=64)
    known = list(range(12))
    for name, prompt in (
        ("new", known),
        ("same", [*known, 7]),
        ("differs", [*known[:6], 9, 9, 1, 1]),
        ("goes-on", [*known, 7, 7, 7, 7, 7]),
    ):
        harness.add(make_request(name, prompt, max_tokens=2, arrival_ms=harness.now_ms))
        harness.drain()
    assert miss_of(harness, "new") == (MissReason.NOT_SEEN, 0)
    assert miss_of(harness, "same") == ("partial_block", 12)
    assert miss_of(harness, "differs") == (MissReason.FIRST_DIFFERENCE, 6)
    assert miss_of(harness, "goes-on") == (MissReason.NOT_SEEN, 12)


def test_an_evicted_block_is_the_reason_of_a_miss() -> None:
    harness = harness_of(num_blocks=6)
    add(harness, "one", 8)
    harness.drain()
    add(harness, "fills", 20)
    harness.drain()
    prompt = harness.requests["one"].prompt_ids.tolist()
    harness.add(make_request("again", prompt, max_tokens=2, arrival_ms=harness.now_ms))
    harness.drain()
    assert miss_of(harness, "again")[0] == MissReason.EVICTED


def test_another_salt_of_the_same_tenant_is_named_and_of_another_tenant_is_not() -> None:
    harness = harness_of()
    prompt = list(range(8))
    for name, tenant, salt in (("a1", "a", "x"), ("a2", "a", "y"), ("b1", "b", "z")):
        harness.add(
            make_request(
                name, prompt, max_tokens=2, tenant=tenant, salt=salt, arrival_ms=harness.now_ms
            )
        )
        harness.drain()
    assert miss_of(harness, "a2")[0] == MissReason.OTHER_SALT
    assert miss_of(harness, "b1")[0] == MissReason.NOT_SEEN


def test_without_prefix_caching_the_miss_says_so() -> None:
    harness = harness_of(prefix_caching=False)
    add(harness, "one", 8)
    harness.drain()
    assert miss_of(harness, "one") == (MissReason.DISABLED, 0)


# ---- bounds


def test_old_steps_and_requests_are_forgotten() -> None:
    harness = harness_of(timeline_steps=2 * PACK_STEPS, max_model_len=64)
    add(harness, "old", 3, max_tokens=3)
    harness.drain()
    history = harness.scheduler.history
    number = 0
    while history.first_step < 2 * PACK_STEPS:
        add(harness, f"next-{number}", 3, max_tokens=60)
        harness.drain()
        number += 1
    assert harness.timelines(["old"]) == []
    assert len(history.ended) < number
    assert not timeline(harness, f"next-{number - 1}")["steps_missing"]


def test_a_long_request_keeps_its_last_steps_and_says_so() -> None:
    harness = harness_of(timeline_steps=PACK_STEPS, max_model_len=2048, num_blocks=600)
    add(harness, "long", 3, max_tokens=2 * PACK_STEPS + 9)
    harness.drain()
    found = timeline(harness, "long")
    assert found["steps_missing"]
    assert PACK_STEPS <= len(found["gaps"]) < 2 * PACK_STEPS


def test_a_report_reads_the_packs_of_the_reported_steps_only_and_streams_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = 2 * PACK_STEPS
    monkeypatch.setattr(step_rows, "MAX_REPORTED_STEPS", reported)
    harness = harness_of(max_model_len=4096, num_blocks=2000)
    for stream in range(2):
        add(harness, f"long/{stream}", 3, max_tokens=4 * PACK_STEPS)
    harness.drain()
    query = harness.scheduler.query_timelines(["long"])
    first, second = (query.next_report(harness.now_ms) for _ in range(2))
    assert first is not None
    assert second is not None
    assert len(first.rows.steps) == len(second.rows.steps) == reported
    assert first.is_cut
    assert query.num_packs_weighed <= reported // PACK_STEPS + 3  # the recent steps for each


def test_a_history_without_steps_keeps_nothing() -> None:
    harness = harness_of(timeline_steps=0)
    add(harness, "one", 3)
    harness.drain()
    assert harness.timelines(["one"]) == []
    assert not harness.scheduler.history.recent


def filled(num_steps: int, num_slots: int, tokens: int) -> tuple[StepHistory, int]:
    """Return a history of a batch that changes every step, and its bytes in memory."""
    tracemalloc.start()
    history, everyone = StepHistory(num_steps), np.arange(num_slots, dtype=np.int32)
    for step in range(1, num_steps + 1):
        slots = everyone[everyone != step % num_slots]
        counts = np.full_like(slots, tokens)
        history.recent.append((step, step, step + 0.5, slots, slots, counts, counts, None))
        if not step % PACK_STEPS:
            history.pack()
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return history, num_bytes


@pytest.mark.parametrize(("num_slots", "tokens"), [(64, 1), (256, 1), (256, 4)])
def test_a_history_takes_no_more_bytes_than_stated(num_slots: int, tokens: int) -> None:
    num_steps = 32 * PACK_STEPS
    history, num_bytes = filled(num_steps, num_slots, tokens)
    assert num_bytes <= num_steps * BYTES_PER_STEP
    if tokens == 1:
        assert history.first_step == 1
        # 37 bytes and the slots' bits, and what the test itself allocates.
        assert num_bytes <= num_steps * (37 + num_slots / 8 + 8)


def test_ended_requests_are_bounded() -> None:
    assert StepHistory(1024).ended.maxlen == MAX_HISTORIES


def test_events_of_a_request_are_bounded() -> None:
    harness = harness_of()
    add(harness, "slow", 3, max_tokens=60)
    harness.step()
    for _ in range(MAX_EVENTS):
        harness.scheduler.hold("slow", is_held=True, now_ms=harness.now_ms)
        harness.schedule()
        harness.scheduler.hold("slow", is_held=False, now_ms=harness.now_ms)
    found = timeline(harness, "slow")
    assert len(found["events"]) == MAX_EVENTS
    assert found["dropped_events"] == MAX_EVENTS + 1


def test_a_running_request_has_a_timeline_up_to_now() -> None:
    harness = harness_of()
    add(harness, "runs", 3, max_tokens=20)
    for _ in range(5):
        harness.step()
    found = timeline(harness, "runs")
    assert found["finish_reason"] is None
    assert len(found["gaps"]) == len(harness.tokens["runs"]) - 1 == 4

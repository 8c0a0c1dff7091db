"""Throughput, KV memory, prefix cache and cost: each rule at its threshold."""

from __future__ import annotations

import pytest

from quire.doctor.capacity_checks import (
    check_cost,
    check_memory,
    check_prefixes,
    check_throughput,
)
from quire.doctor.finding import Verdict
from quire.obs.timing import Goals
from tests.unit.doctor.made import situation


@pytest.mark.parametrize("check", [check_throughput, check_memory, check_prefixes, check_cost])
def test_a_healthy_server_is_ok(check: object) -> None:
    finding = check(situation(busy_s=8.5))  # type: ignore[operator]
    assert finding.verdict is Verdict.OK
    assert not finding.levers


def test_a_device_that_waits_for_the_host() -> None:
    for busy_s, verdict in ((7.9, Verdict.WARNING), (8.0, Verdict.OK)):
        finding = check_throughput(situation(busy_s=busy_s))
        assert finding.verdict is verdict
    finding = check_throughput(situation(busy_s=4.0))
    assert "the device waits for the host" in finding.found
    assert [lever.text for lever in finding.levers] == ["--plans-in-flight 2 (at best)"]
    assert finding.levers[0].change == {"price": 0.4, "plans_in_flight": 2}
    assert check_throughput(situation(busy_s=4.0, running=(0, 4))).verdict is Verdict.OK
    assert check_throughput(situation(busy_s=4.0, steps=19)).verdict is Verdict.OK


def test_small_batches_behind_a_queue() -> None:
    loaded = {"busy_s": 9.0, "waiting": (2, 3)}
    finding = check_throughput(situation(**loaded, rows=3, used=(95, 95)))
    assert "small batches while requests wait, limited by KV blocks" in finding.found
    assert finding.levers[0].text == "--kv-cache-memory 200MiB"
    finding = check_throughput(situation(**loaded, rows=3))
    assert "limited by admission" in finding.found
    assert check_throughput(situation(**loaded, rows=4)).verdict is Verdict.OK
    full = check_throughput(situation(**loaded, rows=8, running=(8, 8)))
    assert "all 8 slots are taken" in full.found
    assert full.levers[0].text == "--max-num-seqs 16"
    nobody_waits = situation(busy_s=9.0, waiting=(0, 3), rows=3)
    assert check_throughput(nobody_waits).verdict is Verdict.OK


def test_memory_pressure_by_use_and_by_preemptions() -> None:
    assert check_memory(situation(used=(10, 89))).verdict is Verdict.OK
    assert check_memory(situation(used=(90, 10))).verdict is Verdict.WARNING
    for preemptions, verdict in (
        (5, Verdict.OK),
        (6, Verdict.WARNING),
        (50, Verdict.WARNING),
        (51, Verdict.PROBLEM),
    ):
        finding = check_memory(situation(preemptions=preemptions))
        assert finding.verdict is verdict
    assert finding.metric == "preemptions_per_100"
    assert finding.evidence["quire_preemptions_by_reason_total"] == "answer 51"
    assert finding.levers[0].text == "--kv-cache-memory 200MiB"
    assert finding.levers[2].text.startswith("--max-num-seqs")


def test_evicted_prefixes() -> None:
    evicts = {"queried": 1000, "hits": 299, "used": (50, 50), "cached": (45, 45)}
    finding = check_prefixes(situation(**evicts))
    assert finding.verdict is Verdict.WARNING
    assert "--kv-tier-path DIR" in finding.action
    assert "not simulated" in finding.note
    assert check_prefixes(situation(**{**evicts, "hits": 300})).verdict is Verdict.OK
    assert check_prefixes(situation(**{**evicts, "queried": 999})).verdict is Verdict.OK
    roomy = check_prefixes(situation(**{**evicts, "cached": (44, 44)}))
    assert roomy.verdict is Verdict.OK
    assert "prompts do not begin alike" in roomy.found


def test_an_idle_device_costs_money_only_if_there_is_traffic_and_goals_are_met() -> None:
    idle = {"busy_s": 4.9, "running": (0, 0)}
    finding = check_cost(situation(**idle))
    assert finding.verdict is Verdict.WARNING
    assert finding.metric == "capacity"
    assert check_cost(situation(**{**idle, "busy_s": 5.0})).verdict is Verdict.OK
    assert check_cost(situation(**{**idle, "running": (1, 1)})).verdict is Verdict.OK
    few = check_cost(situation(**idle, choices=9))
    assert "too little traffic" in few.found
    missed = check_cost(situation(**idle, goals=Goals(ttft_s=0.01)))
    assert (missed.verdict, "missed already" in missed.found) == (Verdict.OK, True)

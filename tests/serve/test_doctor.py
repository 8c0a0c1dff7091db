"""`quire doctor URL` on a real server that is idle, overloaded, and short of KV blocks.

One small server for all: few slots and few blocks. The time between the two readings is the time of
one request with many prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.doctor import scenario
from quire.doctor.finding import Finding, Verdict
from quire.doctor.server_exam import ServerExam, examine_server
from quire.doctor.server_reader import ServerReader
from quire.obs.timing import Goals
from tests.serve.running_server import RunningServer
from tests.unit.cli.command import quire_main

COMPLETIONS = "/v1/completions"
KEY = "sk-doctor"
# Four slots, but KV blocks for two long requests only.
FLAGS = ("--max-num-seqs", "4", "--threads", "1", "--kv-cache-memory", "64KiB")


@pytest.fixture(scope="module")
def small(tiny: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny, *FLAGS, "--api-key", KEY) as server:
        yield server


@pytest.fixture(autouse=True)
def _small_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "_MIN_REQUESTS", 12)
    monkeypatch.setattr(scenario, "_MAX_OUTPUT_TOKENS", 1000)


def burst(server: RunningServer, prompts: int, max_tokens: int) -> Callable[[float], None]:
    """Return a wait in which so many prompts arrive at once and are answered."""

    def wait(seconds: float) -> None:
        texts = [f"{number} a" for number in range(prompts)]
        body = {"prompt": texts, "max_tokens": max_tokens, "ignore_eos": True}
        status, _, raw = server.request(
            "POST", COMPLETIONS, json.dumps(body).encode(), Authorization=f"Bearer {KEY}"
        )
        assert status == 200, raw

    return wait


def exam_of(server: RunningServer, wait: Callable[[float], None], goals: Goals) -> ServerExam:
    reader = ServerReader(server.url, api_key=KEY)
    return examine_server(reader, seconds=1.0, goals=goals, wait=wait)


def named(exam: ServerExam, check: str) -> Finding:
    [finding] = [one for one in exam.findings if one.check == check]
    return finding


def test_an_idle_server_has_too_little_traffic_to_judge(small: RunningServer) -> None:
    exam = exam_of(small, lambda _: None, Goals())
    assert "too little to judge: 0 choices ended" in named(exam, "traffic").found
    assert {one.verdict for one in exam.findings} == {Verdict.OK}
    assert exam.about["model"] == "tiny"
    engine = exam.situation.engine
    assert engine is not None
    assert (engine.slots, engine.block_size) == (4, 16)
    assert engine.num_blocks * engine.block_bytes <= 64 * 1024


def test_a_queue_for_slots_is_high_ttft_and_names_the_flag(small: RunningServer) -> None:
    # each request has one or two blocks, of which there are enough for all slots
    exam = exam_of(small, burst(small, 24, 20), Goals(ttft_s=1e-5, tpot_s=10.0))
    finding = named(exam, "TTFT")
    assert finding.verdict is Verdict.PROBLEM
    assert "% is queueing" in finding.found
    assert "for one of the 4 slots" in finding.found
    assert finding.levers[0].text.startswith("--max-num-seqs 8")
    assert exam.situation.queued.num == 24
    assert named(exam, "TPOT").verdict is Verdict.OK
    assert named(exam, "KV memory").verdict is Verdict.OK


def test_memory_pressure_is_found_by_preemptions_and_more_memory_is_predicted_to_help(
    small: RunningServer,
) -> None:
    exam = exam_of(small, burst(small, 12, 100), Goals(ttft_s=10.0, tpot_s=10.0))
    finding = named(exam, "KV memory")
    assert finding.verdict is not Verdict.OK
    assert exam.situation.preemptions > 0
    assert finding.evidence["quire_preemptions_by_reason_total"] != "-"
    assert finding.levers[0].text.startswith("--kv-cache-memory ")
    simulated = scenario.scenario_of(exam.situation)
    assert isinstance(simulated, scenario.Scenario)
    before = scenario.scenario_metrics(simulated, saturated=True)
    more = simulated.changed(finding.levers[0].change)
    after = scenario.scenario_metrics(more, saturated=True)
    assert after["preemptions_per_100"] < before["preemptions_per_100"]


def test_the_command_needs_the_key_and_prints_the_findings(small: RunningServer) -> None:
    done = quire_main("doctor", small.url, "--seconds", "0.01")
    assert done.returncode == 1
    assert "/metrics needs a key: give one with --api-key" in done.stderr
    done = quire_main("doctor", small.url, "--seconds", "0.01", "--api-key", KEY, "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, outcome["verdict"], outcome["model"]) == (0, "ok", "tiny")
    assert [one["check"] for one in outcome["findings"]][:3] == ["health", "traffic", "TTFT"]

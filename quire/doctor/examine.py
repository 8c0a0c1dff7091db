"""Examine this machine or a server: read, check, predict. The only module with both sides.

`server_findings` waits between its two readings by the function it is given, so that tests need
not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.doctor.capacity_checks import (
    check_cost,
    check_memory,
    check_prefixes,
    check_throughput,
)
from quire.doctor.finding import Finding
from quire.doctor.latency_checks import check_tails, check_tpot, check_ttft
from quire.doctor.machine_checks import machine_findings
from quire.doctor.machine_facts import MachineFacts, read_machine
from quire.doctor.prediction import with_predictions
from quire.doctor.readings import Reading, Window, read_metrics
from quire.doctor.server_reader import ServerReader
from quire.doctor.service_checks import (
    check_errors,
    check_health,
    check_parts,
    check_refusals,
    check_traffic,
)
from quire.doctor.situation import Situation, engine_view
from quire.obs.timing import Goals

SERVER_CHECKS: tuple[Callable[[Situation], Finding], ...] = (
    *(check_health, check_traffic, check_ttft, check_tpot, check_tails, check_throughput),
    *(check_memory, check_prefixes, check_cost, check_errors, check_refusals, check_parts),
)


def examine_machine(
    *, places: Mapping[str, Path], asked_isa: str, quick: bool
) -> tuple[MachineFacts, list[Finding]]:
    """Return the facts and findings of this machine. quick: without the probes that compute."""
    facts = read_machine(places=places, asked_isa=asked_isa)
    findings = machine_findings(facts)
    if not quick and not facts.native.error:
        from quire.doctor.probes import bandwidth, self_test

        findings.append(bandwidth(facts.num_cores, facts.memory.available_bytes))
        findings.append(self_test(facts.num_cores))
    return facts, findings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExam:
    """A server, read twice, and its findings. about: what it is, for the report."""

    about: Mapping[str, Any]
    situation: Situation
    findings: list[Finding]


def examine_server(
    reader: ServerReader,
    *,
    seconds: float,
    goals: Goals,
    wait: Callable[[float], None] = time.sleep,
    now_s: Callable[[], float] = time.monotonic,
) -> ServerExam:
    """Read a server twice, `seconds` apart, and check it. Raises WorkerError."""
    version = reader.check_is_quire()
    first = _reading(reader, now_s)
    wait(seconds)
    last = _reading(reader, now_s)
    listed = reader.optional("/v1/models") or {}
    models = listed.get("data")
    model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    health = reader.get("/health").json()
    situation = Situation(
        window=Window(first, last),
        goals=goals,
        engine=engine_view(reader.optional("/v1/engine")),
        health=health if isinstance(health, dict) else {},
        model=model,
    )
    findings = [check(situation) for check in SERVER_CHECKS]
    about = {
        "server": reader.shown,
        "version": version,
        "model": str(model.get("id", "")),
        "seconds": situation.window.seconds,
        "goals": {"ttft_ms": 1e3 * goals.ttft_s, "tpot_ms": 1e3 * goals.tpot_s},
    }
    return ServerExam(
        about=about, situation=situation, findings=with_predictions(findings, situation)
    )


def _reading(reader: ServerReader, now_s: Callable[[], float]) -> Reading:
    text = reader.required("/metrics").text
    return read_metrics(text, at_s=now_s(), where=f"{reader.shown}/metrics")

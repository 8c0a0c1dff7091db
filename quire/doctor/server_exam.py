"""Examine a server: read it twice, check what happened between, and predict effects of levers.

The time between the readings passes in a function that is given, so that tests need not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.doctor.capacity_checks import (
    check_cost,
    check_memory,
    check_prefixes,
    check_throughput,
)
from quire.doctor.finding import Finding
from quire.doctor.latency_checks import check_tails, check_tpot, check_ttft
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

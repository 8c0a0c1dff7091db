"""Streams through a router while replicas are killed, stopped, drained and hung: none is wrong.

The short form of `python -m bench.fleet`, by counts: no time is judged.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from bench.fleet.__main__ import run
from bench.fleet.clients import CASES, Case
from bench.fleet.faults import KINDS
from bench.fleet.processes import Replica
from tests.serve.preloaded import forked_children
from tests.serve.running_server import children_of


def _shorter(case: Case) -> Case:
    """Return a case with an answer of fewer tokens."""
    most = {"max_tokens": 120, **({"min_tokens": 110} if "min_tokens" in case.body else {})}
    return replace(case, body={**case.body, **most})


def _signal_engine(replica: Replica, number: int) -> None:
    """Signal the children of a server but for the template of a preloaded one."""
    assert replica._process is not None
    for child in children_of(replica._process.pid):
        os.kill(child, number)


def test_every_answer_equals_the_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "signal_engine", _signal_engine)
    with forked_children():
        found = run(
            streams=8,
            seconds=600.0,
            num_replicas=2,
            seed=55,  # kills a server, then an engine
            pause_s=0.2,
            stall_s=2.0,
            max_faults=2,
            short_requests=4,
            cases=[_shorter(case) for case in CASES],
        )
    assert found["wrong"] == found["router"]["wrong_without_faults"] == []
    assert found["done"]["answers"] >= 8
    assert found["router"]["resumed_streams"] > 0
    assert found["router"]["broken_streams"] == 0
    interruptions = found["interruptions"]
    assert 0 < interruptions["all"]["streams"] <= found["router"]["resumed_streams"]
    assert interruptions["all"]["seconds_at_most"]["+Inf"] == interruptions["all"]["streams"]
    assert sum(interruptions[kind]["streams"] for kind in KINDS) <= interruptions["all"]["streams"]
    assert found["router"]["streamed_tokens_without_faults"] > 500
    assert sum(found["faults"][kind]["count"] for kind in KINDS) == 2
    assert found["machine"]["cores"] >= 1

"""Streams through a router while replicas are killed, stopped, drained and hung: none is wrong.

The short form of `python -m bench.fleet`, by counts: no time is judged.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.__main__ import _seconds, run, write
from bench.fleet.clients import CASES, Case
from bench.fleet.faults import KINDS
from bench.fleet.processes import GATEWAY_NICE, Replica, Router
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
    assert found["router"]["nice"] in (GATEWAY_NICE, os.getpriority(os.PRIO_PROCESS, 0))
    assert sum(found["faults"][kind]["count"] for kind in KINDS) == 2
    assert found["machine"]["cores"] >= 1
    assert (found["floor_s"]["streams"], found["slow_reads"]) == (2 * 4, 0)
    assert 0 < found["floor_s"]["p50"] <= found["floor_s"]["p99"] <= found["floor_s"]["max"]


def test_a_run_replaces_that_of_as_many_streams(tmp_path: Path) -> None:
    """What another gateway did stays until it is measured again."""
    card = {"load_at_start": 0.1}
    old = {"streams": 1000, "machine": card, "done": 1, "beside": {"smg": {"broken": 3}}}
    (path := tmp_path / "fleet.json").write_text(json.dumps(old))
    write(path, {"streams": 300, "machine": {"load_at_start": 5.0}, "done": 2})
    write(path, {"streams": 1000, "machine": card, "done": 3})
    found = json.loads(path.read_text())
    assert found["machine"]["load_at_start"] == 5.0
    assert {name: run["done"] for name, run in found["runs"].items()} == {"300": 2, "1000": 3}
    assert found["runs"]["1000"]["beside"] == old["beside"]
    assert "beside" not in found["runs"]["300"]


def test_a_counter_that_does_not_come_is_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The first connection is closed without an answer."""
    router = object.__new__(Router)
    router._process, router.num_slow_reads = subprocess.Popen(["sleep", "60"]), 0
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        router.port = listening.getsockname()[1]

        def answer() -> None:
            listening.accept()[0].close()
            connection = listening.accept()[0]
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na 3\n")
            connection.close()

        answering = thread.submit(answer)
        try:
            assert router.metrics() == {"a": 3.0}
        finally:
            router._process.kill()
            router._process.wait()
        answering.result()
    assert router.num_slow_reads == 1
    assert "did not answer /metrics" in capsys.readouterr().err


def test_both_runs_fit_into_the_time_that_is_left() -> None:
    assert _seconds(300.0, 1000.0, 2) == 300.0
    assert _seconds(300.0, 500.0, 2) == 190.0
    with pytest.raises(SystemExit, match="allow more"):
        _seconds(300.0, 100.0, 2)

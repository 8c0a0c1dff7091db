"""Trace files: valid JSON at every moment, bounded, and no obstacle to the engine."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.base.engine_stats import EngineStats
from quire.base.errors import SettingError
from quire.base.report import Field
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig, SchedulerConfig
from quire.engine import new_file, trace_file
from quire.engine.new_file import open_new
from quire.engine.process.messages import Outputs
from quire.engine.trace_file import TraceFile
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


class Reports:
    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, what: str, **fields: Field) -> None:
        self.said.append(what)


PLAIN = Setup()


def traced(tmp_path: Path, setup: Setup = PLAIN) -> tuple[Harness, TraceFile, Path, Reports]:
    harness, reports, path = Harness(setup), Reports(), tmp_path / "trace.json"
    return (
        harness,
        TraceFile(open_new(path, "--trace")[0], harness.scheduler.history, reports),
        path,
        reports,
    )


def as_killed(path: Path) -> list[dict[str, Any]]:
    """Read the file as it is after SIGKILL, without a closing bracket."""
    text = path.read_text().rstrip()
    assert text.endswith(",")
    events: list[dict[str, Any]] = json.loads(text.rstrip(",") + "]")
    return events


def run_two(harness: Harness) -> None:
    harness.add(make_request("1/cmpl-a#1/0", [1] * 10, max_tokens=12))
    harness.add(make_request("1/cmpl-b#2/0", [2] * 4, max_tokens=12))
    harness.drain()


def test_steps_requests_and_counters_have_tracks(tmp_path: Path) -> None:
    setup = Setup(num_blocks=6, prefix_caching=False, max_num_seqs=2)
    harness, trace, path, _ = traced(tmp_path, setup)
    run_two(harness)
    watched = trace.watch(lambda message: None)
    watched(Outputs(outputs=None, stats=harness.scheduler.stats()))
    trace.write_new()
    events = as_killed(path)
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == len(harness.plans)
    assert sum(step["args"]["tokens"] for step in steps) == sum(
        plan.num_tokens for plan in harness.plans
    )
    ends = [step["ts"] + step["dur"] for step in steps]
    assert ends == sorted(ends)
    spans = [event for event in events if event.get("cat") == "request"]
    assert Counter(event["ph"] for event in spans) == {"b": len(spans) / 2, "e": len(spans) / 2}
    names = {event["name"] for event in spans}
    assert names == {"request", "queue", "prefill", "decode", "preempted"}
    ids = {event["args"]["id"] for event in spans if event["name"] == "request" and "args" in event}
    assert ids == {"cmpl-a", "cmpl-b"}
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"requests", "KV blocks"}


def test_loads_from_a_tier_are_spans(tmp_path: Path) -> None:
    harness, trace, path, _ = traced(tmp_path, Setup(num_blocks=8, tier_places=32))
    for name, prompt in (("a", [1] * 16), ("fills", [2] * 28)):
        harness.add(make_request(name, prompt, max_tokens=2))
        harness.drain()
    harness.add(make_request("b", [1] * 16, max_tokens=2))
    harness.drain()
    trace.write_new()
    loads = [event for event in as_killed(path) if event.get("cat") == "kv tier"]
    assert [event["ph"] for event in loads] == ["b", "e"]


def test_each_call_writes_what_is_new_and_a_closed_file_is_whole_json(tmp_path: Path) -> None:
    harness, trace, path, _ = traced(tmp_path)
    trace.start()
    run_two(harness)
    trace.write_new()
    before = len(as_killed(path))
    trace.write_new()
    assert len(as_killed(path)) == before
    trace.close(timeout_s=60.0)
    events = json.loads(path.read_text())
    assert events[-1]["name"] == "end of trace"
    assert events[-1]["args"] == {"dropped": 0}


def test_a_full_disk_drops_events_counts_them_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, trace, path, reports = traced(tmp_path)
    write, room = os.write, [300]

    def short_of_room(descriptor: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, content[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(trace_file.os, "write", short_of_room)
    run_two(harness)
    trace.write_new()
    trace.write_new()
    assert len(as_killed(path)) == 2  # the names of the tracks
    assert trace.num_dropped >= len(harness.plans)
    assert reports.said == ["the trace drops events"]
    room[0] = 1 << 20
    harness.add(make_request("late", [1, 2], max_tokens=2))
    harness.drain()
    trace.write_new()
    events = as_killed(path)
    (note,) = (event for event in events if event["name"] == "dropped")
    assert note["args"]["events"] == trace.num_dropped


def test_steps_that_are_overwritten_before_they_are_read_are_counted(tmp_path: Path) -> None:
    harness, trace, path, _ = traced(tmp_path, Setup(timeline_steps=256, max_model_len=1024))
    for _ in range(12):
        harness.add(make_request(f"r{len(harness.requests)}", [1, 2, 3], max_tokens=60))
        harness.drain()
    trace.write_new()
    steps = [event for event in as_killed(path) if event["ph"] == "X"]
    assert trace.num_dropped > 0
    assert len(steps) + trace.num_dropped == len(harness.plans)


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingError, match="name a file in a directory that exists"):
        open_new(tmp_path / "no" / "trace.json", "--trace")
    with pytest.raises(SettingError, match="timeline_steps is 0"):
        EngineConfig(
            scheduler=SchedulerConfig(timeline_steps=0),
            executor=ExecutorConfig(trace_file="t.json"),
        )


def test_a_restart_writes_a_numbered_file_and_keeps_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setattr(new_file, "MAX_FILES", 3)
    for name in ("trace.json", "trace-1.json", "trace-2.json"):
        descriptor, numbered = open_new(path, "--trace")
        os.write(descriptor, name.encode())
        os.close(descriptor)
        assert numbered == tmp_path / name
    assert {file.read_text() for file in tmp_path.iterdir()} == {
        file.name for file in tmp_path.iterdir()
    }
    with pytest.raises(SettingError, match="exists, with the numbers up to 2; remove old files"):
        open_new(path, "--trace")


def test_a_link_and_a_directory_are_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for path in (tmp_path / "link", tmp_path, Path("/")):
        with pytest.raises(SettingError, match="is not a regular file; name a new file"):
            open_new(path, "--trace")
    assert [file.name for file in tmp_path.iterdir()] == ["link"]


def test_a_file_of_the_largest_size_grows_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "MAX_FILE_BYTES", 400)
    harness, trace, path, reports = traced(tmp_path)
    run_two(harness)
    trace.write_new()
    assert path.stat().st_size <= 400
    assert trace.num_dropped >= len(harness.plans)
    assert reports.said == ["the trace drops events"]


def test_counters_are_written_when_they_change(tmp_path: Path) -> None:
    _, trace, path, _ = traced(tmp_path)
    watched = trace.watch(lambda message: None)
    for running in (1, 1, 2):
        watched(Outputs(outputs=None, stats=EngineStats(running=running)))
        trace.write_new()
    counters = [event for event in as_killed(path) if event["name"] == "requests"]
    assert [event["args"]["running"] for event in counters] == [1, 2]


def test_an_event_that_cannot_be_made_is_counted_and_the_trace_goes_on(tmp_path: Path) -> None:
    harness, trace, path, reports = traced(tmp_path)
    run_two(harness)
    damaged = harness.scheduler.history.ended[0]
    damaged.events.append(None)  # type: ignore[arg-type]
    trace._try_to_write()
    assert reports.said == ["the trace drops events"]
    assert trace.num_dropped == 1
    damaged.events.pop()
    harness.add(make_request("late", [1, 2], max_tokens=2))
    harness.drain()
    trace._try_to_write()
    shown = [event.get("args", {}).get("id") for event in as_killed(path)]
    assert "late" in shown

"""When and why replicas with faults were given up is found in a router's log."""

from __future__ import annotations

import io
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from bench.fleet.detections import MAX_SHOWN, detections
from bench.fleet.router_log import Injected, events
from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router.replica import Replica
from quire.router.silence_report import GIVEN_UP, KEPT, SilenceReport

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"
OTHERS = f"{TWO} ready, its circuit breaker open, beat 12 ms ago, progress 340 ms ago"


def at(log: list[str], at_s: float) -> list[str]:
    """Return lines as written at another time."""
    stamp = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return [f"{stamp} {line.partition(' ')[2]}" for line in log]


def written(what: str, **fields: Any) -> list[str]:
    log = Log("router", stream := io.StringIO())
    log.warning(what, replica=ONE, **fields)
    return stream.getvalue().splitlines()


def silent(what: str, sign: str, silent_ms: int) -> list[str]:
    return written(what, sign=sign, silent_ms=silent_ms, limit_ms=600, others=OTHERS)


def fenced(state: str = "stalled") -> list[str]:
    return written("replica fenced", state=state, reason="no sign of life", open=5, others=1)


def test_a_late_detection_has_the_router_s_reasons_and_a_soon_one_is_counted() -> None:
    now_s = time.time()
    faults = [
        Injected("stop", ONE, now_s - 100, now_s - 95),
        Injected("stop", TWO, now_s - 90, now_s - 80),
        Injected("stop", ONE, now_s - 50, now_s - 40),
        Injected("drain", ONE, now_s - 30, now_s - 20),
    ]
    log = at(silent(GIVEN_UP, "beats", 612) + fenced(), now_s - 99.3)
    log += at(silent(KEPT, "beats", 640), now_s - 49.3)
    log += at(silent(GIVEN_UP, "answers", 1500) + fenced(), now_s - 48.2)
    log += at(silent(KEPT, "beats", 900), now_s - 45.0)
    found = detections(log, faults)
    [missed, late] = found["late"]
    assert missed == {"kind": "stop", "seconds": None, "kept": {}}
    assert found["num_late"] == 2
    assert 1.7 < late.pop("seconds") < 1.9
    kept = {"sign": "beats", "silent_ms": "640", "limit_ms": "600", "others": OTHERS}
    given_up = {"sign": "answers", "silent_ms": "1500", "limit_ms": "600", "others": OTHERS}
    assert late == {
        "kind": "stop",
        "reason": "no sign of life",
        "open": 5,
        "given_up": given_up,
        "kept": kept,
    }
    [by_kind] = found["by_kind"].values()
    assert by_kind["count"] == 2
    assert by_kind["signs"] == {"beats": 1, "answers": 1}
    assert 0.6 < by_kind["median_s"] < by_kind["max_s"] < 1.9


def test_a_connection_that_is_closed_counts_by_the_state_and_many_late_ones_are_counted() -> None:
    now_s = time.time()
    faults = [Injected("kill", ONE, now_s - 10, now_s - 5)]
    found = detections(at(fenced("unreachable"), now_s - 9.9), faults)
    assert found["by_kind"]["kill"]["signs"] == {"unreachable": 1}
    assert found["late"] == []
    found = detections([], faults * 30)
    assert (found["num_late"], len(found["late"])) == (30, MAX_SHOWN)


@pytest.mark.parametrize("what", ["given_up", "kept"])
def test_what_the_router_writes_is_read(what: str) -> None:
    """One line for each silence that is waited for."""
    one, two = (Replica(server_url(url), number) for number, url in enumerate((ONE, TWO)))
    one.progress_s, two.progress_s = 9.0, 9.66
    two.state, two.is_fenced = "ready", False
    two.breaker.stalled(9.9)
    no_beat_s: dict[Replica, float | None] = {one: 0.7, two: 0.012}
    beats: Any = SimpleNamespace(quiet_s=lambda replica, now_s: no_beat_s[replica])
    fleet: Any = SimpleNamespace(replicas={ONE: one, TWO: two})
    report = SilenceReport(fleet, beats, Log("router", stream := io.StringIO()))
    for _ in range(2):
        getattr(report, what)(one, "beats", 0.65, 0.6, 10.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == {"given_up": 2, "kept": 1}[what]
    event = next(events(lines))
    assert event.what == {"given_up": GIVEN_UP, "kept": KEPT}[what]
    assert event.fields == {
        "replica": ONE,
        "sign": "beats",
        "silent_ms": "650",
        "limit_ms": "600",
        "no_beat_ms": "700",
        "no_progress_ms": "1000",
        "others": OTHERS,
    }
    report.ended(one)
    no_beat_s[one] = None
    report.kept(one, "beats", 0.65, 0.6, 10.0)
    assert "no_beat_ms=-1" in stream.getvalue()
    report.given_up(one, "engine", 0.65, None, 10.0)
    assert "sign=engine silent_ms=650 limit_ms=-1" in stream.getvalue()

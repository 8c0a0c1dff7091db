"""Healthy replicas that a router gave up are found in its log, and those with a fault are not."""

from __future__ import annotations

import io
import time

from bench.fleet.false_alarms import MAX_SHOWN, false_alarms
from bench.fleet.router_log import Injected
from quire.base.log import Log

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


def fences(*fenced: tuple[str, str]) -> list[str]:
    """Return the lines that a router writes now of replicas and states."""
    log = Log("router", stream := io.StringIO())
    log.event("replica added", replica=ONE)
    for url, state in fenced:
        why = "no progress for 2.1 s, limit 2.0"
        log.warning("replica fenced", replica=url, state=state, reason=why, open=5, others=1)
    return stream.getvalue().splitlines()


def test_only_silence_without_a_fault_of_the_replica_is_an_alarm() -> None:
    log = fences((ONE, "stalled"), (TWO, "stalled"), (TWO, "unreachable"))
    now_s = time.time()
    over = Injected("kill", TWO, now_s - 50, now_s - 20)
    found = false_alarms(log, [over, Injected("drain", ONE, now_s - 4, now_s + 1)])
    [alarm] = found["first"]
    assert found["count"] == 1
    assert 3.5 < alarm.pop("after_s") < 4.5
    assert alarm == {
        "after": "drain",
        "same_replica": False,
        "reason": "no progress for 2.1 s, limit 2.0",
        "open": 5,
        "others": 1,
    }


def test_many_are_counted_and_before_the_first_fault_none_is_named() -> None:
    log = fences(*[(ONE, "stalled")] * 30)
    found = false_alarms(log, [Injected("stop", TWO, time.time() + 60, time.time() + 70)])
    assert (found["count"], len(found["first"])) == (30, MAX_SHOWN)
    assert found["first"][0]["after"] == ""
    assert false_alarms(log, []) == {"count": 0, "first": []}

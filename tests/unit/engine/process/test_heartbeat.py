"""Heartbeat: beats only within a step that makes progress, and sleeps while none is in flight."""

from __future__ import annotations

import queue
import threading
from itertools import count

from quire.engine.core import StepCounts
from quire.engine.process.heartbeat import Heartbeat

PATIENCE_S = 20.0


def _submit(steps: StepCounts) -> None:
    """Count a plan as the engine's loop does."""
    steps.num_submitted += 1
    steps.active.set()


def test_a_long_step_with_progress_beats_and_an_idle_engine_is_not_checked() -> None:
    steps, beats, checks = StepCounts(), queue.SimpleQueue[int](), count(1)
    num_checks = 0

    def ops_done() -> int:
        nonlocal num_checks
        num_checks = next(checks)
        return num_checks

    heartbeat = Heartbeat(steps, ops_done=ops_done, beat=beats.put, period_s=0.005)
    for _ in range(2):
        _submit(steps)
        first = beats.get(timeout=PATIENCE_S)
        assert beats.get(timeout=PATIENCE_S) > first
        steps.num_collected += 1
        while steps.active.is_set():  # until the heartbeat waits for the next plan
            threading.Event().wait(0.005)
        checked = num_checks
        threading.Event().wait(0.05)
        assert num_checks == checked
    heartbeat.close()


def test_a_step_that_hangs_does_not_beat() -> None:
    steps, checked = StepCounts(), threading.Semaphore(0)

    def ops_done() -> int:
        checked.release()
        return 7

    beats: list[int] = []
    heartbeat = Heartbeat(steps, ops_done=ops_done, beat=beats.append, period_s=0.005)
    _submit(steps)
    for _ in range(4):
        assert checked.acquire(timeout=PATIENCE_S)
    heartbeat.close()
    assert beats == []

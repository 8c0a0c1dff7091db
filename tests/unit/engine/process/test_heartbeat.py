"""Heartbeat: beats while steps are long or nothing can be scheduled, and sleeps without work."""

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


def test_a_long_step_beats_and_an_idle_engine_is_not_checked() -> None:
    steps, beats, ops = StepCounts(), queue.SimpleQueue[int](), count(1)
    heartbeat = Heartbeat(steps, ops_done=lambda: next(ops), beat=beats.put, period_s=0.005)
    for _ in range(2):
        _submit(steps)
        first = beats.get(timeout=PATIENCE_S)
        assert beats.get(timeout=PATIENCE_S) > first
        steps.num_collected += 1
        while steps.active.is_set():  # until the heartbeat waits for the next step
            threading.Event().wait(0.005)
        for _ in range(100):  # a beat that was under way may take a while
            while not beats.empty():
                beats.get()
            threading.Event().wait(0.05)
            if beats.empty():
                break
        assert beats.empty()
    heartbeat.close()


def test_a_step_that_hangs_beats_without_progress() -> None:
    """The process lives; that nothing is computed shows in the counter."""
    steps, beats = StepCounts(), queue.SimpleQueue[int]()
    heartbeat = Heartbeat(steps, ops_done=lambda: 7, beat=beats.put, period_s=0.005)
    _submit(steps)
    assert [beats.get(timeout=PATIENCE_S) for _ in range(3)] == [7, 7, 7]
    heartbeat.close()


def test_an_engine_that_tries_steps_in_vain_beats() -> None:
    """Such as one with requests that wait for a grammar."""
    steps, beats = StepCounts(), queue.SimpleQueue[int]()
    heartbeat = Heartbeat(steps, ops_done=lambda: 0, beat=beats.put, period_s=0.005)
    for _ in range(3):
        while beats.empty():
            steps.active.set()
            threading.Event().wait(0.002)
        beats.get()
    heartbeat.close()


def test_a_close_between_the_end_of_a_period_and_the_next_ends_the_thread() -> None:
    class ClosedAtClear(threading.Event):
        def clear(self) -> None:
            if not closing.is_alive():
                closing.start()
                closing.join(0.2)  # it has woken the heartbeat, and waits for its end
            super().clear()

    steps = StepCounts()
    steps.active = ClosedAtClear()
    heartbeat = Heartbeat(steps, ops_done=lambda: 0, beat=lambda _: None, period_s=0.005)
    closing = threading.Thread(target=heartbeat.close, daemon=True)
    steps.active.set()
    while closing.ident is None:
        threading.Event().wait(0.005)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()

"""HeartbeatRunner: beats only during a step with progress, and sleeps while none is in flight."""

from __future__ import annotations

import contextlib
import queue
import threading
from itertools import count
from typing import Any

from quire.base.records import NO_INTS, StepPlan, StepResult
from quire.engine.process.heartbeat import HeartbeatRunner

PATIENCE_S = 20.0


class SlowRunner:
    """A runner that computes a plan in `collect`, for as long as the test wants."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.fails = False
        self.is_closed = False

    def submit(self, plan: StepPlan) -> Any:
        return plan

    def collect(self, handle: Any) -> StepResult:
        assert self.go_on.acquire(timeout=PATIENCE_S)
        if self.fails:
            raise RuntimeError("no")
        return StepResult(step=handle.step, token_counts=NO_INTS, token_ids=NO_INTS)

    def close(self) -> None:
        self.is_closed = True


def _step(runner: HeartbeatRunner) -> threading.Thread:
    """Run a step in its own thread, as the engine's loop does."""

    def step() -> None:
        with contextlib.suppress(RuntimeError):
            runner.collect(runner.submit(StepPlan(step=1)))

    thread = threading.Thread(target=step)
    thread.start()
    return thread


def test_a_long_step_with_progress_beats_and_an_idle_runner_sleeps() -> None:
    slow, beats, looks = SlowRunner(), queue.SimpleQueue[int](), count(1)
    num_looks = 0

    def ops_done() -> int:
        nonlocal num_looks
        num_looks = next(looks)
        return num_looks

    runner = HeartbeatRunner(slow, ops_done=ops_done, beat=beats.put, period_s=0.005)
    for fails in (False, True):
        slow.fails = fails
        thread = _step(runner)
        first = beats.get(timeout=PATIENCE_S)
        assert beats.get(timeout=PATIENCE_S) > first
        slow.go_on.release()
        thread.join(PATIENCE_S)
        threading.Event().wait(0.05)
        looked = num_looks
        threading.Event().wait(0.05)
        assert num_looks == looked
    runner.close()
    assert slow.is_closed


def test_a_step_that_hangs_does_not_beat() -> None:
    slow, looked = SlowRunner(), threading.Semaphore(0)

    def ops_done() -> int:
        looked.release()
        return 7

    beats: list[int] = []
    runner = HeartbeatRunner(slow, ops_done=ops_done, beat=beats.append, period_s=0.005)
    thread = _step(runner)
    for _ in range(4):
        assert looked.acquire(timeout=PATIENCE_S)
    slow.go_on.release()
    thread.join(PATIENCE_S)
    runner.close()
    assert beats == []

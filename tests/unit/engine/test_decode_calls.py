"""What the host does in a steady decode step, as counts: function calls, and releases of the GIL.

The step of a small model takes some hundred microseconds, and a function call on the host up to
one. The bounds have a little air. Raise them only for what a plain decode step must do.
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.cache.manager import CacheManager
from quire.engine.core import EngineCore
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.tensors import DType
from quire.runner.batch_builder import KeptRows, forward_batch
from quire.runner.model_runner import ModelRunner
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler
from quire.weights.checkpoint import open_checkpoint
from tests.tiny_models import write_tiny_llama
from tests.unit.runner.plans import admission_of, plan_of, runner_of
from tests.unit.runner.scripted_executor import ScriptedExecutor

MAX_LEN, NUM_BLOCKS, MAX_ROWS = 128, 160, 16
MAX_CALLS = 190


def core_of(folder: Path) -> EngineCore:
    """A core over the native executor and a tiny model."""
    write_tiny_llama(folder)
    limits = StepLimits(max_tokens=64, max_samples=MAX_ROWS, max_sequences=MAX_ROWS)
    executor = NativeExecutor(
        build_program(open_model(folder), dtype=DType.F32, max_positions=MAX_LEN),
        open_checkpoint(folder),
        ExecutorOptions(limits=limits),
    )
    executor.allocate_cache(NUM_BLOCKS, 16)
    runner = ModelRunner(
        executor,
        num_slots=MAX_ROWS,
        max_model_len=MAX_LEN,
        block_size=16,
        max_samples=MAX_ROWS,
    )
    scheduled = SchedulerLimits(
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
        plans_in_flight=1,
        timeline_steps=1024,
    )
    cache = CacheManager(NUM_BLOCKS, 16, prefix_caching=True)
    scheduler = Scheduler(scheduled, cache, FirstCome())
    return EngineCore(scheduler, runner, plans_in_flight=1, report=lambda what, **fields: None)


def request_of(number: int, **settings: Any) -> Request:
    """A request that decodes to the end of the context."""
    return Request(
        request_id=f"r{number}",
        group_id=f"r{number}",
        stream=0,
        prompt_ids=np.array([5, 6, 7 + number], np.int32),
        sampling=SamplingParams(seed=number, **settings),
        stop_ids=(),
        max_total_tokens=MAX_LEN,
        arrival_ms=0.0,
    )


def calls_of(core: EngineCore, clock: count[int]) -> int:
    """Return how many functions one step calls, of Python and of C."""
    calls = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        core.step(lambda: float(next(clock)))
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}],
    ids=["greedy", "sampled"],
)
def test_a_steady_decode_step_makes_few_calls(
    tmp_path: Path, num_rows: int, settings: dict[str, Any]
) -> None:
    """Of any number of rows and with any truncation; a step that takes no new block."""
    core, clock = core_of(tmp_path), count()
    core.add([request_of(number, **settings) for number in range(num_rows)])
    for _ in range(8):
        core.step(lambda: float(next(clock)))
    fewest = min(calls_of(core, clock) for _ in range(6))
    core.runner.close()
    assert fewest <= MAX_CALLS


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_decode_batch_is_made_without_releasing_the_gil(num_rows: int) -> None:
    """A thread that waits for the GIL gets it when the model runs, and not before: else its work
    delays the step."""
    runner = runner_of(ScriptedExecutor())
    admissions = tuple(admission_of(slot, [1, 2, 3]) for slot in range(num_rows))
    rows = [(slot, 0, 3, 1) for slot in range(num_rows)]
    runner.submit(plan_of(1, rows, admissions=admissions))
    plan = plan_of(2, [(slot, 3, 1, 1) for slot in range(num_rows)])
    kept = KeptRows(runner.tables)
    forward_batch(plan, runner.tables, kept.of(plan))  # the first one fills caches
    waits, ended, times_run = threading.Event(), threading.Event(), [0]

    def wait_for_gil() -> None:
        while not ended.is_set():
            waits.wait()
            waits.clear()
            times_run[0] += 1

    waiter = threading.Thread(target=wait_for_gil, daemon=True)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a running thread is not asked to give the GIL up
    try:
        waiter.start()
        released = 0
        for _ in range(50):
            time.sleep(0.0002)
            waits.set()
            until_s = time.perf_counter() + 100e-6  # for the waiter to wake up
            while time.perf_counter() < until_s:
                pass
            before = times_run[0]
            for _ in range(10):
                forward_batch(plan, runner.tables, kept.of(plan))
            released += times_run[0] - before
    finally:
        sys.setswitchinterval(interval_s)
        ended.set()
        waits.set()
    waiter.join()
    assert released == 0

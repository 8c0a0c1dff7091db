"""Instruction set selection, and threads that sleep when idle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from tests.kernels.isas import EVERY_ISA
from tests.kernels.one_op import OneOp, Operand, draw

PRINT_ISA = "from quire import _native; print(_native.isa(), _native.Pool(1).isa)"


def _run_with_isa(name: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"QUIRE_ISA": name, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", PRINT_ISA], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_quire_isa_forces_an_instruction_set(isa: str) -> None:
    assert _run_with_isa(isa).stdout.split() == [isa, isa]


def test_an_unavailable_instruction_set_is_an_error_that_lists_the_available() -> None:
    result = _run_with_isa("avx1024")
    assert result.returncode != 0
    assert 'QUIRE_ISA is "avx1024"; this machine can run: ' in result.stderr
    assert "portable" in result.stderr


def test_portable_is_always_available_and_listed_last() -> None:
    assert EVERY_ISA[-1] == "portable"


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_an_invalid_thread_count_is_rejected(num_threads: int) -> None:
    with pytest.raises(RuntimeError, match=f"num_threads is {num_threads}"):
        _native.Pool(num_threads)


def test_idle_workers_sleep_and_wake_to_the_same_results() -> None:
    before = _thread_ids()
    rng = np.random.default_rng(0)
    w, x = draw(rng, 640, 64), draw(rng, 4, 64)
    op = OneOp("linear", [Operand(64), Operand(640)], "", 3, weights=[("matrix", "f32", w)])
    workers = _thread_ids() - before
    assert len(workers) == 2
    expected = op({0: x}, num_rows=4)[1]
    for _ in range(3):
        deadline = time.monotonic() + 30
        while not all(_state(worker) == "S" for worker in workers):
            assert time.monotonic() < deadline, "idle workers never slept"
            time.sleep(0.005)
        np.testing.assert_array_equal(op({0: x}, num_rows=4)[1], expected)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_of_a_body_reaches_the_caller_and_the_pool_continues(failing: int) -> None:
    pool = _native.Pool(2)
    started = [threading.Event(), threading.Event()]

    def body(begin: int, end: int, thread: int) -> None:
        started[thread].set()
        assert started[1 - thread].wait(30), "the other thread never ran"
        if thread == failing:
            raise KeyError(f"thread {thread}")

    with pytest.raises(KeyError, match=f"thread {failing}"):
        pool.deal(2, body)
    for _ in range(50):
        seen: list[int] = []
        pool.deal(40, lambda begin, end, thread, seen=seen: seen.extend(range(begin, end)))
        assert sorted(seen) == list(range(40))


def test_closed_pools_leave_no_threads() -> None:
    before = _thread_ids()
    for _ in range(20):
        _native.Pool(4)
    deadline = time.monotonic() + 30
    while _thread_ids() - before:  # one that was joined may still be listed
        assert time.monotonic() < deadline, "threads are left"
        time.sleep(0.001)


def _thread_ids() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def _state(thread: str) -> str:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]

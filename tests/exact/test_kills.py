"""Kills of engines of all roles, and of the store that they share: nothing wrong, none left.

The short form of `python -m bench.disaggregation_kills --store`: its engines are processes, killed
with SIGKILL. It is a process of its own, because it forks.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.disaggregation_kills import SharedMemory
from tests.exact.test_disaggregation import nixl_is_installed
from tests.tiny_models import write_tiny_llama

NUM_KILLS = 12  # a third of them of the store


@pytest.mark.parametrize(
    "backend",
    [
        "auto",
        pytest.param("nixl", marks=pytest.mark.skipif(not nixl_is_installed(), reason="no NIXL")),
    ],
)
def test_engines_and_a_store_that_are_killed_leave_nothing(tmp_path: Path, backend: str) -> None:
    model = write_tiny_llama(
        tmp_path / "model", seed=7, vocab_size=1024, max_position_embeddings=1024
    )
    blocks = Counter[str]()
    for seed in range(2, 5):  # on a busy machine engines may be killed before anything has come
        out = tmp_path / f"kills-{seed}.json"
        command = [sys.executable, "-m", "bench.disaggregation_kills", "--store"]
        command += ["--seed", str(seed), "--kills", str(NUM_KILLS), "--model", str(model)]
        command += ["--out", str(out), "--backend", backend]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert out.exists(), done.stderr
        result = json.loads(out.read_text())
        assert result["problems"] == []
        assert done.returncode == 0
        assert len(result["rounds"]) == 3, "engines of each role hand over or fetch"
        assert result["compared_answers"] >= 3
        blocks.update(result["blocks"])
        if min(blocks.values()) > 0:
            return
    pytest.fail(f"not both ways were used: {blocks}")


def test_shared_memory_of_others_is_not_taken_for_what_engines_left() -> None:
    library = ctypes.CDLL(None)
    before = SharedMemory()
    number = library.shmget(0, 4096, 0o600)  # private
    if number < 0:
        pytest.skip("this system has no segments of System V")
    file = Path("/dev/shm") / f"quire-test-kills-{os.getpid()}"
    segment = f"segment {number}"
    try:
        assert segment in before.left({os.getpid()})
        assert segment not in before.left({os.getppid()})
        assert segment not in SharedMemory().left({os.getpid()})
        with file.open("xb"):
            assert file.name not in before.left(())
        assert file.name in before.left(())
        assert file.name not in SharedMemory().left(())
    finally:
        file.unlink(missing_ok=True)
        library.shmctl(number, 0, None)  # IPC_RMID

"""Kills of engines of all roles, and of the store that they share: nothing wrong, none left.

The short form of `python -m bench.disaggregation_kills --store`: its engines are processes, killed
with SIGKILL. It is a process of its own, because it forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    out = tmp_path / "kills.json"
    command = [sys.executable, "-m", "bench.disaggregation_kills", "--store", "--seed", "2"]
    command += ["--kills", str(NUM_KILLS), "--model", str(model), "--out", str(out)]
    command += ["--backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert out.exists(), done.stderr
    result = json.loads(out.read_text())
    assert result["problems"] == []
    assert done.returncode == 0
    assert len(result["rounds"]) == 3, "engines of each role hand over or fetch"
    assert result["compared_answers"] >= 3
    assert min(result["blocks"].values()) > 0, result["blocks"]  # both ways were used

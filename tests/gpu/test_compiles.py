"""What runs in the interpreter also compiles for a GPU, none of which is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = 232_448  # of a program on compute capability 9.0
# Kernels by case; python -m tests.gpu.compile_for compiles all cases.
CASES = {
    "decode attention": {"attention_items", "merge_partials"},
    "prefill attention, window, cap and sinks": {"attention_items"},
    "heads into int8": {"_prepare"},
    "heads into fp8": {"_prepare"},
    "blocks": {"_copy_runs"},
    "norm with residual": {"_norm"},
    "exact bf16, 1 row": {"_linear"},
}


def test_launches_compile_for_compute_capability_9(tmp_path: Path) -> None:
    surroundings = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.gpu.compile_for", *CASES]
    done = subprocess.run(
        command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for case, kernels in CASES.items():
        assert {found["kernel"] for found in reports if found["case"] == case} == kernels
    assert all(found["shared"] <= MAX_SHARED_BYTES for found in reports)

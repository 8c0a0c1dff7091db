"""What runs in the interpreter also compiles for a GPU, none of which is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def test_every_launch_compiles_for_compute_capability_9(tmp_path: Path) -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    surroundings |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compiled"],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {line.split()[-2] for line in done.stdout.splitlines()}
    assert kernels == {"attention_items", "merge_partials", "_prepare", "_copy_runs"}

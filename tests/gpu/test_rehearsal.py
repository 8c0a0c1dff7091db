"""Record without a GPU what the check and serving engines launch, and compile it ahead of time.

Kernels are keyed by the launcher's own compilation keys.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.gpu.test_compile import MAX_STACK
from tests.repository.source_files import ROOT

pytestmark = pytest.mark.gpu

# Kernels outside these cases: two query heads per KV head in exact mode, products of one split.
MAX_STACK = {**MAX_STACK, "attention_items": 192, "_linear": 512}
MAX_SHARED = 227 * 1024  # bytes per program, on Hopper
SHARE = "7/40"  # selects other kernels each time a kernel is added
# Kernels of ranks, and copies of blocks within the pool, which PyTorch makes.
NOT_LAUNCHED = {"_merge_ranks", "_copy_runs"}
KERNELS = """
import json
from bench.gpu.launches import seen_kernels
print(json.dumps(sorted(seen_kernels(with_service=True))))
"""


def _run(folder: Path, *command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_share_of_the_recorded_launches_compiles(tmp_path: Path) -> None:
    lines = _run(tmp_path, "-m", "bench.gpu.launches", "--share", SHARE, "--look")
    *reports, last = map(json.loads, lines)
    assert last["compiled"] == len(reports) > 3
    for report in reports:
        assert report["shared"] <= MAX_SHARED, report
        assert report["stack"] <= MAX_STACK.get(report["kernel"], 0), report


def test_serving_engines_launch_every_kernel(tmp_path: Path) -> None:
    seen: set[Any] = set(json.loads(_run(tmp_path, "-c", KERNELS)[-1]))
    folder = ROOT / "quire" / "execute" / "gpu" / "kernels"
    code = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    entries = set()
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        launched = r"\b{0}\[|launch_staged\(\s*{0}\b"
        entries |= {name for name in _jitted(text) if re.search(launched.format(name), code)}
    assert entries - NOT_LAUNCHED <= seen
    assert seen <= entries


def _jitted(text: str) -> list[str]:
    lines = text.splitlines()
    return [
        line.split("(")[0].removeprefix("def ")
        for before, line in pairwise(lines)
        if before.startswith("@triton.jit") and line.startswith("def ")
    ]

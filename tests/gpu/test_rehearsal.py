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
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.gpu.test_compile import MAX_STACK
from tests.repository.source_files import ROOT

pytestmark = pytest.mark.gpu

# Kernels outside these cases: two query heads per KV head in exact mode, products of one split,
# norms of serving engines (one word).
MAX_STACK = {**MAX_STACK, "attention_items": 192, "_linear": 512, "_norm": 8}
MAX_SHARED = 227 * 1024  # bytes per program, on Hopper
SHARE = "7/40"  # selects other kernels each time a kernel is added
# Kernels of ranks, and copies of blocks within the pool, which PyTorch makes.
NOT_LAUNCHED = {"_merge_ranks", "_copy_runs"}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Rehearse the check and serving engines once: a report for each compiled kernel, and a last
    line."""
    command = ("-m", "bench.gpu.launches", "--share", SHARE, "--look", "--service")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_share_of_the_recorded_launches_compiles(lines: list[Any]) -> None:
    *reports, last = lines
    assert last["compiled"] == len(reports) > 3
    for report in reports:
        assert report["shared"] <= MAX_SHARED, report
        assert report["stack"] <= MAX_STACK.get(report["kernel"], 0), report


def test_serving_engines_launch_every_kernel(lines: list[Any]) -> None:
    seen = set(lines[-1]["launched"])
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

"""The check for GPUs, dry: on CPU tensors, without what may be missing where it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from bench.gpu import integers, products
from bench.gpu.breakdown import told_of
from bench.gpu.gaps import gaps
from bench.gpu.sections import SECTIONS
from bench.gpu.stage import Stage
from bench.measured.gpu_rows import OF_A_CARD, gpu_rows
from tests.repository.source_files import ROOT

pytestmark = pytest.mark.gpu

# Loaded by Python itself at its start, in the check's children too.
REFUSING = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("msgspec", "zmq", "quire._native"):
            raise ImportError(name + " is refused here")

sys.meta_path.insert(0, Refuse())
"""


def _check(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    refusing = folder / "refusing"
    refusing.mkdir()
    (refusing / "sitecustomize.py").write_text(REFUSING)
    paths = [str(refusing), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        ["bash", "bench/gpu_check.sh", "--out", str(folder), "--dry-run-on-cpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    result: dict[str, Any] = json.loads((folder / "gpu-check.json").read_text())
    return done.returncode, result


def test_sections_run_without_messages_and_without_the_compiled_module(tmp_path: Path) -> None:
    code, result = _check(tmp_path, "--only", "limits,requests,host_tier")
    statuses = {name: section["status"] for name, section in result["sections"].items()}
    assert set(statuses.values()) == {"ok"}, result
    assert code == 0
    assert result["what"] == "dry run: no measurement"
    assert result["machine"]["packages"]["torch"]
    assert result["sections"]["limits"]["found"]["copy_bytes_per_s"] > 0
    assert result["sections"]["requests"]["found"]["exact"]["is_whole"]
    told = gpu_rows({**result, "what": OF_A_CARD})  # the page reads what sections tell
    assert ["1,024 requests" in row for row in told] == [True, True]
    tier = result["sections"]["host_tier"]["found"]
    assert tier["tokens"] == {"are_equal": True, "tokens": 4}
    assert tier["beside_swaps"]["moved_bytes_per_s"] > 0


def test_a_steps_time_is_told_by_kernels_and_what_lies_between_them() -> None:
    spans = [("b", 12.0, 20.0), ("a", 0.0, 10.0), ("a", 19.0, 21.0), ("c", 26.0, 27.0)]
    told = told_of(spans)
    assert told["kernels"] == 4
    assert told["seconds"] == pytest.approx(27e-6)
    assert told["between_kernels_s"] == pytest.approx(7e-6)
    assert list(told["by_name"]) == ["a", "b", "c"]
    assert told["by_name"]["a"] == {"count": 2, "s": pytest.approx(12e-6)}
    assert told_of([]) == {"not_told": "the profiler saw no kernels"}


def _dry() -> tuple[Stage, dict[str, Any]]:
    """A section's stage in this process, and what it will have told."""
    told: dict[str, Any] = {}
    return Stage(is_dry=True, ends=float("inf"), tell=told.__setitem__), told


def test_what_launches_cost_is_told_of_right_numbers() -> None:
    stage, told = _dry()
    gaps(stage)
    assert told["plain"]["is_right"]


def test_products_are_told_beside_the_vendors() -> None:
    stage, told = _dry()
    products.bf16_products(stage)
    assert set(told["3 x 256 -> 32"]["share_of_floor"]) == {"ours", "vendor"}
    assert told["ours up to: 256 -> 32"] in (0, 1, 3)
    told.clear()
    products.fp8_products(stage)
    assert len(told) >= 3


def test_products_of_integers_have_the_bits_they_mean_or_end_the_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, told = _dry()
    integers.integers(stage)
    assert set(told) == {f"{name} products" for name in integers.INTEGERS}
    assert {found["other_bits"] for found in told.values()} == {0}
    right = integers.int_linear
    monkeypatch.setattr(integers, "int_linear", lambda *given: right(*given) * np.float32(1 + 1e-7))
    with pytest.raises(SystemExit, match="int8"):
        integers.integers(stage)


def test_ours_is_taken_only_up_to_where_it_is_never_the_slower_one() -> None:
    assert products.ours_up_to({1: -0.1, 2: 0.0, 4: 0.1, 8: -0.2}) == 2
    assert products.ours_up_to({1: 0.1, 2: -0.3}) == 0
    assert products.ours_up_to({1: -0.1, 2: -0.3}) == 2


def test_a_section_that_has_no_time_is_told_and_fails_the_check(tmp_path: Path) -> None:
    code, result = _check(tmp_path, "--time-budget-s", "0")
    assert code == 1
    assert list(result["sections"]) == list(SECTIONS)
    for section in result["sections"].values():
        assert section == {"status": "not begun: the time is over"}

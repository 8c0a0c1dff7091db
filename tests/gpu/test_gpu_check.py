"""Dry run of the GPU check: on CPU tensors, without the modules a GPU machine may lack."""

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

import torch

from bench.gpu import exchange, integers, products, ranks
from bench.gpu.breakdown import kernel_times
from bench.gpu.gaps import gaps
from bench.gpu.sections import SECTIONS
from bench.gpu.stage import Stage
from bench.measured.gpu_rows import OF_A_CARD, gpu_rows
from tests.repository.source_files import ROOT

pytestmark = pytest.mark.gpu

# Imported by Python at startup (sitecustomize), also in the child processes of the check.
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
    code, result = _check(tmp_path, "--only", "limits,requests,host_tier,exchange,ranks")
    statuses = {name: section["status"] for name, section in result["sections"].items()}
    assert set(statuses.values()) == {"ok"}, result
    assert code == 0
    assert result["what"] == "dry run: no measurement"
    assert result["machine"]["packages"]["torch"]
    assert result["sections"]["limits"]["found"]["copy_bytes_per_s"] > 0
    assert result["sections"]["requests"]["found"]["exact"]["is_whole"]
    results = gpu_rows({**result, "what": OF_A_CARD})  # the page reads the sections' results
    assert ["512 requests" in row for row in results] == [True, False, True, False]
    assert [" requests: output" in row for row in results] == [False, True, False, True]
    tier = result["sections"]["host_tier"]["found"]
    assert tier["tokens"] == {"are_equal": True, "tokens": 4}
    assert tier["beside_swaps"]["moved_bytes_per_s"] > 0
    exchanged = result["sections"]["exchange"]["found"]
    assert exchanged["tokens"] == {"are_equal": True, "tokens": 4}
    assert exchanged["saved"]["blocks"] == exchanged["fetched"]["blocks"] == 2
    assert exchanged["fetched"]["bytes_are_equal"]
    exchanged = result["sections"]["ranks"]["found"]
    assert [f"{size} bytes" in exchanged for size in ranks.DRY_SIZES] == [True, True]
    assert exchanged["lost"]["how"].startswith("DeviceLost: an exchange of columns (gloo)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [1]}, "the other engine got"),
        ({"fetched": {"bytes_are_equal": False}}, "arrived so"),
    ],
)
def test_other_bytes_or_tokens_at_the_other_engine_fail_the_section(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    stage, results = _dry()
    found = {"tokens": [], "fetched": {"bytes_are_equal": True}}
    monkeypatch.setattr(exchange, "_at_the_other", lambda *_: found | change)
    with pytest.raises(RuntimeError, match=words):
        exchange.exchange(stage)
    assert results["saved"]["blocks"] == 2


def test_ranks_are_skipped_with_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    results: dict[str, Any] = {}
    ranks.ranks(Stage(is_dry=False, ends=float("inf"), report=results.__setitem__))
    assert results == {"skipped": "one GPU"}


def test_a_byte_that_an_exchange_changes_fails_the_section() -> None:
    one = torch.arange(4)
    ranks._check("a gather", one, one.clone())
    with pytest.raises(SystemExit, match="a gather between two ranks has other bytes"):
        ranks._check("a gather", one, one + 1)


def test_a_step_time_is_reported_by_kernels_and_the_gaps_between_them() -> None:
    spans = [("b", 12.0, 20.0), ("a", 0.0, 10.0), ("a", 19.0, 21.0), ("c", 26.0, 27.0)]
    results = kernel_times(spans)
    assert results["kernels"] == 4
    assert results["seconds"] == pytest.approx(27e-6)
    assert results["between_kernels_s"] == pytest.approx(7e-6)
    assert list(results["by_name"]) == ["a", "b", "c"]
    assert results["by_name"]["a"] == {"count": 2, "s": pytest.approx(12e-6)}
    assert kernel_times([]) == {"not_measured": "the profiler saw no kernels"}


def _dry() -> tuple[Stage, dict[str, Any]]:
    """Return a stage that runs a section in this process, and the dict of its results."""
    results: dict[str, Any] = {}
    return Stage(is_dry=True, ends=float("inf"), report=results.__setitem__), results


def test_launch_costs_are_reported_in_the_right_order_of_magnitude() -> None:
    stage, results = _dry()
    gaps(stage)
    assert results["plain"]["is_right"]


def test_products_are_reported_beside_the_vendors() -> None:
    stage, results = _dry()
    products.bf16_products(stage)
    assert set(results["3 x 256 -> 32"]["share_of_floor"]) == {"ours", "vendor"}
    assert results["ours up to: 256 -> 32"] in (0, 1, 3)
    results.clear()
    products.fp8_products(stage)
    assert len(results) >= 3


def test_integer_products_match_the_reference_or_fail_the_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, results = _dry()
    integers.integers(stage)
    assert set(results) == {f"{name} products, 200 -> 40" for name in integers.INTEGERS}
    assert {found["other_bits"] for found in results.values()} == {0}
    right = integers.int_linear
    monkeypatch.setattr(integers, "int_linear", lambda *given: right(*given) * np.float32(1 + 1e-7))
    with pytest.raises(SystemExit, match="int8"):
        integers.integers(stage)


def test_our_product_is_used_only_where_it_is_never_slower() -> None:
    assert products.ours_up_to({1: -0.1, 2: 0.0, 4: 0.1, 8: -0.2}) == 2
    assert products.ours_up_to({1: 0.1, 2: -0.3}) == 0
    assert products.ours_up_to({1: -0.1, 2: -0.3}) == 2


def test_a_section_without_time_is_reported_and_fails_the_check(tmp_path: Path) -> None:
    code, result = _check(tmp_path, "--time-budget-s", "0")
    assert code == 1
    assert list(result["sections"]) == list(SECTIONS)
    for section in result["sections"].values():
        assert section == {"status": "not begun: the time is over"}

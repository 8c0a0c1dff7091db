"""Every kernel compiles for an H200 with no card at hand, and what can be read from its code holds:
matrix instructions where products are and several at a time, nothing spilled where it counts,
nothing fused that must round twice. And a kernel is compiled once for each shape of tile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.compile_for import CASES

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
MAX_PROCESSES = 4
# The search for top_k and top_p keeps some of its sums in memory; many rows of attention and of
# products some of what they look at once in a piece.
MAX_STACK = {"_finish": 256, "attention_items": 160, "_linear": 448}
# Accesses to these within loops: where a piece of a product is so short that its steps are no
# loop, and addresses of positions that need masks.
MAX_SPILLED = {
    "exact bf16, 2048 rows of 1024": 160,
    "prefill attention": 8,
    "prefill attention, window, cap and sinks": 32,
}
# Whose loops must have several matrix instructions on their way at a time.
FLOWING = ("_linear", "_linear_bytes", "_grouped", "attention_items")
# Multiply-adds are written out here, and only here.
FUSED = ("_linear", "_grouped", "_combine", "attention_items", "merge_partials")


def printed(module: str, cache: Path, shares: Sequence[Sequence[str]] = ((),)) -> list[str]:
    """Lines of a module that runs where Triton compiles in place of interpreting: once for each
    share of its arguments, side by side."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *share],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    told = [process.communicate() for process in running]
    for process, (_, words) in zip(running, told, strict=True):
        assert process.returncode == 0, words[-3000:]
    return [line for said, _ in told for line in said.splitlines()]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A line a kernel."""
    titles, count = list(CASES), min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    shares = [titles[first::count] for first in range(count)]
    lines = printed("tests.gpu.compile_for", tmp_path_factory.mktemp("compiled"), shares)
    return [json.loads(line) for line in lines]


def test_products_use_the_matrix_unit(reports: list[dict[str, Any]]) -> None:
    products = [report for report in reports if report["kernel"].startswith(("_linear", "_gr"))]
    assert len(products) > 15
    for report in products:
        is_wide = "f32, " in report["case"]  # f32 is exact on the other units
        assert bool(report["matrix"]) != is_wide, report
        # int8's and int4's sums are exact, so few outputs may take the older instruction.
        if not report["case"].startswith("int"):
            assert all(name.startswith("wgmma") for name in report["matrix"]), report


def test_nothing_is_spilled_where_it_counts(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["stack"] <= MAX_STACK.get(report["kernel"], 0), report
        for loop in report["loops"]:
            assert loop["spilled"] <= MAX_SPILLED.get(report["case"], 0), report


def test_matrix_instructions_are_waited_for_together(reports: list[dict[str, Any]]) -> None:
    """The assembler waits for each one where sums are touched before their wait."""
    loops = [
        loop
        for report in reports
        if report["kernel"] in FLOWING and any("wgmma" in name for name in report["matrix"])
        for loop in report["loops"]
    ]
    assert len(loops) > 10
    for loop in loops:
        assert 0 < 3 * loop["waits"] <= loop["matrix"], loop


def test_one_row_of_few_bits_takes_bytes_four_at_a_time(reports: list[dict[str, Any]]) -> None:
    """Four blocks of 128 columns for one wait, and few enough instructions: bytes taken apart one
    by one were 1,500 of them."""
    for case, most in (("int4-g128-zp by int8, 1 row", 700), ("int4-g32 by int8, 1 row", 950)):
        (report,) = (r for r in reports if (r["case"], r["kernel"]) == (case, "_linear_int4"))
        assert [loop["instructions"] <= most for loop in report["loops"]] == [True], report


def test_multiply_adds_are_fused_where_they_are_written(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if not report["kernel"].startswith(FUSED):
            assert report["fused"] == 0, report


def test_no_step_compiles_anew_for_another_number_of_rows(tmp_path: Path) -> None:
    """Triton makes numbers that are 1 constants, and others know that they are whole 16s, unless
    told not to: each kernel three times over, in the middle of somebody's answer."""
    found = json.loads(printed("tests.gpu.variants", tmp_path)[-1])
    assert len(found) > 10
    assert {case: kernels for case, kernels in found.items() if set(kernels.values()) != {1}} == {}

"""Every kernel compiles for an H200 without a GPU, and its machine code has the wanted properties.

Products use matrix instructions, several at a time; hot loops do not spill; nothing that must round
twice is fused. Each kernel is compiled once per tile shape.
"""

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
# The search for top_k and top_p keeps some of its sums in memory; kernels for many rows of
# attention and products keep part of a piece there.
MAX_STACK = {"_finish": 256, "attention_items": 160, "_linear": 448}
# Spilled accesses allowed within loops: short products without a loop over K, and addresses of
# masked positions.
MAX_SPILLED = {
    "exact bf16, 2048 rows of 1024": 160,
    "prefill attention": 8,
    "prefill attention, window, cap and sinks": 32,
}
# Kernels that must keep several matrix instructions in flight per loop.
FLOWING = ("_linear", "_linear_bytes", "_grouped", "attention_items")
# Only these kernels contain explicit multiply-adds.
FUSED = (
    "_gemv",
    *("_linear", "_grouped", "_weighted_sum"),
    *("attention_items", "merge_partials", "_merge_ranks"),
)


def printed(module: str, cache: Path, shares: Sequence[Sequence[str]] = ((),)) -> list[str]:
    """Return the output of a module run with Triton's compiler instead of the interpreter.

    The module runs once per share of its arguments, in parallel.
    """
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
    outputs = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [line for out, _ in outputs for line in out.splitlines()]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compile everything and return a report per kernel."""
    titles, count = list(CASES), min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    shares = [titles[first::count] for first in range(count)]
    lines = printed("tests.gpu.compile_for", tmp_path_factory.mktemp("compiled"), shares)
    return [json.loads(line) for line in lines]


def test_products_use_matrix_instructions(reports: list[dict[str, Any]]) -> None:
    products = [report for report in reports if report["kernel"].startswith(("_linear", "_gr"))]
    assert len(products) > 15
    for report in products:
        is_wide = "f32, " in report["case"]  # f32 is exact only on the other units
        assert bool(report["matrix"]) != is_wide, report
        # Sums of int8 and int4 are exact, so small outputs may use the older instruction.
        if not report["case"].startswith("int"):
            assert all(name.startswith("wgmma") for name in report["matrix"]), report


def test_hot_kernels_do_not_spill(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["stack"] <= MAX_STACK.get(report["kernel"], 0), report
        for loop in report["loops"]:
            assert loop["spilled"] <= MAX_SPILLED.get(report["case"], 0), report


def test_matrix_instructions_are_waited_for_together(reports: list[dict[str, Any]]) -> None:
    """The assembler inserts a wait per instruction where sums are used before their wait."""
    loops = [
        loop
        for report in reports
        if report["kernel"] in FLOWING and any("wgmma" in name for name in report["matrix"])
        for loop in report["loops"]
    ]
    assert len(loops) > 10
    for loop in loops:
        assert 0 < 3 * loop["waits"] <= loop["matrix"], loop


def test_one_low_bit_row_unpacks_four_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    """Four blocks of 128 columns per wait, and few instructions: unpacking byte by byte
    took 1,500.
    """
    for case, most in (("int4-g128-zp by int8, 1 row", 700), ("int4-g32 by int8, 1 row", 950)):
        (report,) = (r for r in reports if (r["case"], r["kernel"]) == (case, "_linear_int4"))
        assert [loop["instructions"] <= most for loop in report["loops"]] == [True], report


def test_multiply_adds_are_fused_only_where_written(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if not report["kernel"].startswith(FUSED):
            assert report["fused"] == 0, report


def test_the_row_count_triggers_no_recompilation(tmp_path: Path) -> None:
    """Triton makes arguments of 1 constants and specializes multiples of 16 by default, which would
    compile each kernel three times, in the middle of a request.
    """
    found = json.loads(printed("tests.gpu.variants", tmp_path)[-1])
    assert len(found) > 10
    assert {case: kernels for case, kernels in found.items() if set(kernels.values()) != {1}} == {}

"""The Row Rule, kernel by kernel: row i of a result is the one-row result, bit for bit, for every
number of rows from 1 to 65 and a large one, 1 to 3 threads, every instruction set.

QUIRE_LARGE_ROWS=1 adds 2,048 rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.one_op import ISAS, OneOp, Operand, draw

LARGE = 2_048 if os.environ.get("QUIRE_LARGE_ROWS") else 515
COUNTS = (*range(1, 66), LARGE)
HALF = 5

Float32s = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """An operation, its inputs [LARGE, width] by operand, and the operand to compare."""

    op: Callable[[str, int], OneOp]
    inputs: Mapping[int, Float32s]
    output: int


def _linear_case(dtype: str, out: str, k: int, n: int) -> Case:
    rng = np.random.default_rng(k)
    w, bias = draw(rng, n, k, dtype=dtype), draw(rng, n)

    def op(isa: str, num_threads: int) -> OneOp:
        return OneOp(
            "linear",
            [Operand(k, dtype), Operand(n, out)],
            isa,
            num_threads,
            weights=[("matrix", dtype, w), ("vector", "f32", bias)],
            max_rows=LARGE,
        )

    return Case(op, {0: draw(rng, LARGE, k, dtype=dtype)}, 1)


def _norm_case(form: str, group: int) -> Case:
    rng = np.random.default_rng(3)
    width = 4 * group or 77
    weight = draw(rng, group or width)

    def op(isa: str, num_threads: int) -> OneOp:
        return OneOp(
            "norm",
            [Operand(width), Operand(width), Operand(width, "bf16")],
            isa,
            num_threads,
            ints=[form == "layer", group],
            floats=[1e-5],
            weights=[("vector", "f32", weight)],
            max_rows=LARGE,
        )

    x, delta = draw(rng, LARGE, width), draw(rng, LARGE, width, dtype="bf16")
    return Case(op, {0: x, 2: delta}, 1)


def _activation_case(code: int) -> Case:
    rng = np.random.default_rng(4)

    def op(isa: str, num_threads: int) -> OneOp:
        operands = [Operand(97), Operand(97), Operand(97)]
        return OneOp("activation", operands, isa, num_threads, ints=[code], max_rows=LARGE)

    return Case(op, {0: draw(rng, LARGE, 97), 2: draw(rng, LARGE, 97)}, 1)


def _rope_case() -> Case:
    rng = np.random.default_rng(5)
    cos, sin = draw(rng, 1, HALF), draw(rng, 1, HALF)

    def op(isa: str, num_threads: int) -> OneOp:
        return OneOp(
            "rope",
            [Operand(33)],
            isa,
            num_threads,
            ints=[0, 3, 11],
            ropes=[(cos, sin)],
            max_rows=LARGE,
        )

    return Case(op, {0: draw(rng, LARGE, 33)}, 0)


CASES = {
    "linear f32": _linear_case("f32", "f32", 67, 100),
    "linear f32 to bf16": _linear_case("f32", "bf16", 32, 33),
    "linear bf16": _linear_case("bf16", "f32", 66, 65),
    "linear bf16 of odd K": _linear_case("bf16", "f32", 67, 300),
    "rms norm with delta": _norm_case("rms", 0),
    "layer norm with delta": _norm_case("layer", 0),
    "norm of groups": _norm_case("rms", 24),
    "silu": _activation_case(0),
    "gelu": _activation_case(1),
    "rope": _rope_case(),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_a_row_does_not_know_how_many_rows_or_threads_there_are(name: str, isa: str) -> None:
    case = CASES[name]
    alone = case.op(isa, 1)
    expected = np.concatenate(
        [
            alone({i: rows[row : row + 1] for i, rows in case.inputs.items()}, num_rows=1)[
                case.output
            ]
            for row in range(LARGE)
        ]
    ).view(np.uint32)
    for num_threads in (1, 2, 3):
        op = case.op(isa, num_threads)
        for count in COUNTS:
            inputs = {i: rows[:count] for i, rows in case.inputs.items()}
            found = op(inputs, num_rows=count)[case.output].view(np.uint32)
            assert np.array_equal(found, expected[:count]), f"{count} rows, {num_threads} threads"

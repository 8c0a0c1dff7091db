"""The recipe of bf16 products on the matrix unit, in NumPy, matches the unit bit for bit.

K in steps of 32; in each step the even and odd K are two chains of fused multiply-adds from zero,
and their sum is added to the output. The recipe determines the bits of every answer.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.weights.dtypes import round_to_bf16
from tests.cases import each_case
from tests.kernels.isas import ISAS
from tests.kernels.one_op import OneOp, Operand

Float32s = NDArray[np.float32]
STEP = 32

pytestmark = pytest.mark.skipif("amx" not in ISAS, reason="this machine has no AMX")


def product_by_recipe(x: Float32s, w: Float32s) -> Float32s:
    """Compute x [R, K] @ w [N, K].T; in f64 a product of two bf16 and a sum round like a
    fused one.
    """
    k = x.shape[1]
    padding = (0, -k % STEP)
    x, w = (np.pad(a, ((0, 0), padding)).astype(np.float64) for a in (x, w))
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], STEP):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for column in range(start, start + STEP):
            term = x[:, column, None] * w[None, :, column]
            chains[column % 2] = (chains[column % 2] + term).astype(np.float32)
        total += chains[0] + chains[1]
    return total


@each_case("k", [1, 2, 31, 32, 33, 77, 100, 544])
@each_case("rows", [1, 16, 17, 33, 70])
def test_a_product_matches_the_recipe_bit_for_bit(k: int, rows: int) -> None:
    rng = np.random.default_rng(k)
    x, w = (
        round_to_bf16(rng.standard_normal(shape).astype(np.float32))
        for shape in ((rows, k), (45, k))
    )
    product = OneOp(
        "linear",
        [Operand(k, "bf16"), Operand(45, "f32")],
        isa="amx",
        weights=[("matrix", "bf16", w)],
    )
    found = product({0: x}, num_rows=rows)[1]
    np.testing.assert_array_equal(found, product_by_recipe(x, w))


@each_case("scale", [1e-19, 1e-30, 1e-39])
def test_one_row_flushes_denormals_as_many_rows_do(scale: float) -> None:
    rng = np.random.default_rng(3)
    x, w = (
        round_to_bf16((scale * rng.standard_normal(shape)).astype(np.float32))
        for shape in ((33, 70), (40, 70))
    )
    x[0, :3], x[1, 4] = (np.inf, 0, -np.inf), np.nan
    x[2] = round_to_bf16(rng.standard_normal(70).astype(np.float32) * 1e30)
    product = OneOp(
        "linear",
        [Operand(70, "bf16"), Operand(40, "f32")],
        isa="amx",
        weights=[("matrix", "bf16", w)],
    )
    together = product({0: x}, num_rows=len(x))[1]
    for row in range(len(x)):
        alone = product({0: x[row : row + 1]}, num_rows=1)[1]
        np.testing.assert_array_equal(alone[0], together[row])
    pairs = product({0: x[5:7]}, num_rows=2)[1]
    np.testing.assert_array_equal(pairs, together[5:7])


@each_case("out", ["f32", "bf16"])
@each_case(("num_threads", "shift"), [(1, 0), (2, 0), (3, 0), (2, 3)])
def test_few_rows_of_a_large_weight_match_the_recipe(
    out: str, num_threads: int, shift: int
) -> None:
    """Panels are split in halves; y bypasses the caches if it is aligned, except the cut
    last panel.
    """
    k, n = 520, 1100
    rng = np.random.default_rng(5)
    x, w = (
        round_to_bf16(rng.standard_normal(shape).astype(np.float32)) for shape in ((33, k), (n, k))
    )
    expected = product_by_recipe(x, w)
    product = OneOp(
        "linear",
        [Operand(k, "bf16"), Operand(n, out)],
        isa="amx",
        weights=[("matrix", "bf16", w)],
        num_threads=num_threads,
        shift=shift,
    )
    for rows in (1, 2, 3, 16, 17, 32, 33):
        found = product({0: x[:rows]}, num_rows=rows)[1]
        of_rows = expected[:rows] if out == "f32" else round_to_bf16(expected[:rows])
        np.testing.assert_array_equal(found, of_rows)

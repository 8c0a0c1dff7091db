"""int8 and int4 products match the reference bit for bit on every instruction set with FMA.

The portable set rounds twice: within tolerance. Odd shapes, surrounded by NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.execute import reference_ops as twin
from quire.quant.int_rows import TINY
from quire.quant.int_weights import quantize_matrix
from quire.quant.scheme import INT_SCHEMES, SCHEMES
from tests.cases import each_case
from tests.kernels.isas import EVERY_ISA
from tests.kernels.one_op import OneOp, Operand, assert_close, draw

Float32s = NDArray[np.float32]

FUSED = tuple(isa for isa in EVERY_ISA if isa != "portable")
each_isa = each_case("isa", EVERY_ISA)
each_scheme = each_case("scheme", INT_SCHEMES)
# K not divisible by a group, 64 or 128; N within a panel, past one, and one more than one.
SHAPES = [(1, 1, 1), (3, 31, 5), (13, 67, 100), (33, 192, 65), (50, 321, 32), (66, 1101, 33)]
# Rows and K at the borders of packs, row groups, batches and K blocks.
BORDERS = [(5, 64, 40), (31, 128, 33), (32, 129, 64), (65, 255, 33), (96, 256, 70), (161, 640, 33)]


def _product(scheme: str, isa: str, w: Float32s, x: Float32s, **given: object) -> Float32s:
    """Multiply x by the quantized w, on native kernels."""
    settings: Mapping[str, object] = {"dtype": "f32", "out": "f32", "bias": None, "threads": 2}
    settings = {**settings, **given}
    weights = [("matrix", scheme, w)]
    if settings["bias"] is not None:
        weights.append(("vector", "f32", settings["bias"]))  # type: ignore[arg-type]
    op = OneOp(
        "linear",
        [Operand(w.shape[1], str(settings["dtype"])), Operand(len(w), str(settings["out"]))],
        isa,
        int(str(settings["threads"])),
        weights=weights,
        max_rows=max(70, len(x)),
    )
    return op({0: x}, num_rows=len(x))[1]


@lru_cache(maxsize=4)  # the same for each instruction set
def _recipe(scheme: str, dtype: str, rows: int, k: int, n: int) -> tuple[Float32s, ...]:
    """Return weights, rows, a bias, their product by the recipe, and the scale of its terms."""
    rng = np.random.default_rng(k)
    w, x, bias = draw(rng, n, k), draw(rng, rows, k, dtype=dtype), draw(rng, n)
    w[:, k // 2] *= 20
    x[0] = 0
    matrix = quantize_matrix(w, SCHEMES[scheme])
    scale = np.abs(x) @ np.abs(matrix.dequantized()).T + np.abs(bias)
    return w, x, bias, twin.int_linear(x, matrix, bias), scale


@each_isa
@each_scheme
@each_case("dtype", ["f32", "bf16"])
@each_case(("rows", "k", "n"), SHAPES + BORDERS)
def test_an_integer_product_matches_the_recipe(
    scheme: str, isa: str, dtype: str, rows: int, k: int, n: int
) -> None:
    w, x, bias, expected, scale = _recipe(scheme, dtype, rows, k, n)
    found = _product(scheme, isa, w, x, dtype=dtype, bias=bias)
    if isa in FUSED:
        np.testing.assert_array_equal(found, expected)
    else:
        assert_close(found, expected, dtype="f32", scale=scale)
    np.testing.assert_array_equal(found[0], bias)  # a row of zeros


@each_case("scheme", ["int4-g32", "int4-g64"])
@each_case("rows", [5, 16, 17, 32, 33, 100])
@each_case("k", [64, 128, 192, 448])
def test_panels_with_stepped_scales_mix_with_others(scheme: str, rows: int, k: int) -> None:
    """Original 4-bit blocks keep their scales, so their products are scaled group by group; the
    largest products that steps allow also match the recipe.
    """
    rng = np.random.default_rng(k)
    w, x = draw(rng, 160, k), draw(rng, rows, k)
    group = SCHEMES[scheme].group
    held = rng.integers(-8, 8, (64, k)).astype(np.float32)
    held[:, ::group] = -8
    w[32:64], w[96:128] = held[:32] * np.float32(0.01), held[32:] * np.float32(0.7)
    w[40, 5] = 3  # one of its blocks searches its scale
    w[5] = np.where(w[5] < 0, -8, 6.9)
    x[0] = w[5]
    matrix = quantize_matrix(w, SCHEMES[scheme])
    expected = twin.int_linear(x, matrix, None)
    for isa in FUSED:
        np.testing.assert_array_equal(_product(scheme, isa, w, x), expected)


@each_scheme
@each_case("rows", [1, 7, 16, 17, 31, 48, 300, 2_048])
def test_every_instruction_set_gives_the_same_bits(scheme: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    w, x = draw(rng, 70, 448), draw(rng, rows, 448)
    first, *others = (
        _product(scheme, isa, w, x, out="bf16", threads=threads)
        for isa in FUSED
        for threads in (1, 3)
    )
    for other in others:
        np.testing.assert_array_equal(other, first)


@each_scheme
def test_the_result_is_near_the_product_of_real_numbers(scheme: str) -> None:
    rng = np.random.default_rng(1)
    w, x = draw(rng, 96, 1024), draw(rng, 20, 1024)
    error = _product(scheme, EVERY_ISA[0], w, x) - x.astype(np.float64) @ w.T.astype(np.float64)
    allowed = {8: 0.02, 4: 0.14}[SCHEMES[scheme].bits]
    assert np.sqrt(np.mean(error**2)) < allowed * np.sqrt(1024)


@each_isa
@each_scheme
@each_case("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_row_becomes_nan_and_affects_no_other(
    scheme: str, isa: str, bad: float
) -> None:
    rng = np.random.default_rng(2)
    w, x = draw(rng, 40, 300), draw(rng, 9, 300)
    plain = _product(scheme, isa, w, x)
    x[4, 299] = bad
    found = _product(scheme, isa, w, x)
    assert np.isnan(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, axis=0), np.delete(plain, 4, axis=0))


@each_isa
@each_scheme
def test_tiny_rows_count_as_zero_and_huge_ones_do_not_overflow(scheme: str, isa: str) -> None:
    rng = np.random.default_rng(3)
    w = draw(rng, 33, 130)
    x = draw(rng, 3, 130)
    x[0] *= TINY / 100
    x[1] *= np.float32(1e30)
    found = _product(scheme, isa, w, x)
    assert (found[0] == 0).all()
    assert np.isfinite(found).all()


@each_scheme
def test_outliers_affect_only_their_own_scale_group(scheme: str) -> None:
    """An activation channel a hundred times the others affects only its 128 columns of K; with one
    scale for all of K the others would be lost.
    """
    rng = np.random.default_rng(4)
    w, x = draw(rng, 64, 2048), draw(rng, 8, 2048)
    x[:, 5] *= 100
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    matrix = quantize_matrix(w, SCHEMES[scheme])
    found = _product(scheme, EVERY_ISA[0], w, x)
    # Each element is off by at most half a step of its own group's scale, and by the weight's own
    # error, which the dequantized weight shows.
    step = np.abs(x.reshape(8, -1, 128)).max(axis=2) / 127
    of_rows = np.repeat(step / 2, 128, axis=1) @ np.abs(matrix.dequantized()).T
    of_weights = np.abs(x) @ np.abs(matrix.dequantized() - w).T
    assert (np.abs(found - exact) <= 1.001 * (of_rows + of_weights)).all()
    rest = np.delete(x, np.s_[:128], axis=1), np.delete(w, np.s_[:128], axis=1)
    undisturbed = rest[0].astype(np.float64) @ rest[1].T.astype(np.float64)
    error = found - exact
    allowed = 0.05 if SCHEMES[scheme].bits == 8 else 0.2
    assert np.sqrt(np.mean(error**2)) < allowed * np.sqrt(np.mean(exact**2))
    assert np.sqrt(np.mean(undisturbed**2)) > 0.1 * np.sqrt(np.mean(exact**2))


@each_case("scheme", ["int8", "int4-g32"])
def test_weights_with_outlier_channels_keep_the_others_accurate(scheme: str) -> None:
    rng = np.random.default_rng(5)
    w, x = draw(rng, 96, 512), draw(rng, 8, 512)
    w[::7] *= 100  # output channels: each has its own scales
    found = _product(scheme, EVERY_ISA[0], w, x)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    # Relative to the typical size of a channel's sum of products.
    relative = np.sqrt(((found - exact) ** 2).mean(axis=0)) / np.sqrt((w**2).sum(axis=1))
    assert relative.max() < {"int8": 0.03, "int4-g32": 0.2}[scheme]

"""Every native kernel against its NumPy reference (quire/execute/reference_ops.py).

At odd shapes, on every instruction set of this machine, with operands surrounded by NaN.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from quire.execute import reference_ops as twin
from quire.weights.dtypes import round_to_bf16
from tests.cases import each_case
from tests.kernels.isas import ISAS
from tests.kernels.one_op import OneOp, Operand, assert_close, draw

DTYPES = ("f32", "bf16")
each_isa = each_case("isa", ISAS)
each_dtype = each_case("dtype", DTYPES)


@each_isa
@each_dtype
@each_case("out", DTYPES)
@each_case("biased", [False, True])
@each_case(("rows", "k", "n"), [(1, 1, 1), (2, 3, 31), (13, 67, 100), (30, 64, 32), (5, 129, 65)])
def test_linear_is_the_product(
    isa: str, dtype: str, out: str, biased: bool, rows: int, k: int, n: int
) -> None:
    rng = np.random.default_rng(7)
    x, w = draw(rng, rows, k, dtype=dtype), draw(rng, n, k, dtype=dtype)
    bias = draw(rng, n) if biased else None
    weights = [("matrix", dtype, w)] + ([("vector", "f32", bias)] if bias is not None else [])
    op = OneOp("linear", [Operand(k, dtype), Operand(n, out)], isa, weights=weights)
    y = op({0: x}, num_rows=rows)[1]
    scale = np.abs(x) @ np.abs(w).T + (0 if bias is None else np.abs(bias))
    assert_close(y, twin.linear(x, w, bias), dtype=out, scale=scale)


@each_isa
@each_case("form", ["rms", "layer"])
@each_case("width", [1, 33, 60, 259])
@each_case(("x_dtype", "y_dtype"), [*itertools.product(DTYPES, DTYPES)])
@each_case("delta_dtype", [None, *DTYPES])
def test_norm_adds_the_residual_first(
    isa: str, form: str, width: int, x_dtype: str, y_dtype: str, delta_dtype: str | None
) -> None:
    rng = np.random.default_rng(7)
    rows = 3
    x, weight = draw(rng, rows, width, dtype=x_dtype), draw(rng, width)
    bias = draw(rng, width) if form == "layer" else None
    operands, inputs = [Operand(width, x_dtype), Operand(width, y_dtype)], {0: x}
    expected_x = x
    if delta_dtype is not None:
        delta = draw(rng, rows, width, dtype=delta_dtype)
        operands.append(Operand(width, delta_dtype))
        inputs[2] = delta
        expected_x = x + delta
        expected_x = round_to_bf16(expected_x) if x_dtype == "bf16" else expected_x
    weights = [("vector", "f32", weight)] + ([("vector", "f32", bias)] if bias is not None else [])
    values = {"form": form, "group": 0, "eps": 1e-5}
    op = OneOp("norm", operands, isa, values=values, weights=weights)
    new_x, y, *_ = op(inputs, num_rows=rows)
    np.testing.assert_array_equal(new_x, expected_x)
    expected = twin.norm(expected_x, weight, eps=1e-5, form=form, bias=bias, group=0)
    assert_close(y, expected, dtype=y_dtype, scale=np.abs(expected) + 1)


@each_isa
@each_dtype
@each_case(("heads", "head_dim"), [(3, 16), (2, 7), (1, 80)])
def test_norm_of_heads_works_in_place(isa: str, dtype: str, heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(7)
    x, weight = draw(rng, 4, heads * head_dim, dtype=dtype), draw(rng, head_dim)
    apart = OneOp(
        "norm",
        [Operand(heads * head_dim, dtype), Operand(heads * head_dim, dtype)],
        isa,
        values={"form": "rms", "group": head_dim, "eps": 1e-6},
        weights=[("vector", "f32", weight)],
    )
    y = apart({0: x}, num_rows=4)[1]
    expected = twin.norm(x, weight, eps=1e-6, form="rms", bias=None, group=head_dim)
    assert_close(y, expected, dtype=dtype)


@each_isa
@each_dtype
@each_case(("heads", "head_dim", "half"), [(3, 16, 8), (2, 10, 5), (5, 64, 32), (1, 20, 3)])
def test_rope_rotates_pairs_by_position_bit_for_bit(
    isa: str, dtype: str, heads: int, head_dim: int, half: int
) -> None:
    rng = np.random.default_rng(7)
    angles = rng.uniform(0, 6, (9, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([8, 0, 3, 3, 1], np.int32)
    x = draw(rng, 5, heads * head_dim, dtype=dtype)
    op = OneOp(
        "rope",
        [Operand(heads * head_dim, dtype)],
        isa,
        values={"rope": 0, "heads": heads, "head_dim": head_dim},
        ropes=[(cos, sin)],
    )
    y = op({0: x}, num_rows=5, batch={"rope_positions": positions})[0]
    expected = twin.rope(x, cos[positions], sin[positions], heads=heads, head_dim=head_dim)
    np.testing.assert_array_equal(y, round_to_bf16(expected) if dtype == "bf16" else expected)


@each_isa
@each_dtype
@each_case("gated", [True, False])
@each_case("form", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activation_is_accurate_over_its_whole_range(
    isa: str, dtype: str, gated: bool, form: str
) -> None:
    rng = np.random.default_rng(7)
    exponents = np.linspace(-30, 4, 333)
    magnitudes = np.concatenate([2.0**exponents, [0.0, 88.0, 104.0, 1e4]]).astype(np.float32)
    gate = np.stack([magnitudes, -magnitudes])
    gate = round_to_bf16(gate) if dtype == "bf16" else gate
    up = draw(rng, *gate.shape, dtype=dtype) if gated else None
    operands = [Operand(gate.shape[1], dtype)] * (3 if gated else 2)
    op = OneOp("activation", operands, isa, values={"form": form})
    y = op({0: gate} if up is None else {0: gate, 2: up}, num_rows=2)[1]
    expected = twin.activation(gate, up, form=form)
    scale = np.abs(gate if up is None else gate * up)  # 1 + erf and 1 + tanh cancel below zero
    assert_close(y, expected, dtype=dtype, scale=scale / 8 if form != "silu" else None)


@each_isa
@each_dtype
@each_case("other", DTYPES)
def test_add_and_scale_round_once(isa: str, dtype: str, other: str) -> None:
    rng = np.random.default_rng(7)
    x, y = draw(rng, 3, 45, dtype=dtype), draw(rng, 3, 45, dtype=other)
    added = OneOp("add", [Operand(45, dtype), Operand(45, other)], isa)({0: x, 1: y}, num_rows=3)
    scaled = OneOp("scale", [Operand(45, dtype)], isa, values={"factor": 0.3})({0: x}, num_rows=3)
    rounded: Any = round_to_bf16 if dtype == "bf16" else np.asarray
    np.testing.assert_array_equal(added[0], rounded(twin.add(x, y)))
    np.testing.assert_array_equal(scaled[0], rounded(twin.scale(x, 0.3)))


@each_isa
@each_dtype
@each_case("cap", [0.3, 30.0])
def test_a_soft_cap_is_accurate_over_its_whole_range(isa: str, dtype: str, cap: float) -> None:
    magnitudes = np.concatenate([2.0 ** np.linspace(-30, 12, 333), [0.0, 1e30, np.inf]])
    x = np.stack([magnitudes, -magnitudes]).astype(np.float32)
    x = round_to_bf16(x) if dtype == "bf16" else x
    y = OneOp("soft_cap", [Operand(x.shape[1], dtype)], isa, values={"cap": cap})(
        {0: x}, num_rows=2
    )[0]
    assert_close(y, twin.soft_cap(x, cap), dtype=dtype, scale=cap / 8)
    assert (np.abs(y) <= cap * (1 + 2.0**-8)).all()
    assert np.array_equal(np.signbit(y), np.signbit(x))


@each_isa
def test_a_soft_cap_propagates_nan(isa: str) -> None:
    x = np.full((1, 5), np.nan, np.float32)
    assert np.isnan(
        OneOp("soft_cap", [Operand(5)], isa, values={"cap": 2.0})({0: x}, num_rows=1)[0]
    ).all()


@each_isa
@each_dtype
@each_case("out", DTYPES)
def test_copy_rounds_to_the_output_type(isa: str, dtype: str, out: str) -> None:
    rng = np.random.default_rng(7)
    x = draw(rng, 3, 45, dtype=dtype)
    y = OneOp("copy", [Operand(45, dtype), Operand(45, out)], isa)({0: x}, num_rows=3)[1]
    np.testing.assert_array_equal(y, round_to_bf16(x) if out == "bf16" else x)


@each_isa
@each_dtype
def test_a_tap_is_a_copy_in_steps_that_keep_taps_only(isa: str, dtype: str) -> None:
    x = draw(np.random.default_rng(8), 3, 45, dtype=dtype)
    tap = OneOp("tap", [Operand(45, dtype), Operand(45)], isa)
    found = [tap({0: x}, num_rows=3, keeps_taps=keeps)[1] for keeps in (True, False, True)]
    np.testing.assert_array_equal(found[0], x)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[2], x)


@each_isa
@each_dtype
@each_case("form", ["rms", "layer"])
def test_a_norm_without_a_weight_uses_ones(isa: str, dtype: str, form: str) -> None:
    rng = np.random.default_rng(7)
    x = draw(rng, 3, 45, dtype=dtype)
    operands = [Operand(45, dtype), Operand(45)]
    op = OneOp("norm", operands, isa, values={"form": form, "group": 0, "eps": 1e-5})
    y = op({0: x}, num_rows=3)[1]
    expected = twin.norm(x, None, eps=1e-5, form=form, bias=None, group=0)
    assert_close(y, expected, dtype="f32", scale=np.abs(expected) + 1)


@each_isa
@each_dtype
@each_case("out", DTYPES)
@each_case("form", ["matrix", "table"])
def test_embed_gathers_rows_of_panels_and_tables(isa: str, dtype: str, out: str, form: str) -> None:
    rng = np.random.default_rng(7)
    table = draw(rng, 101, 37, dtype=dtype)
    ids = np.array([0, 31, 32, 100, 7, 7], np.int32)
    expected = twin.embed(table, ids)
    for ids_of, name in (("tokens", "token_ids"), ("positions", "rope_positions")):
        weights = [(form, dtype, table)]
        op = OneOp("embed", [Operand(37, out)], isa, values={"ids": ids_of}, weights=weights)
        y = op({}, num_rows=6, batch={name: ids})[0]
        np.testing.assert_array_equal(y, round_to_bf16(expected) if out == "bf16" else expected)


@each_isa
@each_dtype
def test_gather_rows_copies_bits(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(7)
    x = draw(rng, 9, 19, dtype=dtype)
    index = np.array([0, 3, 8], np.int32)
    op = OneOp("gather_rows", [Operand(19, dtype), Operand(19, dtype)], isa)
    # Output rows count as the step's tokens, so all nine need an index.
    picked = np.concatenate([index, np.zeros(6, np.int32)])
    y = op({0: x}, num_rows=9, batch={"sample_rows": picked})[1]
    np.testing.assert_array_equal(y[:3], x[index])


@each_isa
def test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan_and_infinity(isa: str) -> None:
    bits = np.array(
        [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0x7F7FFFFF, 0x7F800000,
         0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x00000000, 0x80000000, 0x00008000, 0x00018000],
        np.uint32,
    )  # fmt: skip
    values = np.tile(bits, 5)[None].view(np.float32)
    weights = [("table", "f32", values)]
    op = OneOp(
        "embed", [Operand(values.shape[1], "bf16")], isa, values={"ids": "tokens"}, weights=weights
    )
    y = op({}, num_rows=1)[0]
    np.testing.assert_array_equal(y.view(np.uint32), round_to_bf16(values).view(np.uint32))


@each_isa
@each_case(("kind", "values"), [("copy", {}), ("activation", {"form": "relu"})])
def test_denormals_are_rounded_to_bf16_like_other_numbers(
    isa: str, kind: str, values: dict[str, str]
) -> None:
    """Some instructions flush denormals to zero. One in a vector, and a whole vector of them."""
    x = np.linspace(1e-40, 2e-38, 2 * 77, dtype=np.float32).reshape(2, 77)
    x[0, 1::2] = 1.0
    op = OneOp(kind, [Operand(77), Operand(77, "bf16")], isa, values=values)
    y = op({0: x}, num_rows=2)[1]
    assert (y != 0).all()
    np.testing.assert_array_equal(y, round_to_bf16(x))

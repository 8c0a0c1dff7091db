"""Norm, activation, gather, embed, add, scale, soft cap and copy match their NumPy references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.execute import reference_ops as ops
from quire.execute.gpu.kernels import rows as row_kernels
from quire.execute.gpu.kernels.activation import activation
from quire.execute.gpu.kernels.norm import norm
from tests.gpu.tensors import (
    BF16_STEP,
    Float32s,
    array,
    empty,
    normal,
    rounded,
    same_bits,
    tensor,
    wide,
)

# Intermediate overflow (exp of -x, the square of a branch not taken) is harmless.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
SHAPES = [(1, 5), (3, 130), (2, 64)]


def assert_close(found: Float32s, expected: Float32s, dtype: str) -> None:
    tolerance = 2e-6 if dtype == "f32" else BF16_STEP
    np.testing.assert_allclose(found, rounded(expected, dtype), rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("form", ["rms", "layer"])
@pytest.mark.parametrize(("shape", "group"), [((1, 5), 0), ((3, 130), 0), ((2, 96), 24)])
def test_norm(dtype: str, form: str, shape: tuple[int, int], group: int) -> None:
    rng = np.random.default_rng(1)
    x, delta = normal(rng, *shape), normal(rng, *shape, dtype=dtype)
    weight, bias = normal(rng, group or shape[1]), normal(rng, group or shape[1])
    x_tensor, y = wide(x, "f32"), empty(*shape, dtype)
    norm(
        x_tensor,
        y,
        weight=tensor(weight),
        bias=tensor(bias),
        delta=wide(delta, dtype),
        eps=1e-5,
        form=form,
        group=group,
    )
    total = ops.add(x, delta)
    assert same_bits(array(x_tensor), total)
    expected = ops.norm(total, weight, bias=bias, eps=1e-5, form=form, group=group)
    assert_close(array(y), expected, dtype)


def test_a_residual_is_rounded_to_its_buffer_before_the_norm() -> None:
    rng = np.random.default_rng(2)
    x, delta = normal(rng, 3, 40, dtype="bf16"), normal(rng, 3, 40)
    x_tensor, y = wide(x, "bf16"), empty(3, 40)
    norm(x_tensor, y, delta=wide(delta, "f32"), eps=1e-6)
    total = rounded(ops.add(x, delta), "bf16")
    assert same_bits(array(x_tensor), total)
    expected = ops.norm(total, None, bias=None, eps=1e-6, form="rms", group=0)
    assert_close(array(y), expected, "f32")


@pytest.mark.parametrize("form", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_activation(form: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    gate, up = normal(rng, 3, 130, dtype=dtype) * 4, normal(rng, 3, 130, dtype=dtype)
    gate[0, :4] = [0.0, -100.0, 100.0, -1e-3]
    gate = rounded(gate, dtype)
    y = empty(3, 130, dtype)
    activation(wide(gate, dtype), wide(up, dtype), y, form=form)
    assert_close(array(y), ops.activation(gate, up, form=form), dtype)
    activation(wide(gate, dtype), None, y, form=form)
    assert_close(array(y), ops.activation(gate, None, form=form), dtype)


@pytest.mark.parametrize("table_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gather(table_dtype: str, dtype: str) -> None:
    rng = np.random.default_rng(4)
    table = normal(rng, 7, 37, dtype=table_dtype)
    ids = np.array([6, 0, 0, 3], np.int32)
    y = empty(4, 37, dtype)
    row_kernels.gather_rows(wide(table, table_dtype), torch.from_numpy(ids), y)
    assert same_bits(array(y), rounded(ops.embed(table, ids), dtype))


def test_gather_of_an_int8_table() -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(-127, 128, (7, 37)).astype(np.int8)
    scales, ids = normal(rng, 7), np.array([5, 2], np.int32)
    y = empty(2, 37)
    row_kernels.gather_rows(
        torch.from_numpy(values), torch.from_numpy(ids), y, scales=tensor(scales)
    )
    assert same_bits(array(y), (values.astype(np.float32) * scales[:, None])[ids])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_scale_and_copy_match_the_reference_bit_for_bit(
    dtype: str, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(6)
    x, other = normal(rng, *shape, dtype=dtype), normal(rng, *shape, dtype="bf16")
    found = wide(x, dtype)
    row_kernels.add(found, wide(other, "bf16"))
    assert same_bits(array(found), rounded(ops.add(x, other), dtype))
    found = wide(x, dtype)
    row_kernels.scale(found, 0.1)
    assert same_bits(array(found), rounded(ops.scale(x, 0.1), dtype))
    found = empty(*shape, "bf16")
    row_kernels.copy(wide(x, dtype), found)
    assert same_bits(array(found), rounded(x, "bf16"))


def test_soft_cap_over_its_whole_range() -> None:
    x = np.concatenate([np.linspace(-200, 200, 401), np.geomspace(1e-6, 40, 50)])
    x = x.astype(np.float32)[None]
    found = wide(x, "f32")
    row_kernels.soft_cap(found, 30.0)
    np.testing.assert_allclose(array(found), ops.soft_cap(x, 30.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("form", ["rms", "layer"])
@pytest.mark.parametrize(("width", "group"), [(5, 0), (130, 0), (96, 24)])
def test_a_row_is_normed_alone_as_in_a_batch(dtype: str, form: str, width: int, group: int) -> None:
    rng = np.random.default_rng(7)
    x, delta = normal(rng, 70, width), normal(rng, 70, width, dtype=dtype)
    weight = tensor(normal(rng, group or width))

    def ask(rows: slice) -> tuple[Float32s, Float32s]:
        total, y = wide(x[rows], "f32"), empty(len(x[rows]), width, dtype)
        norm(
            total,
            y,
            weight=weight,
            delta=wide(delta[rows], dtype),
            eps=1e-5,
            form=form,
            group=group,
        )
        return array(total), array(y)

    together = ask(slice(None))
    for row in (0, 33, 69):
        for one, all_rows in zip(ask(slice(row, row + 1)), together, strict=True):
            assert same_bits(one, all_rows[row : row + 1])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("form", ["silu", "gelu", "gelu_tanh"])
def test_a_row_is_activated_alone_as_in_a_batch(form: str, dtype: str) -> None:
    rng = np.random.default_rng(8)
    gate, up = normal(rng, 70, 37, dtype=dtype), normal(rng, 70, 37, dtype=dtype)
    together = empty(70, 37, dtype)
    activation(wide(gate, dtype), wide(up, dtype), together, form=form)
    for row in (0, 33, 69):
        alone, rows = empty(1, 37, dtype), slice(row, row + 1)
        activation(wide(gate[rows], dtype), wide(up[rows], dtype), alone, form=form)
        assert same_bits(array(alone), array(together)[rows])


def test_wrong_shapes_are_rejected() -> None:
    x = torch.zeros(2, 6)
    with pytest.raises(ValueError, match="groups of 4"):
        norm(x, x, eps=1e-5, group=4)
    with pytest.raises(ValueError, match="side by side"):
        norm(x.T, x.T, eps=1e-5)
    with pytest.raises(ValueError, match="swish"):
        activation(x, None, x, form="swish")
    with pytest.raises(ValueError, match="scales"):
        row_kernels.gather_rows(x.to(torch.int8), torch.zeros(2, dtype=torch.int32), x)

"""fp8 rows and their products: values match the NumPy reference for every kind of scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.execute import reference_ops as ops
from quire.execute.gpu import plain
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.quant.fp8 import OF_CODES, e4m3, quantize_fp8, quantize_fp8_rows
from quire.quant.scheme import SCHEMES
from tests.gpu.tensors import Float32s, array, empty, normal, same_bits, tensor, wide

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
E4M3 = torch.float8_e4m3fn


def test_the_reference_rounds_as_pytorch_does() -> None:
    x = np.concatenate([np.linspace(-450, 450, 999), np.geomspace(1e-5, 1, 500), [0.0, -0.0]])
    x = np.clip(x, -448, 448).astype(np.float32)
    assert (e4m3(x) == torch.from_numpy(x).to(E4M3).float().numpy()).all()
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    assert same_bits(OF_CODES, array(codes))


def as_fp8(x: Float32s, scaled: str, scale: float = 0.0) -> ByteRows:
    """Quantize by the kernel, into an oversized buffer with old content."""
    room = ByteRows.empty(len(x) + 2, x.shape[1], "cpu", dtype=E4M3, scaled=scaled)
    room.values.fill_(77)
    room.scales.fill_(scale if scaled == "tensor" else float("nan"))
    return quantize_rows(wide(x, "f32"), room)


@pytest.mark.parametrize("scaled", ["token", "block"])
@pytest.mark.parametrize("columns", [5, 300])
def test_quantized_rows_match_the_reference(scaled: str, columns: int) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 4, columns) * np.exp(normal(rng, 4, columns) * 3)
    x[1], x[2, 3] = 0.0, np.inf
    found = as_fp8(x, scaled)
    values, scales = quantize_fp8_rows(x, by_block=scaled == "block")
    assert same_bits(array(found.values)[:, :columns] + 0, values + 0)
    assert not array(found.values)[:, columns:].any()
    assert same_bits(array(found.scales).reshape(-1, 4).T.copy(), scales)


def test_rows_with_a_given_scale() -> None:
    x = np.array([[1.0, -3.0, 1e6, 0.01]], np.float32)
    found = as_fp8(x, "tensor", 0.5)
    assert array(found.values)[0, :4].tolist() == e4m3(x / np.float32(0.5))[0].tolist()


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_weights_quantized_on_a_device_match_the_reference(scheme: str) -> None:
    rng = np.random.default_rng(4)
    w = normal(rng, 150, 300) * np.exp(normal(rng, 150, 300) * 3)
    w[3], w[5, 7], w[149] = 0, np.nan, np.float32(2.0**-110)
    kept = quantize_fp8(w, SCHEMES[scheme])
    values, scales = plain.quantize_fp8(torch.from_numpy(w), SCHEMES[scheme])
    assert same_bits(array(values) + 0, kept.values + 0)
    assert same_bits(array(scales).reshape(kept.scales.shape), kept.scales)


def weights(rng: np.random.Generator, outputs: int, columns: int) -> Float32s:
    """Return weights quantized to fp8."""
    return e4m3(normal(rng, outputs, columns) * 40)


@pytest.mark.parametrize("x_kind", ["tensor", "token", "block"])
@pytest.mark.parametrize("w_kind", ["tensor", "channel", "block"])
def test_products_of_all_scales(x_kind: str, w_kind: str) -> None:
    rng = np.random.default_rng(2)
    rows, outputs, columns = 3, 130, 300
    x, w, bias = normal(rng, rows, columns), weights(rng, outputs, columns), normal(rng, outputs)
    w_scales = np.abs(normal(rng, *{"tensor": (1, 1), "channel": (outputs, 1)}.get(w_kind, (2, 3))))
    found_x = as_fp8(x, x_kind, 0.01)
    if x_kind == "tensor":
        values, x_scales = array(found_x.values)[:, :columns], np.full((1, 1), 0.01, np.float32)
    else:
        values, x_scales = quantize_fp8_rows(x, by_block=x_kind == "block")
    kept = tensor(w_scales if w_kind == "block" else w_scales[:, 0])
    found = empty(rows, outputs)
    linear_bytes(found_x, ByteWeight.of(tensor(w).to(E4M3), kept), found, bias=tensor(bias))
    blocks = (x_kind == "block", w_kind == "block")
    expected = ops.fp8_product((values, x_scales), (w, w_scales), bias, blocks=blocks)
    np.testing.assert_allclose(array(found), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scaled", ["token", "block"])
def test_a_row_is_equal_alone_and_among_70_and_fails_alone(scaled: str) -> None:
    rng = np.random.default_rng(3)
    scales = torch.ones(5) if scaled == "token" else torch.ones(1, 2)
    x, w = normal(rng, 70, 140), ByteWeight.of(tensor(weights(rng, 5, 140)).to(E4M3), scales)
    x[3, 0] = np.nan
    together, alone = empty(70, 5), empty(1, 5)
    linear_bytes(as_fp8(x, scaled), w, together)
    linear_bytes(as_fp8(x[69:], scaled), w, alone)
    assert same_bits(array(together)[69:], array(alone))
    assert np.isnan(array(together)).any(axis=1).tolist() == [row == 3 for row in range(70)]


def test_wrong_shapes_are_rejected() -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="scales by 'row'; block, token, tensor are allowed"):
        as_fp8(x, "row")
    weight = ByteWeight.of(torch.zeros(3, 8).to(E4M3), torch.ones(5))
    with pytest.raises(ValueError, match=r"scales \(5,\)"):
        linear_bytes(as_fp8(x, "token"), weight, torch.zeros(2, 3))
    ints = ByteWeight.of(torch.zeros(3, 8, dtype=torch.int8), torch.ones(3))
    with pytest.raises(ValueError, match=r"weight of torch.int8 .* for rows of torch.float8"):
        linear_bytes(as_fp8(x, "token"), ints, torch.zeros(2, 3))

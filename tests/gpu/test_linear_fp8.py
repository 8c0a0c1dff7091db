"""Rows in fp8 and products of them: the twin's values, and near its products, by every scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.execute.gpu import twins
from quire.execute.gpu.kernels.linear_fp8 import Fp8Weight, linear_fp8, quantize_rows_fp8
from tests.gpu.tensors import Float32s, array, empty, normal, same_bits, tensor, wide

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
E4M3 = torch.float8_e4m3fn


def test_the_twin_rounds_as_pytorch_does() -> None:
    x = np.concatenate([np.linspace(-450, 450, 999), np.geomspace(1e-5, 1, 500), [0.0, -0.0]])
    x = np.clip(x, -448, 448).astype(np.float32)
    assert (twins.e4m3(x) == torch.from_numpy(x).to(E4M3).float().numpy()).all()


@pytest.mark.parametrize("kind", ["token", "block"])
@pytest.mark.parametrize("columns", [5, 300])
def test_rows_become_the_twins_values(kind: str, columns: int) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 4, columns) * np.exp(normal(rng, 4, columns) * 3)
    x[1], x[2, 3] = 0.0, np.inf
    found = quantize_rows_fp8(wide(x, "f32"), kind)
    values, scales = twins.fp8_rows(x, kind)
    assert same_bits(array(found.values)[:, :columns] + 0, values + 0)
    assert not array(found.values)[:, columns:].any()
    assert same_bits(array(found.scales).reshape(-1, 4).T.copy(), scales)


def test_rows_by_a_given_scale() -> None:
    x = np.array([[1.0, -3.0, 1e6, 0.01]], np.float32)
    found = quantize_rows_fp8(tensor(x), "tensor", scale=torch.tensor([0.5]))
    assert array(found.values)[0, :4].tolist() == twins.e4m3(x / np.float32(0.5))[0].tolist()


def weights(rng: np.random.Generator, outputs: int, columns: int) -> Float32s:
    """As fp8 has them."""
    return twins.e4m3(normal(rng, outputs, columns) * 40)


@pytest.mark.parametrize("x_kind", ["tensor", "token", "block"])
@pytest.mark.parametrize("w_kind", ["tensor", "channel", "block"])
def test_products_of_all_scales(x_kind: str, w_kind: str) -> None:
    rng = np.random.default_rng(2)
    rows, outputs, columns = 3, 130, 300
    x, w, bias = normal(rng, rows, columns), weights(rng, outputs, columns), normal(rng, outputs)
    w_scales = np.abs(normal(rng, *{"tensor": (1, 1), "channel": (outputs, 1)}.get(w_kind, (2, 3))))
    if x_kind == "tensor":
        scale = np.full((1, 1), 0.01, np.float32)
        found_x = quantize_rows_fp8(tensor(x), x_kind, scale=tensor(scale[0]))
        values, x_scales = array(found_x.values)[:, :columns], scale
    else:
        found_x = quantize_rows_fp8(tensor(x), x_kind)
        values, x_scales = twins.fp8_rows(x, x_kind)
    kept = tensor(w_scales if w_kind == "block" else w_scales[:, 0])
    found = empty(rows, outputs)
    linear_fp8(found_x, Fp8Weight(tensor(w).to(E4M3), kept), found, bias=tensor(bias))
    expected = twins.fp8_linear(values, x_scales, w, w_scales, bias)
    np.testing.assert_allclose(array(found), expected, rtol=1e-4, atol=1e-3)


def test_a_row_is_the_same_alone_and_among_70_and_fails_alone() -> None:
    rng = np.random.default_rng(3)
    x, w = normal(rng, 70, 140), Fp8Weight(tensor(weights(rng, 5, 140)).to(E4M3), torch.ones(1, 2))
    x[3, 0] = np.nan
    together, alone = empty(70, 5), empty(1, 5)
    linear_fp8(quantize_rows_fp8(tensor(x), "block"), w, together)
    linear_fp8(quantize_rows_fp8(tensor(x[69:]), "block"), w, alone)
    assert same_bits(array(together)[69:], array(alone))
    assert np.isnan(array(together)).any(axis=1).tolist() == [row == 3 for row in range(70)]


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="a scale is given for tensor"):
        quantize_rows_fp8(x, "tensor")
    weight = Fp8Weight(torch.zeros(3, 8).to(E4M3), torch.ones(5))
    with pytest.raises(ValueError, match=r"\(5,\) of weights"):
        linear_fp8(quantize_rows_fp8(x, "token"), weight, torch.zeros(2, 3))

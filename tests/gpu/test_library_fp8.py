"""The vendor's fp8 products: when they are used, and that they compute what ours compute.

A PyTorch that rejects the scales falls back to ours. PyTorch's CPU product replaces the GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.execute.gpu import library_fp8
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.library_fp8 import (
    BY_ROW,
    BY_TENSOR,
    bound,
    is_known,
    product_for,
    scales_for,
)
from quire.program.tensors import DType
from quire.quant.fp8 import e4m3
from tests.gpu.tensors import array, normal, tensor
from tests.gpu.torch_models import program_of, reference_executor, sequence_logits, torch_executor
from tests.models.case import Case
from tests.models.generate import logits_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
E4M3, CPU = torch.float8_e4m3fn, torch.device("cpu")
USUAL: dict[str, Any] = {
    "exact": False,
    "capability": (9, 0),
    "x_scaled": "token",
    "w_scaled": "channel",
    "outputs": 4096,
    "y_dtype": torch.bfloat16,
    "y_is_whole": True,
    "has_bias": False,
}


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    is_known.cache_clear()
    yield
    is_known.cache_clear()


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, BY_ROW),
        ({"capability": (8, 9)}, BY_ROW),
        ({"capability": (8, 6)}, ""),
        ({"capability": None}, ""),
        ({"exact": True}, ""),
        ({"x_scaled": "tensor"}, BY_ROW),
        ({"w_scaled": "tensor"}, BY_ROW),
        ({"x_scaled": "tensor", "w_scaled": "tensor"}, BY_TENSOR),
        ({"x_scaled": "block", "w_scaled": "block"}, ""),
        ({"outputs": 4100}, ""),
        ({"y_dtype": torch.float32}, ""),
        ({"y_is_whole": False}, ""),
        ({"has_bias": True}, ""),
    ],
)
def test_when_the_library_product_is_used(changes: dict[str, Any], form: str) -> None:
    assert scales_for(**(USUAL | changes)) == form


def _rows(scaled: str, columns: int) -> ByteRows:
    x = normal(np.random.default_rng(1), 5, columns)
    room = ByteRows.empty(9, columns, CPU, dtype=E4M3, scaled=scaled)
    room.scales.fill_(0.01)
    return quantize_rows(tensor(x), room)


@pytest.mark.parametrize(
    ("x_scaled", "w_scales", "form"),
    [
        ("token", np.linspace(0.5, 2, 32), BY_ROW),
        ("token", np.full(32, 0.5), BY_ROW),
        ("tensor", np.linspace(0.5, 2, 32), BY_ROW),
        ("tensor", np.full(32, 0.5), BY_TENSOR),
    ],
)
def test_the_library_product_matches_ours(
    x_scaled: str, w_scales: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known(form, CPU):
        pytest.skip("this PyTorch has no scaled fp8 product for CPUs")
    rng = np.random.default_rng(2)
    w = tensor(e4m3(normal(rng, 32, 300) * 40)).to(E4M3)
    weight = ByteWeight.of(w, torch.from_numpy(w_scales.astype(np.float32)))
    x, y, right = _rows(x_scaled, 300), torch.empty(9, 32, dtype=torch.bfloat16), torch.empty(5, 32)
    linear_bytes(x, weight, right)
    asked: list[str] = []
    monkeypatch.setattr(library_fp8, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        library_fp8, "bound", lambda *given: asked.append(given[2]) or bound(*given)
    )
    product = product_for(weight, x, y, has_bias=False, exact=False)
    assert product is not None
    assert asked == [form]
    product(x, y[:5])
    np.testing.assert_allclose(array(y[:5]), array(right), rtol=0.01, atol=1e-3)


def test_without_a_gpu_ours_is_used() -> None:
    weight = ByteWeight.of(torch.zeros(16, 128).to(E4M3), torch.ones(16))
    y = torch.empty(5, 16, dtype=torch.bfloat16)
    assert product_for(weight, _rows("token", 128), y, has_bias=False, exact=False) is None


@pytest.mark.parametrize("form", [BY_ROW, BY_TENSOR])
def test_a_pytorch_that_rejects_or_miscomputes_is_not_used(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: torch.Tensor) -> None:
        raise RuntimeError("Invalid scaling configuration")

    monkeypatch.setattr(library_fp8, "multiply", refuse)
    assert not is_known(form, CPU)
    is_known.cache_clear()
    monkeypatch.setattr(library_fp8, "multiply", lambda *given: given[-1].fill_(128.0))
    assert not is_known(form, CPU)


def test_a_model_in_fast_mode_uses_the_library_and_agrees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not is_known(BY_ROW, CPU):
        pytest.skip("this PyTorch has no scaled fp8 product for CPUs")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    case = Case("llama", sizes | heads, seed=3, stored="bf16")
    folder = case.write(tmp_path)
    program, ids = program_of(folder, DType.BF16, "fp8"), case.token_ids[:4]
    count: list[int] = []
    multiply = library_fp8.multiply

    def counted(*given: torch.Tensor) -> None:
        count.append(1)
        multiply(*given)

    monkeypatch.setattr(library_fp8, "multiply", counted)
    monkeypatch.setattr(library_fp8, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(library_fp8, "MAX_TRITON_ROWS", 0)
    executor = torch_executor(folder, program, exact=False, kernels=True)
    count.clear()
    found = sequence_logits(executor, ids, max_positions=program.max_positions)
    assert len(count) == 4  # the head's logits are f32
    right = logits_of(reference_executor(folder, program), ids, max_positions=program.max_positions)
    assert np.abs(found - right).max() <= 0.05 * np.abs(right).max()
    monkeypatch.setattr(library_fp8, "MAX_TRITON_ROWS", 64)
    count.clear()
    few = sequence_logits(executor, ids, max_positions=program.max_positions)
    assert not count, "few rows by rows' scales are not the library's"
    assert np.abs(few - right).max() <= 0.05 * np.abs(right).max()

"""Low-bit weights: codes and scales of an fp8 checkpoint are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.engine.assembly.precision import with_precision
from quire.execute import reference_ops as ops
from quire.execute.quantized_weights import quantize_weight, read_f32
from quire.models.registry import build_program, open_model
from quire.program.tensors import DType
from quire.quant.fp8 import Fp8Matrix
from quire.quant.scheme import SCHEMES
from quire.weights.binding import bind
from quire.weights.checkpoint import open_checkpoint
from tests.fp8_checkpoints import KINDS, VALUES, codes_of, write_fp8_of
from tests.tiny_models import write_tiny_llama

SIZES = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_weight_keeps_its_parts_as_stored(kind: str, tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain", seed=2, dtype="bf16", **SIZES, **HEADS)
    folder = write_fp8_of(plain, tmp_path / "fp8", kind=kind)
    spec, checkpoint = open_model(folder), open_checkpoint(folder)
    made = build_program(spec, dtype=DType.BF16, max_positions=64)
    program = with_precision(made, "auto", checkpoint)
    binding = bind(program, checkpoint)
    for name in ("layers.0.qkv", "layers.1.gate_up", "layers.1.down"):
        weight = program.weights[name]
        matrix, coarse = quantize_weight(weight, binding)
        assert isinstance(matrix, Fp8Matrix)
        assert coarse == 0
        assert matrix.scheme.name == ("fp8-block" if kind == "block" else "fp8")
        np.testing.assert_array_equal(matrix.dequantized(), read_f32(weight, binding))
        # Rounded again, every row's largest would be 448.
        largest = np.abs(matrix.values).max(axis=1)
        assert (largest == 448).all() == (kind == "channel")


def test_parts_share_the_largest_of_their_static_scales(tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain", seed=2, dtype="bf16", **SIZES, **HEADS)
    folder = write_fp8_of(plain, tmp_path / "fp8", kind="tensor", is_static=True)
    spec, checkpoint = open_model(folder), open_checkpoint(folder)
    made = build_program(spec, dtype=DType.BF16, max_positions=64)
    program = with_precision(made, "auto", checkpoint, static=spec.static_activations)
    binding = bind(program, checkpoint)
    for name, largest in (("qkv", 0.03), ("gate_up", 0.025), ("down", 0.02)):
        weight = program.weights[f"layers.0.{name}"]
        matrix, _ = quantize_weight(weight, binding)
        assert isinstance(matrix, Fp8Matrix)
        assert weight.scheme == "fp8-static"
        assert matrix.input_scale == np.float32(largest)
        np.testing.assert_array_equal(matrix.dequantized(), read_f32(weight, binding))


def test_rows_with_a_static_scale_are_clipped_at_its_range() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 300)).astype(np.float32)
    x[0, 7], x[2, 1] = 1000.0, np.inf
    values = VALUES[codes_of(rng.standard_normal((5, 300)).astype(np.float32) * 40)]
    scales = np.linspace(0.5, 1.5, 5, dtype=np.float32)[:, None]
    matrix = Fp8Matrix(
        scheme=SCHEMES["fp8-static"], values=values, scales=scales, input_scale=np.float32(0.01)
    )
    found = ops.fp8_linear(x, matrix, None)
    rows = np.clip(x[:2] * (np.float32(1) / np.float32(0.01)), -448, 448)
    right = VALUES[codes_of(rows)].astype(np.float64) * 0.01 @ (values * scales).T
    np.testing.assert_allclose(found[:2], right, rtol=1e-4, atol=1e-2)
    assert np.isnan(found[2]).all()

"""Quantized GGUF files run in the precision of their types, with bounded error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.base.gguf_types import TYPES
from quire.engine.assembly.precision import with_precision
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.quantize import precision_text
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from quire.weights.dtypes import round_to_bf16
from quire.weights.gguf_blocks import unpack
from tests.gguf_convert import GPT2, WIDE, gguf_of
from tests.gguf_quantizers import BLOCKS, quantized
from tests.gguf_writer import write_gguf
from tests.models.cases_experts import QWEN3_MOE
from tests.models.generate import BLOCK_SIZE, logits_of
from tests.tiny_models import write_tiny, write_tiny_llama

IDS = np.random.default_rng(5).integers(0, 97, 24).tolist()
# Relative to the logits' root mean square: the effect of integer weights and activations in two
# random layers of 256 (smaller in a trained model: bench/quality.py).
ALLOWED = 0.05


def write_mixed(folder: Path, path: Path, kinds: dict[str, str], rest: str) -> Path:
    """Write the model in `folder` as GGUF; `kinds` by the end of a tensor's name, else `rest`."""
    metadata, tensors = gguf_of(folder)
    typed = {}
    for name, values in tensors.items():
        kind = next((kind for end, kind in kinds.items() if name.endswith(end)), rest)
        typed[name] = (values, "F32" if values.ndim == 1 else kind)
    return write_gguf(path, metadata, typed)


def logits(path: Path, quantization: str, kind: str = "native") -> NDArray[np.float32]:
    spec, checkpoint = open_model(path), open_checkpoint(path)
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    made = with_precision(program, quantization, checkpoint)
    make = NativeExecutor if kind == "native" else ReferenceExecutor
    executor = make(
        made,
        checkpoint,
        ExecutorOptions(limits=StepLimits(max_tokens=32, max_samples=32, max_sequences=1)),
    )
    executor.allocate_cache(64 // BLOCK_SIZE + 1, BLOCK_SIZE)
    return logits_of(executor, IDS, max_positions=64)


def error(found: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2)))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K"])
def test_logits_stay_near_those_of_the_dequantized_file(
    kind: str, wide: Path, tmp_path: Path
) -> None:
    path = write_mixed(wide, tmp_path / "m.gguf", {}, kind)
    assert error(logits(path, "auto"), logits(path, "none")) < ALLOWED


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_stacked_experts_keep_the_precision_of_their_types(kind: str, tmp_path: Path) -> None:
    sizes = {
        "max_position_embeddings": 64,
        "moe_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 4,
    }
    folder = write_tiny(tmp_path / "checkpoint", QWEN3_MOE | WIDE | sizes, seed=3)
    path = write_mixed(folder, tmp_path / "m.gguf", {"ffn_gate_inp.weight": "F32"}, kind)
    found = logits(path, "auto")
    assert error(found, logits(path, "none")) < ALLOWED
    assert error(found, logits(path, "auto", "reference")) < 0.01


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_executors_agree(kind: str, wide: Path, tmp_path: Path) -> None:
    path = write_mixed(wide, tmp_path / "m.gguf", {}, kind)
    assert error(logits(path, "auto"), logits(path, "auto", "reference")) < 0.01


@pytest.mark.parametrize(
    ("kinds", "rest", "text"),
    [
        ({}, "Q4_0", "int4-g32"),
        (
            {"token_embd.weight": "Q4_0", "attn_output.weight": "Q4_0", "output.weight": "Q6_K"},
            "Q4_0",
            "int4-g32 (head: int8)",
        ),
        # As llama.cpp mixes types: values and down products of some layers in more bits.
        (
            {"0.attn_v.weight": "Q6_K", "0.ffn_down.weight": "Q8_0"},
            "Q4_0",
            "int4-g32 (layers.0.qkv, layers.0.down: int8)",
        ),
        ({"1.attn_k.weight": "F16"}, "Q4_K", "int8 (layers.1.qkv: none)"),
        ({}, "F16", "none"),
    ],
)
def test_mixed_files_use_a_precision_for_all_parts_of_a_weight(
    kinds: dict[str, str], rest: str, text: str, wide: Path, tmp_path: Path
) -> None:
    path = write_mixed(wide, tmp_path / "m.gguf", kinds, rest)
    program = build_program(open_model(path), dtype=DType.BF16, max_positions=64)
    assert precision_text(with_precision(program, "auto", open_checkpoint(path))) == text
    assert precision_text(with_precision(program, "none", open_checkpoint(path))) == "none"
    assert error(logits(path, "auto"), logits(path, "none")) < ALLOWED


def test_a_tied_head_keeps_the_precision_of_the_embedding(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tied", tie_word_embeddings=True, **WIDE)
    path = write_mixed(folder, tmp_path / "m.gguf", {"token_embd.weight": "Q6_K"}, "Q4_0")
    program = build_program(open_model(path), dtype=DType.BF16, max_positions=64)
    made = with_precision(program, "auto", open_checkpoint(path))
    assert precision_text(made) == "int4-g32 (embed: int8)"
    assert error(logits(path, "auto"), logits(path, "none")) < ALLOWED


def test_matrices_stored_transposed_in_checkpoints(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "gpt2", GPT2, seed=3)
    path = write_mixed(folder, tmp_path / "m.gguf", {"position_embd.weight": "F32"}, "Q4_0")
    assert error(logits(path, "auto"), logits(path, "none")) < ALLOWED


@pytest.mark.parametrize("rows", [1, 33])
def test_q4_0_keeps_its_codes_and_rounds_scales_to_bf16(rows: int) -> None:
    rng = np.random.default_rng(rows)
    w = (rng.standard_normal((rows, 256)) * 0.02).astype(np.float32)
    w[0, :32] = 0
    raw = np.frombuffer(quantized(w, "Q4_0"), np.uint8).reshape(-1, BLOCKS["Q4_0"].num_bytes)
    groups = unpack(next(kind for kind in TYPES.values() if kind.name == "Q4_0"), raw)
    kept = groups.codes * round_to_bf16(groups.scales)[..., None]
    values = groups.to_f32().reshape(rows, 256)
    weight = _native.Weight("matrix", "bf16", rows, 256, "int4-g32")
    weight.fill(_native.Pool(1), 0, rows, values.reshape(-1).view(np.uint8), "f32")
    found = np.array([weight.row(row) for row in range(rows)], np.float32)
    np.testing.assert_array_equal(found, kept.reshape(rows, 256).astype(np.float32))

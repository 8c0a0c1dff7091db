"""A GGUF model's tensors under the checkpoint's names: orders, types, blocks, rejections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import WeightsError
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.tensors import DType
from quire.runner.fingerprint import files_digest
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf_checkpoint import READABLE, GgufCheckpoint
from tests.gguf_convert import GPT2, WIDE, gguf_of, write_gguf_of
from tests.gguf_quantizers import BLOCKS, quantized, scalar_values
from tests.gguf_writer import describe, entry, paired, write_gguf
from tests.models.generate import logits_of, open_executor
from tests.tiny_models import write_tiny, write_tiny_llama

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


EACH_FIFTH = slice(None, None, 5)  # rows of every head, in both halves of each


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def file_of(wide: Path) -> Callable[[str], Path]:
    """Return the wide model as a file of a type; each type is quantized once."""
    return functools.cache(lambda kind: write_gguf_of(wide, wide / f"{kind}.gguf", kind=kind))


def by_definition(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Return what a reader must find after `values` were stored as `kind`."""
    raw, size = quantized(values, kind), BLOCKS[kind].num_bytes
    blocks = [scalar_values(kind, raw[at : at + size]) for at in range(0, len(raw), size)]
    return np.array(blocks, np.float32).reshape(values.shape)


def raw_rows(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Return the bytes of each row stored as `kind`."""
    return np.frombuffer(quantized(values, kind), np.uint8).reshape(len(values), -1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_tensors_are_the_bytes_of_the_checkpoint(
    kind: str, wide: Path, tmp_path: Path
) -> None:
    stored = write_tiny_llama(tmp_path / "ck", dtype=kind.lower(), **WIDE)
    found = open_checkpoint(write_gguf_of(stored, tmp_path / "m.gguf", kind=kind))
    right = open_checkpoint(stored)
    assert set(found.names) == set(right.names)
    for name in right.names:
        one, other = found.tensor(name), right.tensor(name)
        assert one.shape == other.shape
        assert found.describe(name) == (one.dtype, one.shape)
        if len(one.shape) == 2:  # vectors are always F32
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.array, other.array)
        np.testing.assert_array_equal(found.read_f32(name), right.read_f32(name))
    assert isinstance(found, GgufCheckpoint)
    assert found.quantized(Q) is None


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_quantized_tensors_match_the_definition_in_the_checkpoints_order(
    kind: str, wide: Path, file_of: Callable[[str], Path]
) -> None:
    found = open_checkpoint(file_of(kind))
    assert isinstance(found, GgufCheckpoint)
    right = open_checkpoint(wide)
    for name, heads in ((Q, 8), (K, 2), ("model.layers.1.mlp.down_proj.weight", 0)):
        values = right.read_f32(name)
        if heads:  # rows move, and a row's blocks with them
            moved = raw_rows(paired(values, heads), kind)
            np.testing.assert_array_equal(paired(raw_rows(values, kind), heads), moved)
        expected = by_definition(values[EACH_FIFTH], kind)
        whole = found.read_f32(name)
        np.testing.assert_array_equal(whole[EACH_FIFTH], expected)
        assert found.tensor(name).dtype == "f32"
        rows = found.quantized(name)
        assert rows is not None
        assert rows.type.name == kind
        np.testing.assert_array_equal(rows.to_f32(slice(0, len(values))), whole)
        np.testing.assert_array_equal(found.read_f32(name, slice(3, 6)), whole[3:6])
        found.release(name)
        np.testing.assert_array_equal(found.read_f32(name), whole)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_gpt_2s_matrices_are_transposed_back(kind: str, tmp_path: Path) -> None:
    stored = write_tiny(
        tmp_path / "ck", GPT2 | {"n_embd": 64}, seed=2, dtype="bf16" if kind == "BF16" else "f32"
    )
    found = open_checkpoint(write_gguf_of(stored, tmp_path / "m.gguf", kind=kind))
    right = open_checkpoint(stored)
    name = "transformer.h.0.attn.c_attn.weight"
    values = right.read_f32(name)
    expected = by_definition(values.T.copy(), kind).T if kind in BLOCKS else values
    assert found.tensor(name).shape == (64, 192)
    np.testing.assert_array_equal(found.read_f32(name), expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K", "Q6_K", "Q2_K"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_executors_compute_with_the_dequantized_values_and_digest_them(
    kind: str, dtype: DType, file_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path = file_of(kind)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    executors = [
        open_executor(path, kind=executor, dtype=dtype) for executor in ("native", "reference")
    ]
    found = [logits_of(executor, ids, max_positions=512) for executor in executors]
    error = 1e-3 if dtype is DType.F32 else 0.2
    np.testing.assert_allclose(found[0], found[1], atol=error, rtol=error)
    digests = {executor.weights_digest for executor in executors}
    assert len(digests) == 1
    content = bytearray(path.read_bytes())
    content[-500] ^= 4  # in the head
    (tmp_path / "m.gguf").write_bytes(content)
    changed = open_executor(tmp_path / "m.gguf", kind="native", dtype=dtype).weights_digest
    assert changed not in digests


def test_a_plain_files_digest_is_that_of_its_checkpoint(wide: Path, tmp_path: Path) -> None:
    path = write_gguf_of(wide, tmp_path / "m.gguf")
    program = build_program(open_model(wide), dtype=DType.F32, max_positions=512)
    options = ExecutorOptions(limits=StepLimits(max_tokens=8, max_samples=8, max_sequences=1))
    one, other = (
        NativeExecutor(program, open_checkpoint(where), options).weights_digest
        for where in (path, wide)
    )
    assert one == other


def test_metadata_is_in_the_digest_of_files(wide: Path, tmp_path: Path) -> None:
    digests = {
        files_digest(write_gguf_of(wide, tmp_path / "m.gguf", general__name=name))
        for name in ("a", "b")
    }
    assert len(digests) == 2
    assert files_digest(tmp_path) in digests  # the directory stands for the file


# ---- rejections


def test_unsupported_types_are_rejected_by_name_together(tmp_path: Path) -> None:
    listed = [describe("output.weight", (1, 256), 23, 0), describe("x.weight", (4,), 26, 160)]
    content = b"GGUF" + (3).to_bytes(4, "little") + (2).to_bytes(8, "little")
    content += (1).to_bytes(8, "little") + entry("general.architecture", "llama")
    content += b"".join(listed)
    path = tmp_path / "m.gguf"
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(192))
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(path)
    for said in ("output.weight is IQ4_XS", "x.weight is I32", ", ".join(READABLE)):
        assert said in str(caught.value)


@pytest.mark.parametrize("named", ["mamba", None, 3])
def test_an_architecture_without_names_is_rejected(named: Any, wide: Path, tmp_path: Path) -> None:
    path = write_gguf_of(wide, tmp_path / "m.gguf", general__architecture=named)
    with pytest.raises(
        WeightsError, match=r"general\.architecture is .*; supported: llama, granite"
    ):
        open_checkpoint(path)


def test_unexpected_tensors_are_reported_by_the_files_name(wide: Path, tmp_path: Path) -> None:
    metadata, tensors = gguf_of(wide)
    typed = {name: (values, "F32") for name, values in tensors.items()}
    typed["blk.0.extra.weight"] = (np.ones((2, 2), np.float32), "F32")
    del typed["blk.1.ffn_up.weight"]
    typed["output_norm.weight"] = (np.ones(7, np.float32), "F32")
    path = write_gguf(tmp_path / "m.gguf", metadata, typed)
    with pytest.raises(WeightsError) as caught:
        open_executor(path)
    for said in (
        "weights and its metadata disagree: 3 problems",
        "blk.0.extra.weight (shape [2, 2]) is not part of LlamaForCausalLM",
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.norm.weight has shape [7]; its metadata asks for [256]",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize("heads", [0, 7, 3.5, "x", None])
def test_rows_not_divisible_by_heads_are_rejected(heads: Any, wide: Path, tmp_path: Path) -> None:
    path = write_gguf_of(wide, tmp_path / "m.gguf", llama__attention__head_count=heads)
    with pytest.raises(WeightsError, match=r"attn_q\.weight is F32 \[256, 256\], and llama\.att"):
        open_checkpoint(path)


def test_an_unknown_tensor_is_reported(wide: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf_of(wide, tmp_path / "m.gguf"))
    with pytest.raises(WeightsError, match="no tensor named 'x'"):
        checkpoint.tensor("x")
    two_of_a_name = gguf_of(wide)[1] | {"model.norm.weight": np.ones(256, np.float32)}
    metadata = gguf_of(wide)[0]
    path = write_gguf(
        tmp_path / "two.gguf", metadata, {name: (v, "F32") for name, v in two_of_a_name.items()}
    )
    with pytest.raises(WeightsError, match=r"and .*norm\.weight are model\.norm\.weight"):
        open_checkpoint(path)

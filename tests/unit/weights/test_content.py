"""Digests of contents: the native one against its definition, and what changes it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from quire.cache.plain_digest import siphash128
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from quire.weights.content import WeightsDigest
from quire.weights.safetensors import StoredTensor
from tests.tiny_models import write_tiny_llama

MASK = 2**64 - 1
KEY = b"quire content--1"
PIECE = 2**20


def test_the_native_digest_matches_its_definition() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 63, 64, 65, 1023, 1024, 1025, 5000, PIECE, PIECE + 77):
        content = rng.integers(0, 256, size, np.uint8)
        assert _native.content_digest(content) == _digest(content.tobytes()), size


def test_a_copy_is_digested_as_it_is_made() -> None:
    rng = np.random.default_rng(4)
    for size in (0, 1, 63, 64, 65, 1023, 1024, 1025, 5000, PIECE, PIECE + 77):
        content = rng.integers(0, 256, size, np.uint8)
        room = np.full(size + 2, 99, np.uint8)
        assert _native.copy_digest(content, room[1:-1]) == _digest(content.tobytes()), size
        assert np.array_equal(room[1:-1], content)
        assert (room[0], room[-1]) == (99, 99)
    with pytest.raises(ValueError, match="length"):
        _native.copy_digest(np.zeros(3, np.uint8), np.zeros(4, np.uint8))


def test_any_changed_byte_swap_or_length_changes_it() -> None:
    content = np.random.default_rng(1).integers(0, 256, PIECE + 3000, np.uint8)
    seen = {_native.content_digest(content), _native.content_digest(content[:-1])}
    for place in (0, 1, 63, 64, 1024, PIECE // 2 + 1, PIECE - 1, PIECE, len(content) - 1):
        changed = content.copy()
        changed[place] ^= 0x80
        seen.add(_native.content_digest(changed))
    for one, other in ((slice(0, 64), slice(64, 128)), (slice(0, 1024), slice(1024, 2048))):
        changed = content.copy()
        changed[one], changed[other] = content[other], content[one]
        seen.add(_native.content_digest(changed))
    assert len(seen) == 13
    zeros = {_native.content_digest(np.zeros(size, np.uint8)) for size in range(70)}
    assert len(zeros) == 70


@pytest.mark.parametrize("form", ["matrix", "table"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_packing_digests_what_it_reads(form: str, num_threads: int) -> None:
    values = np.random.default_rng(2).standard_normal((700, 1000)).astype(np.float32)
    raw = values.view(np.uint8).ravel()
    for dtype in ("f32", "bf16"):
        weight = _native.Weight(form, dtype, 700, 1000)
        found = weight.fill(_native.Pool(num_threads), 0, 700, raw, "f32")
        assert found == _native.content_digest(raw)


def test_names_dtypes_and_shapes_count_and_order_does_not() -> None:
    raw = np.arange(48, dtype=np.uint8)

    def of(*tensors: tuple[str, str, tuple[int, ...]]) -> str:
        digest = WeightsDigest()
        for name, dtype, shape in tensors:
            digest.add(StoredTensor(name=name, dtype=dtype, shape=shape, raw=raw))
        return digest.hexdigest()

    a, b = ("a", "f32", (3, 4)), ("b", "f16", (24,))
    assert of(a, b) == of(b, a, a)
    others = [of(a), of(b), of(a, b), of(("a", "f32", (4, 3)), b), of(("a", "bf16", (24,)), b)]
    assert len({*others, of(("c", "f32", (3, 4)), b)}) == 6


def test_executors_and_shards_agree_and_one_byte_in_the_middle_of_a_tensor_counts(
    tmp_path: Path,
) -> None:
    shape = {"intermediate_size": 5000, "num_hidden_layers": 1}  # tensors of more than a piece
    whole = write_tiny_llama(tmp_path / "whole", **shape)
    shards = write_tiny_llama(tmp_path / "shards", shards=3, **shape)
    assert len(list(shards.glob("*.safetensors"))) == 3
    before = _of_executor(whole, NativeExecutor)
    assert before == _of_executor(whole, ReferenceExecutor) == _of_executor(shards, NativeExecutor)
    tensor = open_checkpoint(whole).tensor("model.layers.0.mlp.up_proj.weight")
    assert len(tensor.raw) > PIECE
    file = whole / "model.safetensors"
    content = bytearray(file.read_bytes())
    start = content.index(tensor.raw[:64].tobytes())
    content[start + len(tensor.raw) // 2] ^= 1
    file.write_bytes(content)
    after = _of_executor(whole, NativeExecutor)
    assert before != after == _of_executor(whole, ReferenceExecutor)


def _of_executor(folder: Path, make: type[NativeExecutor] | type[ReferenceExecutor]) -> str:
    program = build_program(open_model(folder), dtype=DType.BF16, max_positions=16)
    checkpoint = open_checkpoint(folder)
    executor = make(
        program,
        checkpoint,
        ExecutorOptions(limits=StepLimits(max_tokens=1, max_samples=1, max_sequences=1)),
    )
    executor.close()
    return executor.weights_digest


def _digest(content: bytes) -> tuple[int, int]:
    """Compute the definition in native/include/quire/hash.h in plain integers."""
    ends = [_piece(content[at : at + PIECE]) for at in range(0, len(content), PIECE)]
    words = [len(content), *(half for end in ends for half in end)]
    return siphash128(struct.pack(f"<{len(words)}Q", *words), KEY)


def _piece(content: bytes) -> tuple[int, int]:
    keys, word = [], 0
    for _ in range(24):
        word = word + 0x9E3779B97F4A7C15 & MASK
        z = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        keys.append(z ^ z >> 31)
    sums = keys[:8]
    padded = content + bytes(-len(content) % 64)
    for number, at in enumerate(range(0, len(padded), 64)):
        stripe = number % 16
        for i, word in enumerate(struct.unpack("<8Q", padded[at : at + 64])):
            mixed = word ^ keys[stripe + i]
            sums[i ^ 1] += word
            sums[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32)
        if stripe == 15:
            sums = [
                (s & MASK ^ (s & MASK) >> 47 ^ keys[16 + i]) * 0x9E3779B1
                for i, s in enumerate(sums)
            ]
        sums = [s & MASK for s in sums]
    return siphash128(struct.pack("<9Q", len(content), *sums), KEY)

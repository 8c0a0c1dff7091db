"""Quantized blocks: every type against its definition, element by element, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quire.base.gguf_types import TYPES
from quire.weights.gguf_blocks import CHUNK_ELEMENTS, UNPACKERS, QuantizedRows
from tests.cases import each_case
from tests.gguf_quantizers import BLOCKS, drawn, quantized, scalar_values

KINDS = sorted(BLOCKS)


def rows_of(kind: str, raw: bytes, num_rows: int) -> QuantizedRows:
    block = next(known for known in TYPES.values() if known.name == kind)
    blocks = np.frombuffer(raw, np.uint8).reshape(num_rows, -1, block.block_bytes)
    return QuantizedRows(type=block, blocks=blocks)


def test_every_supported_type_is_covered() -> None:
    assert set(UNPACKERS) == set(BLOCKS)
    for known in TYPES.values():
        if known.name in BLOCKS:
            block = BLOCKS[known.name]
            assert (known.code, known.block_size, known.block_bytes) == (
                block.code,
                block.size,
                block.num_bytes,
            )


@each_case("kind", KINDS)
def test_blocks_of_random_bits_match_the_definition(kind: str) -> None:
    raw = drawn(kind, 12, np.random.default_rng(len(kind)))
    size = BLOCKS[kind].num_bytes
    right = [scalar_values(kind, raw[at : at + size]) for at in range(0, len(raw), size)]
    found = rows_of(kind, raw, 3).to_f32()
    expected = np.array(right, np.float32).reshape(3, -1)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@each_case("kind", KINDS)
def test_codes_scales_and_offsets_match_the_values(kind: str) -> None:
    raw = drawn(kind, 6, np.random.default_rng(5))
    rows = rows_of(kind, raw, 2)
    groups = rows.groups(slice(1, 2))
    assert groups.codes.dtype == np.int8
    size = groups.codes.shape[2]
    assert groups.codes.shape[1] * size == BLOCKS[kind].size
    for at in np.ndindex(groups.codes.shape):
        value = np.float32(groups.codes[at]) * groups.scales[at[:2]]
        if groups.offsets is not None:
            value = value + groups.offsets[at[:2]]
        block, group, element = at
        column = block * BLOCKS[kind].size + group * size + element
        assert value == rows.to_f32(slice(1, 2))[0, column]


@each_case("kind", KINDS)
def test_quantized_values_are_near_the_originals(kind: str) -> None:
    values = np.random.default_rng(8).standard_normal((5, 512)).astype(np.float32)
    found = rows_of(kind, quantized(values, kind), 5).to_f32()
    bits = int(kind[1])
    assert np.abs(found - values).max() < 8.0 / 2**bits
    assert np.abs(found - values).mean() < 2.0 / 2**bits


def test_a_slice_of_rows_and_a_matrix_of_many_chunks_are_equal() -> None:
    num_rows = CHUNK_ELEMENTS // 4096 * 2 + 3
    raw = drawn("Q4_0", num_rows * 128, np.random.default_rng(0))
    rows = rows_of("Q4_0", raw, num_rows)
    whole = rows.to_f32()
    np.testing.assert_array_equal(whole[[0, 511, 512, 1023, -1]], np.concatenate(
        [rows.to_f32(slice(at, at + 1)) for at in (0, 511, 512, 1023, num_rows - 1)]
    ))  # fmt: skip
    assert rows.to_f32(slice(5, 5)).shape == (0, 4096)


def test_non_finite_scales_follow_arithmetic(tmp_path: Path) -> None:
    infinite = np.array([np.inf], np.float16).tobytes() + bytes([0x88] * 16)  # codes of 0
    with np.errstate(all="raise"):
        assert np.isnan(rows_of("Q4_0", infinite, 1).to_f32()).all()

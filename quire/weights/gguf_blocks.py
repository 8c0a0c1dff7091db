"""Quantized blocks of GGUF, as stored and as numbers.

All supported types have the same structure with different bit layouts: a row is split into groups
of 16 or 32 elements, each with a scale and optionally an offset, and an element is `code * scale (+
offset)`. `unpack` returns these parts, so that an executor can keep the codes; `to_f32` multiplies
them out in float32, rounding the product once and the sum once, which is the formats' definition.
The result equals ggml's reference functions, compiled without contraction of product and sum, bit
for bit. Source of the layouts: ggml-common.h and ggml-quants.c (ggml-org/ggml).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.gguf_types import BlockType

Bytes = NDArray[np.uint8]
Float32s = NDArray[np.float32]
Int8s = NDArray[np.int8]
Ints = NDArray[Any]  # uint8; the type checker loses it in bit operations

# Elements converted at a time, to limit temporary memory.
CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Blocks as numbers: element e of group g is codes[..., g, e] * scales[..., g] + offsets.

    codes: int8 [blocks, groups, size]; scales: f32 [blocks, groups]; offsets: the same shape, or
    None.
    """

    codes: Int8s
    scales: Float32s
    offsets: Float32s | None = None

    def to_f32(self) -> Float32s:
        """Return the values, f32 [blocks, groups * size]."""
        with np.errstate(invalid="ignore", over="ignore"):
            values = self.codes.astype(np.float32) * self.scales[..., None]
            if self.offsets is not None:
                values += self.offsets[..., None]
        return values.reshape(len(self.codes), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """A quantized matrix as stored: blocks uint8 [rows, blocks per row, block bytes]."""

    type: BlockType
    blocks: Bytes

    @property
    def columns(self) -> int:
        """Return the number of elements in a row."""
        return int(self.blocks.shape[1]) * self.type.block_size

    def groups(self, rows: slice) -> Groups:
        """Return the groups of some rows; [rows * blocks per row, groups, size]."""
        part = self.blocks[rows]
        return unpack(self.type, part.reshape(-1, self.type.block_bytes))

    def to_f32(self, rows: slice = slice(None)) -> Float32s:
        """Return the values of some rows, f32 [rows, columns]."""
        first, last, _ = rows.indices(len(self.blocks))
        values = np.empty((max(0, last - first), self.columns), np.float32)
        step = max(1, CHUNK_ELEMENTS // max(1, self.columns))
        for start in range(first, last, step):
            some = self.groups(slice(start, min(start + step, last))).to_f32()
            values[start - first : start - first + step] = some.reshape(-1, self.columns)
        return values


def unpack(kind: BlockType, blocks: Bytes) -> Groups:
    """Unpack blocks [n, block bytes] of a type in UNPACKERS into codes, scales and offsets."""
    with np.errstate(invalid="ignore", over="ignore"):
        return UNPACKERS[kind.name](blocks)


def _halves(blocks: Bytes, at: int) -> Float32s:
    """Return the float16 at byte `at` of each block, f32 [n, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Ints:
    """Return the low halves of all bytes, then the high ones: [n, bytes] -> [n, 2 * bytes]."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Ints:
    """Return bit e of the 32 bits at byte `at`, as 16 or 0, for each element e: [n, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _one_group(codes: NDArray[Any]) -> Int8s:
    return codes.astype(np.int8)[:, None, :]


def _q4_0(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)
    return Groups(codes=_one_group(codes), scales=_halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Groups:
    codes = _one_group(_nibbles(blocks[:, 4:]))
    return Groups(codes=codes, scales=_halves(blocks, 0), offsets=_halves(blocks, 2))


def _q5_0(blocks: Bytes) -> Groups:
    codes = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.int8) - np.int8(16)
    return Groups(codes=_one_group(codes), scales=_halves(blocks, 0))


def _q5_1(blocks: Bytes) -> Groups:
    codes = _one_group(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4))
    return Groups(codes=codes, scales=_halves(blocks, 0), offsets=_halves(blocks, 2))


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(codes=_one_group(blocks[:, 2:].view(np.int8)), scales=_halves(blocks, 0))


def _two_bits(packed: Bytes) -> Ints:
    """Unpack two bits per element, lowest first, 128 elements per 32 bytes: [n, 4 * bytes]."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    runs: Ints = packed.reshape(len(packed), -1, 1, 32) >> shifts & 3
    return runs.reshape(len(packed), -1)


def _four_bits(packed: Bytes, run: int) -> Ints:
    """Return the low halves of each run of bytes, then the high ones: [n, 2 * bytes]."""
    return _nibbles(packed.reshape(len(packed), -1, run)).reshape(len(packed), -1)


def _bit_planes(packed: Bytes) -> Ints:
    """Return bit p of byte b as element 32 p + b: [n, 32] -> [n, 256]."""
    planes = np.arange(8, dtype=np.uint8)[:, None]
    return (packed[:, None, :] >> planes & 1).reshape(len(packed), -1)


def _scales_and_mins(packed: Bytes) -> tuple[Ints, Ints]:
    """Unpack eight 6-bit scales and eight minima from twelve bytes, as in Q4_K and Q5_K."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, high & 15 | (low >> 6) << 4), axis=1)
    minima = np.concatenate((middle & 63, high >> 4 | (middle >> 6) << 4), axis=1)
    return scales, minima


def _with_minima(codes: Ints, blocks: Bytes, scales: Ints, minima: Ints, at: int) -> Groups:
    """Return groups with two-level scales: small integers times the block's two float16s."""
    num_groups = scales.shape[1]
    return Groups(
        codes=codes.astype(np.int8).reshape(len(blocks), num_groups, -1),
        scales=_halves(blocks, at) * scales.astype(np.float32),
        offsets=-(_halves(blocks, at + 2) * minima.astype(np.float32)),
    )


def _q2_k(blocks: Bytes) -> Groups:
    both = blocks[:, 0:16]
    return _with_minima(_two_bits(blocks[:, 16:80]), blocks, both & 15, both >> 4, 80)


def _q3_k(blocks: Bytes) -> Groups:
    high = _bit_planes(blocks[:, 0:32])  # unset: 4 is subtracted
    codes = _two_bits(blocks[:, 32:96]).astype(np.int8) - ((high ^ 1) << 2).astype(np.int8)
    low = _nibbles(blocks[:, 96:104])
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top: Ints = blocks[:, None, 104:108] >> shifts & 3
    scales = (low | top.reshape(len(blocks), 16) << 4).astype(np.int8) - np.int8(32)
    return Groups(
        codes=codes.reshape(len(blocks), 16, 16),
        scales=_halves(blocks, 108) * scales.astype(np.float32),
    )


def _q4_k(blocks: Bytes) -> Groups:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    return _with_minima(_four_bits(blocks[:, 16:], 32), blocks, scales, minima, 0)


def _q5_k(blocks: Bytes) -> Groups:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    codes = _four_bits(blocks[:, 48:], 32) | _bit_planes(blocks[:, 16:48]) << 4
    return _with_minima(codes, blocks, scales, minima, 0)


def _q6_k(blocks: Bytes) -> Groups:
    low, high = _four_bits(blocks[:, 0:128], 64), _two_bits(blocks[:, 128:192])
    codes = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Groups(codes=codes.reshape(len(blocks), 16, 16), scales=_halves(blocks, 208) * scales)


UNPACKERS: Mapping[str, Callable[[Bytes], Groups]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)

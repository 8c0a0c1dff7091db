"""Quantize blocks for tests, and decode the formats one element at a time.

`quantized` writes rows of blocks. `scalar_values` reads one block in plain Python with each
operation rounded to float32, like ggml's reference functions (no vectors, no package code). `drawn`
makes blocks of random bits, which reach every code. The quantizers are simple (nearest code, scales
from extremes); they only have to use every field of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Codes = NDArray[np.int64]
Bytes = NDArray[np.uint8]
F = np.float32
MAX_BLOCKS = 1 << 14  # encoded at once, which bounds the memory
SHIFTS_OF_TWO = np.arange(0, 8, 2)


@dataclass(frozen=True, slots=True)
class Block:
    """A type: its number in a file, elements and bytes per block, and offsets of float16s."""

    code: int
    size: int
    num_bytes: int
    halves: tuple[int, ...]


BLOCKS = {
    "Q4_0": Block(2, 32, 18, (0,)),
    "Q4_1": Block(3, 32, 20, (0, 2)),
    "Q5_0": Block(6, 32, 22, (0,)),
    "Q5_1": Block(7, 32, 24, (0, 2)),
    "Q8_0": Block(8, 32, 34, (0,)),
    "Q2_K": Block(10, 256, 84, (80, 82)),
    "Q3_K": Block(11, 256, 110, (108,)),
    "Q4_K": Block(12, 256, 144, (0, 2)),
    "Q5_K": Block(13, 256, 176, (0, 2)),
    "Q6_K": Block(14, 256, 210, (208,)),
}


def drawn(kind: str, num_blocks: int, rng: np.random.Generator) -> bytes:
    """Draw blocks of random bits, except their float16s, which are finite and about 1."""
    block = BLOCKS[kind]
    raw = rng.integers(0, 256, (num_blocks, block.num_bytes), np.uint8)
    for at in block.halves:
        halves = rng.standard_normal((num_blocks, 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    return raw.tobytes()


# ---- decoding, by the definition


def _half(block: bytes, at: int) -> np.float32:
    return F(np.frombuffer(block, "<f2", 1, at)[0])


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _small(kind: str, block: bytes) -> list[np.float32]:
    """Decode the types of 32 elements."""
    d = _half(block, 0)
    if kind == "Q8_0":
        return [F(_signed(code)) * d for code in block[2:34]]
    has_min, has_fifth = kind[3] == "1", kind[1] == "5"
    at = 4 if has_min else 2
    fifth = int.from_bytes(block[at : at + 4], "little") if has_fifth else 0
    packed = block[at + 4 if has_fifth else at :]
    values = []
    for element in range(32):
        byte = packed[element % 16]
        code = (byte & 15) if element < 16 else byte >> 4
        code |= (fifth >> element & 1) << 4
        if has_min:
            values.append(F(F(code) * d) + _half(block, 2))
        else:
            values.append(F(code - (16 if has_fifth else 8)) * d)
    return values


def _scale_and_min(packed: bytes, group: int) -> tuple[int, int]:
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
    return scale, packed[group + 4] >> 4 | packed[group] >> 6 << 4


def _q2_k(block: bytes) -> list[np.float32]:
    d, least = _half(block, 80), _half(block, 82)
    values = []
    for element in range(256):
        both = block[element // 16]
        half, within = divmod(element, 128)
        code = block[16 + 32 * half + within % 32] >> 2 * (within // 32) & 3
        values.append(F(F(d * F(both & 15)) * F(code)) - F(least * F(both >> 4)))
    return values


def _q3_k(block: bytes) -> list[np.float32]:
    d = _half(block, 108)
    values = []
    for element in range(256):
        group, (half, within) = element // 16, divmod(element, 128)
        low = block[96 + group % 8] >> 4 * (group // 8) & 15
        high = block[104 + group % 4] >> 2 * (group // 4) & 3
        code = block[32 + 32 * half + within % 32] >> 2 * (within // 32) & 3
        if not block[element % 32] >> element // 32 & 1:
            code -= 4
        values.append(F(d * F((low | high << 4) - 32)) * F(code))
    return values


def _q45_k(block: bytes, *, has_fifth: bool) -> list[np.float32]:
    d, least, packed = _half(block, 0), _half(block, 2), block[4:16]
    values = []
    for element in range(256):
        group = element // 32
        byte = block[(48 if has_fifth else 16) + 32 * (group // 2) + element % 32]
        code = byte >> 4 if group % 2 else byte & 15
        if has_fifth:
            code |= (block[16 + element % 32] >> group & 1) << 4
        scale, offset = _scale_and_min(packed, group)
        values.append(F(F(d * F(scale)) * F(code)) - F(least * F(offset)))
    return values


def _q6_k(block: bytes) -> list[np.float32]:
    d = _half(block, 208)
    values = []
    for element in range(256):
        half, within = divmod(element, 128)
        byte = block[64 * half + within % 64]
        low = byte >> 4 if within >= 64 else byte & 15
        high = block[128 + 32 * half + within % 32] >> 2 * (within // 32) & 3
        scale = _signed(block[192 + element // 16])
        values.append(F(d * F(scale)) * F((low | high << 4) - 32))
    return values


def scalar_values(kind: str, block: bytes) -> list[np.float32]:
    """Return the values of one block."""
    readers: dict[str, Callable[[bytes], list[np.float32]]] = {
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": lambda block: _q45_k(block, has_fifth=False),
        "Q5_K": lambda block: _q45_k(block, has_fifth=True),
        "Q6_K": _q6_k,
    }
    return readers[kind](block) if kind in readers else _small(kind, block)


# ---- encoding, of all blocks [blocks, elements] at once


def quantized(values: Float32s, kind: str) -> bytes:
    """Quantize rows of blocks; the last dimension must be a multiple of the block."""
    writers: dict[str, Callable[[Float32s], Bytes]] = {
        "Q2_K": _to_q2_k, "Q3_K": _to_q3_k, "Q4_K": _to_q4_k, "Q5_K": _to_q5_k, "Q6_K": _to_q6_k,
    }  # fmt: skip
    runs = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCKS[kind].size)
    write = writers.get(kind) or partial(_to_small, kind)
    parts = (runs[at : at + MAX_BLOCKS] for at in range(0, len(runs), MAX_BLOCKS))
    return b"".join(write(part).tobytes() for part in parts)


def _stored_halves(values: Float64s) -> tuple[Bytes, Float64s]:
    """Return float16s as bytes [blocks, 2], and their values."""
    halves = values.astype(np.float16)
    return halves[:, None].view(np.uint8), halves.astype(np.float64)


def _codes(
    values: Float32s, scales: Float64s, low: int, high: int, offsets: Float64s | None = None
) -> Codes:
    """Return codes of values [..., elements], by scale and offset [...]."""
    scale = scales.astype(np.float32)[..., None]
    if offsets is not None:
        values = values - offsets.astype(np.float32)[..., None]
    scaled = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
    return np.clip(np.rint(scaled), low, high).astype(np.int64)


def _packed_nibbles(codes: Codes, run: int) -> Bytes:
    """Pack codes i and i + run of each 2 * run into a byte."""
    pairs = codes.reshape(len(codes), -1, 2, run) & 15
    return _bytes(pairs[:, :, 0] | pairs[:, :, 1] << 4)


def _bytes(values: Codes) -> Bytes:
    return values.reshape(len(values), -1).astype(np.uint8)


def _to_small(kind: str, runs: Float32s) -> Bytes:
    bits = int(kind[1])
    if kind[3] == "0":
        top = (1 << bits - 1) - 1
        head, scales = _stored_halves(np.abs(runs).max(1).astype(np.float64) / top)
        codes = _codes(runs, scales, -top - 1, top)
        if bits == 8:
            return np.hstack([head, _bytes(codes)])
        codes += top + 1
    else:
        spans = (runs.max(1) - runs.min(1)).astype(np.float64)
        head, scales = _stored_halves(spans / ((1 << bits) - 1))
        least, offsets = _stored_halves(runs.min(1).astype(np.float64))
        head = np.hstack([head, least])
        codes = _codes(runs, scales, 0, (1 << bits) - 1, offsets)
    fifths = np.packbits((codes >> 4).astype(np.bool_), axis=1, bitorder="little")
    parts = [head, fifths] if bits == 5 else [head]
    return np.hstack([*parts, _packed_nibbles(codes, 16)])


def _groups_with_minima(
    runs: Float32s, size: int, bits: int, scale_bits: int
) -> tuple[Bytes, Codes, Codes, Codes]:
    """Return the two float16s, a small scale and minimum per group, and the codes."""
    groups = runs.reshape(len(runs), -1, size)
    top, most = (1 << bits) - 1, (1 << scale_bits) - 1
    least = np.maximum(0.0, -groups.min(2).astype(np.float64))
    scales = (groups.max(2).astype(np.float64) + least) / top
    d_raw, d = _stored_halves(np.maximum(scales.max(1), 1e-6) / most)
    min_raw, min_unit = _stored_halves(np.maximum(least.max(1), 1e-6) / most)
    small = np.clip(np.rint(scales / d[:, None]), 0, most)
    minima = np.minimum(most, np.rint(least / min_unit[:, None]))
    codes = _codes(groups, d[:, None] * small, 0, top, -min_unit[:, None] * minima)
    halves = np.hstack([d_raw, min_raw])
    return halves, small.astype(np.int64), minima.astype(np.int64), codes.reshape(runs.shape)


def _packed_two_bits(codes: Codes) -> Bytes:
    """Pack codes 32 apart into a byte, four of each 128."""
    places = codes.reshape(len(codes), 2, 4, 32) & 3
    return _bytes((places << SHIFTS_OF_TWO[:, None]).sum(2))


def _planes(bits: Codes) -> Bytes:
    """Return bit planes: bit p of byte b belongs to element 32 p + b."""
    return _bytes((bits.reshape(len(bits), 8, 32) << np.arange(8)[:, None]).sum(1))


def _packed_scales(scales: Codes, minima: Codes) -> Bytes:
    low, middle = (part[:, :4] & 63 | part[:, 4:] >> 4 << 6 for part in (scales, minima))
    high = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return _bytes(np.hstack([low, middle, high]))


def _to_q2_k(runs: Float32s) -> Bytes:
    halves, scales, minima, codes = _groups_with_minima(runs, 16, 2, 4)
    return np.hstack([_bytes(scales | minima << 4), _packed_two_bits(codes), halves])


def _to_q4_k(runs: Float32s) -> Bytes:
    halves, scales, minima, codes = _groups_with_minima(runs, 32, 4, 6)
    return np.hstack([halves, _packed_scales(scales, minima), _packed_nibbles(codes, 32)])


def _to_q5_k(runs: Float32s) -> Bytes:
    halves, scales, minima, codes = _groups_with_minima(runs, 32, 5, 6)
    head = [halves, _packed_scales(scales, minima), _planes(codes >> 4)]
    return np.hstack([*head, _packed_nibbles(codes, 32)])


def _signed_groups(runs: Float32s, bits: int, scale_bits: int) -> tuple[Bytes, Codes, Codes]:
    """Return the float16, a signed scale per group of 16, and codes from 0."""
    groups, top = runs.reshape(len(runs), -1, 16), 1 << bits - 1
    most = (1 << scale_bits - 1) - 1
    largest = np.abs(groups).argmax(2)[:, :, None]
    peaks = np.take_along_axis(groups, largest, 2)[:, :, 0].astype(np.float64) / -top
    raw, d = _stored_halves(np.maximum(np.abs(peaks).max(1), 1e-6) / most)
    scales = np.clip(np.rint(peaks / d[:, None]), -most - 1, most)
    codes = _codes(groups, d[:, None] * scales, -top, top - 1) + top
    return raw, scales.astype(np.int64), codes.reshape(runs.shape)


def _to_q3_k(runs: Float32s) -> Bytes:
    raw, scales, codes = _signed_groups(runs, 3, 6)
    moved = scales + 32
    low = moved[:, :8] & 15 | (moved[:, 8:] & 15) << 4
    high = (moved.reshape(-1, 4, 4) >> 4 << SHIFTS_OF_TWO[:, None]).sum(1)
    parts = [_planes(codes >> 2), _packed_two_bits(codes), _bytes(low), _bytes(high), raw]
    return np.hstack(parts)


def _to_q6_k(runs: Float32s) -> Bytes:
    raw, scales, codes = _signed_groups(runs, 6, 8)
    low, high = _packed_nibbles(codes, 64), _packed_two_bits(codes >> 4)
    return np.hstack([low, high, _bytes(scales), raw])

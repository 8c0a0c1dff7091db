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
F = np.float32


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


# ---- encoding


def quantized(values: Float32s, kind: str) -> bytes:
    """Quantize rows of blocks; the last dimension must be a multiple of the block."""
    writers: dict[str, Callable[[Float32s], bytes]] = {
        "Q2_K": _to_q2_k, "Q3_K": _to_q3_k, "Q4_K": _to_q4_k, "Q5_K": _to_q5_k, "Q6_K": _to_q6_k,
    }  # fmt: skip
    size = BLOCKS[kind].size
    runs = np.ascontiguousarray(values, np.float32).reshape(-1, size)
    write = writers.get(kind) or partial(_to_small, kind)
    written: dict[bytes, bytes] = {}  # large weights repeat values (see tiny_models)
    blocks = []
    for run in runs:
        content = run.tobytes()
        if content not in written:
            written[content] = write(run)
        blocks.append(written[content])
    return b"".join(blocks)


def _stored_half(value: float) -> tuple[bytes, float]:
    half = np.float16(value)
    return half.tobytes(), float(half)


def _codes(values: Float32s, scale: float, low: int, high: int, offset: float = 0.0) -> list[int]:
    if scale == 0:
        return [max(low, 0)] * len(values)
    return [int(code) for code in np.clip(np.rint((values - offset) / scale), low, high)]


def _packed_nibbles(codes: list[int], run: int) -> bytes:
    """Pack codes i and i + run of each 2 * run into a byte."""
    return bytes(
        codes[start + at] & 15 | (codes[start + run + at] & 15) << 4
        for start in range(0, len(codes), 2 * run)
        for at in range(run)
    )


def _to_small(kind: str, run: Float32s) -> bytes:
    bits = int(kind[1])
    if kind[3] == "0":
        top = (1 << bits - 1) - 1
        raw, scale = _stored_half(float(np.abs(run).max()) / top)
        codes = _codes(run, scale, -top - 1, top)
        if bits == 8:
            return raw + np.array(codes, np.int8).tobytes()
        codes, head = [code + top + 1 for code in codes], raw
    else:
        raw, scale = _stored_half(float(run.max() - run.min()) / ((1 << bits) - 1))
        least, offset = _stored_half(float(run.min()))
        codes, head = _codes(run, scale, 0, (1 << bits) - 1, offset), raw + least
    if bits == 5:
        head += sum((code >> 4) << place for place, code in enumerate(codes)).to_bytes(4, "little")
    return head + _packed_nibbles(codes, 16)


def _groups_with_minima(
    run: Float32s, size: int, bits: int, scale_bits: int
) -> tuple[bytes, list[int], list[int], list[int]]:
    """Return the two float16s, a small scale and minimum per group, and the codes."""
    groups = run.reshape(-1, size)
    top, most = (1 << bits) - 1, (1 << scale_bits) - 1
    spans = [(max(0.0, -float(group.min())), group) for group in groups]
    scales = [(float(group.max()) + least) / top for least, group in spans]
    d_raw, d = _stored_half(max(*scales, 1e-6) / most)
    min_raw, min_unit = _stored_half(max(*(least for least, _ in spans), 1e-6) / most)
    small = [min(most, max(0, round(scale / d))) for scale in scales]
    minima = [min(most, round(least / min_unit)) for least, _ in spans]
    codes: list[int] = []
    for scale, minimum, group in zip(small, minima, groups, strict=True):
        codes += _codes(group, d * scale, 0, top, -min_unit * minimum)
    return d_raw + min_raw, small, minima, codes


def _packed_two_bits(codes: list[int]) -> bytes:
    """Pack codes 32 apart into a byte, four of each 128."""
    return bytes(
        sum((codes[half + at + 32 * place] & 3) << 2 * place for place in range(4))
        for half in range(0, 256, 128)
        for at in range(32)
    )


def _planes(bits: list[int]) -> bytes:
    """Return bit planes: bit p of byte b belongs to element 32 p + b."""
    return bytes(sum(bits[32 * place + at] << place for place in range(8)) for at in range(32))


def _packed_scales(scales: list[int], minima: list[int]) -> bytes:
    low = bytes(scales[at] & 63 | scales[at + 4] >> 4 << 6 for at in range(4))
    middle = bytes(minima[at] & 63 | minima[at + 4] >> 4 << 6 for at in range(4))
    return low + middle + bytes(scales[at] & 15 | (minima[at] & 15) << 4 for at in range(4, 8))


def _to_q2_k(run: Float32s) -> bytes:
    halves, scales, minima, codes = _groups_with_minima(run, 16, 2, 4)
    both = bytes(scale | least << 4 for scale, least in zip(scales, minima, strict=True))
    return both + _packed_two_bits(codes) + halves


def _to_q4_k(run: Float32s) -> bytes:
    halves, scales, minima, codes = _groups_with_minima(run, 32, 4, 6)
    return halves + _packed_scales(scales, minima) + _packed_nibbles(codes, 32)


def _to_q5_k(run: Float32s) -> bytes:
    halves, scales, minima, codes = _groups_with_minima(run, 32, 5, 6)
    head = halves + _packed_scales(scales, minima)
    return head + _planes([code >> 4 for code in codes]) + _packed_nibbles(codes, 32)


def _signed_groups(run: Float32s, bits: int, scale_bits: int) -> tuple[bytes, list[int], list[int]]:
    """Return the float16, a signed scale per group of 16, and codes from 0."""
    groups, top = run.reshape(-1, 16), 1 << bits - 1
    most = (1 << scale_bits - 1) - 1
    peaks = [float(group[np.abs(group).argmax()]) / -top for group in groups]
    raw, d = _stored_half(max(*(abs(peak) for peak in peaks), 1e-6) / most)
    scales = [max(-most - 1, min(most, round(peak / d))) for peak in peaks]
    codes: list[int] = []
    for scale, group in zip(scales, groups, strict=True):
        codes += [code + top for code in _codes(group, d * scale, -top, top - 1)]
    return raw, scales, codes


def _to_q3_k(run: Float32s) -> bytes:
    raw, scales, codes = _signed_groups(run, 3, 6)
    moved = [scale + 32 for scale in scales]
    low = bytes(moved[at] & 15 | (moved[at + 8] & 15) << 4 for at in range(8))
    high = bytes(
        sum(moved[at + 4 * place] >> 4 << 2 * place for place in range(4)) for at in range(4)
    )
    return _planes([code >> 2 for code in codes]) + _packed_two_bits(codes) + low + high + raw


def _to_q6_k(run: Float32s) -> bytes:
    raw, scales, codes = _signed_groups(run, 6, 8)
    low = _packed_nibbles(codes, 64)
    high = _packed_two_bits([code >> 4 for code in codes])
    return low + high + np.array(scales, np.int8).tobytes() + raw

"""Plain twins of the native calls that digest chains of blocks; tests compare the two.

What a digest is: chain.py.
"""

from __future__ import annotations

import struct

import numpy as np

from quire.cache.chain import Uint64s
from quire.cache.table import Int32s

_MASK = (1 << 64) - 1


def siphash128(message: bytes, key: bytes) -> tuple[int, int]:
    """Return SipHash-2-4 with 128-bit output: two integers, low half first."""
    k0, k1 = struct.unpack("<QQ", key)
    state = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]
    whole = len(message) // 8 * 8
    tail = int.from_bytes(message[whole:], "little") | (len(message) & 0xFF) << 56
    for word in (*struct.unpack(f"<{whole // 8}Q", message[:whole]), tail):
        state[3] ^= word
        _rounds(state, 2)
        state[0] ^= word
    state[2] ^= 0xEE
    _rounds(state, 4)
    low = state[0] ^ state[1] ^ state[2] ^ state[3]
    state[1] ^= 0xDD
    _rounds(state, 4)
    return low, state[0] ^ state[1] ^ state[2] ^ state[3]


def hash_chains(
    token_ids: list[Int32s], seeds: list[Uint64s], block_size: int, key: bytes
) -> Uint64s:
    """See HashChains."""
    digests: list[tuple[int, int]] = []
    for tokens, seed in zip(token_ids, seeds, strict=True):
        chain = (int(seed[0]), int(seed[1]))
        for end in range(block_size, len(tokens) + 1, block_size):
            part = tokens[end - block_size : end]
            message = struct.pack("<QQ", *chain) + part.astype("<i4").tobytes()
            chain = siphash128(message, key)
            digests.append(chain)
    return np.array(digests, np.uint64).reshape(-1, 2)


def _rounds(state: list[int], count: int) -> None:
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 = (v0 + v1) & _MASK
        v1 = _rotate(v1, 13) ^ v0
        v0 = _rotate(v0, 32)
        v2 = (v2 + v3) & _MASK
        v3 = _rotate(v3, 16) ^ v2
        v0 = (v0 + v3) & _MASK
        v3 = _rotate(v3, 21) ^ v0
        v2 = (v2 + v1) & _MASK
        v1 = _rotate(v1, 17) ^ v2
        v2 = _rotate(v2, 32)
    state[:] = v0, v1, v2, v3


def _rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK

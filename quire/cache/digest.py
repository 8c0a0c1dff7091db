"""Digests of chains of full blocks, and the Python twin of the native call that makes them.

The digest of a block is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012, and the
authors' reference code for the wide output) over the digest of the block before it followed by the
block's token ids as little-endian int32. The digest before the first block is that of what makes
the keys and values (the model's fingerprint) and of the cache salt. The key is secret and drawn per
process, so that colliding prompts cannot be crafted; the fixed key is for tests.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Uint64s = NDArray[np.uint64]

SipHash = Callable[[bytes, bytes], tuple[int, int]]

DIGEST_BYTES = 16
FIXED_KEY = bytes(range(16))

_MASK = (1 << 64) - 1


class HashChains(Protocol):
    """The call that digests many chains at once; `hash_chains` below and quire._native have it."""

    def __call__(
        self, token_ids: list[Int32s], seeds: list[Uint64s], block_size: int, key: bytes
    ) -> Uint64s:
        """Return digests of the full blocks of token_ids[i], a chain that starts at seeds[i].

        uint64 [number of blocks of all, 2], one chain after another.
        """


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
    """See HashChains; the Python twin."""
    digests: list[tuple[int, int]] = []
    for tokens, seed in zip(token_ids, seeds, strict=True):
        chain = (int(seed[0]), int(seed[1]))
        for end in range(block_size, len(tokens) + 1, block_size):
            part = tokens[end - block_size : end]
            message = struct.pack("<QQ", *chain) + part.astype("<i4").tobytes()
            chain = siphash128(message, key)
            digests.append(chain)
    return np.array(digests, np.uint64).reshape(-1, 2)


def seed_of(
    salt: str, key: bytes, siphash: SipHash = siphash128, *, fingerprint: str = ""
) -> Uint64s:
    """Return the digest before the first block, uint64 [2].

    Chains of different salts, and those of different models, never meet.
    """
    message = f"{fingerprint}\0{salt}".encode("utf-8", "surrogatepass")
    return np.array(siphash(message, key), np.uint64)


def keys_of(digests: Uint64s) -> tuple[bytes, ...]:
    """Return the digests [N, 2] as dictionary keys."""
    return struct.unpack(f"{DIGEST_BYTES}s" * len(digests), np.ascontiguousarray(digests).tobytes())


def digests_of(keys: Sequence[bytes]) -> Uint64s:
    """Return the digests that keys_of made keys of."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)


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

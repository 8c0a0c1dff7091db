"""Digests of chains of full blocks: what they are, and as dictionary keys.

The digest of a block is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012, and the
authors' reference code for the wide output) over the digest of the block before it followed by the
block's token ids as little-endian int32. The digest before the first block is that of what makes
the keys and values (the model's fingerprint) and of the cache salt. The key is secret and drawn per
process, so that colliding prompts cannot be crafted; the fixed key is for tests.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire._native import siphash128

Int32s = NDArray[np.int32]
Uint64s = NDArray[np.uint64]

DIGEST_BYTES = 16
FIXED_KEY = bytes(range(16))


class HashChains(Protocol):
    """The call that digests many chains at once; quire._native and plain_digest.py have it."""

    def __call__(
        self, token_ids: list[Int32s], seeds: list[Uint64s], block_size: int, key: bytes
    ) -> Uint64s:
        """Return digests of the full blocks of token_ids[i], a chain that starts at seeds[i].

        uint64 [number of blocks of all, 2], one chain after another.
        """


def seed_of(salt: str, key: bytes, *, fingerprint: str = "") -> Uint64s:
    """Return the digest before the first block, uint64 [2].

    Chains of different salts, and those of different models, never meet.
    """
    message = f"{fingerprint}\0{salt}".encode("utf-8", "surrogatepass")
    return np.array(siphash128(message, key), np.uint64)


def keys_of(digests: Uint64s) -> tuple[bytes, ...]:
    """Return the digests [N, 2] as dictionary keys."""
    return struct.unpack(f"{DIGEST_BYTES}s" * len(digests), np.ascontiguousarray(digests).tobytes())


def digests_of(keys: Sequence[bytes]) -> Uint64s:
    """Return the digests that keys_of made keys of."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)

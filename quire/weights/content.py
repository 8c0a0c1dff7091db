"""WeightsDigest: a digest of all bytes of a model's tensors.

Executors add each tensor while reading it. Invariant: the digest depends on names, stored dtypes,
shapes and every byte, but not on the order of adding, on the files that hold the tensors, or on the
executor. (Without the compiled module another hash is used and the digest differs; equal digests
still mean equal content.)
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from quire.weights.safetensors import StoredTensor


class WeightsDigest:
    """Collect the digests of tensors by name; a tensor used twice counts once."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, tensor: StoredTensor, content: tuple[int, int] | None = None) -> None:
        """Add a tensor. content: the result of `Weight.fill` for all of it; else computed here."""
        low, high = content or content_digest(tensor.raw)
        self._lines[tensor.name] = f"{tensor.dtype} {list(tensor.shape)} {low:016x}{high:016x}"

    def holds(self, tensor: StoredTensor) -> bool:
        """Return whether the tensor was added."""
        return tensor.name in self._lines

    def hexdigest(self) -> str:
        """Return the digest of all added tensors, 32 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._lines):
            digest.update(f"{name}\0{self._lines[name]}\0".encode())
        return digest.hexdigest()


def content_digest(raw: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the 128-bit digest of a tensor's bytes as (low, high)."""
    try:
        from quire import _native  # missing in installations with PyTorch only
    except ImportError:
        hashed = hashlib.blake2b(raw.data, digest_size=16).digest()
        return int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:], "little")
    return _native.content_digest(raw)

"""WeightsDigest: what the tensors hold, to the last byte, in one line of text.

Executors add each tensor while they read it anyway. Always holds: the digest depends on names,
stored dtypes, shapes and every byte; not on the order of adding, on the files that hold the
tensors or on who read them. (Where the compiled module is missing another hash is taken, and the
digest differs: it never says that two things are the same which are not.)
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from quire.weights.safetensors import StoredTensor


class WeightsDigest:
    """Collects tensors' digests by name; a tensor that is used twice counts once."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, tensor: StoredTensor, content: tuple[int, int] | None = None) -> None:
        """`content`: what `Weight.fill` returned for all of `tensor.raw`; else it is read here."""
        low, high = content or content_digest(tensor.raw)
        self._lines[tensor.name] = f"{tensor.dtype} {list(tensor.shape)} {low:016x}{high:016x}"

    def holds(self, tensor: StoredTensor) -> bool:
        """Was the tensor added before?"""
        return tensor.name in self._lines

    def hexdigest(self) -> str:
        """32 hexadecimal digits over all that was added."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._lines):
            digest.update(f"{name}\0{self._lines[name]}\0".encode())
        return digest.hexdigest()


def content_digest(raw: NDArray[np.uint8]) -> tuple[int, int]:
    """Of a tensor's bytes."""
    try:
        from quire import _native  # not where only PyTorch is there to compute with
    except ImportError:
        hashed = hashlib.blake2b(raw.data, digest_size=16).digest()
        return int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:], "little")
    return _native.content_digest(raw)

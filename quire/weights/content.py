"""WeightsDigest: a digest of all bytes of a model's tensors.

Executors add each tensor while reading it. Invariant: the digest depends on names, stored dtypes,
shapes and every byte, but not on the order of adding, on the files that hold the tensors, or on the
executor. (Without the compiled module another hash is used and the digest differs; equal digests
still mean equal content.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.weights.checkpoint import Checkpoint
from quire.weights.safetensors import StoredTensor

SAMPLE_BYTES = 64  # of each tensor


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
        return _digest_of(self._lines)

    def text(self, *, is_part: bool) -> str:
        """Return hexdigest(); for a part of a model what `joined_digest` takes."""
        if not is_part:
            return self.hexdigest()
        return json.dumps(self._lines, sort_keys=True)


def joined_digest(parts: Sequence[str]) -> str:
    """Return the digest of a model by the texts of its parts. Raises WeightsError where two of them
    have read different bytes of one tensor."""
    lines: dict[str, str] = {}
    for part in parts:
        for name, line in json.loads(part).items():
            if lines.setdefault(name, line) != line:
                raise WeightsError(
                    f"{name} was read twice and has changed in between; start again, from files "
                    "that nothing writes to"
                )
    return _digest_of(lines)


def content_sample(checkpoint: Checkpoint) -> str:
    """Return a digest of a few bytes in the middle of each tensor: what ranks compare that read
    different tensors of a model, which other weights almost surely change."""
    lines = {}
    for name in checkpoint.names:
        tensor = checkpoint.content(name)
        raw = tensor.raw.reshape(-1).view(np.uint8)
        some = raw[len(raw) // 2 :][:SAMPLE_BYTES].tobytes().hex()
        lines[name] = f"{tensor.dtype} {list(tensor.shape)} {some}"
    return _digest_of(lines)


def _digest_of(lines: Mapping[str, str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(lines):
        digest.update(f"{name}\0{lines[name]}\0".encode())
    return digest.hexdigest()


def content_digest(raw: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the 128-bit digest of a tensor's bytes as (low, high)."""
    try:
        from quire import _native  # missing in installations with PyTorch only
    except ImportError:
        hashed = hashlib.blake2b(raw.data, digest_size=16).digest()
        return int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:], "little")
    return _native.content_digest(raw)

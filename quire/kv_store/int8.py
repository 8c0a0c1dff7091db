"""int8 transfer: blocks of a bf16 cache as 8-bit integers with a scale for each head's vector.

Half the bytes travel, and other values come back: a fetched block differs from a computed one. So
the scheme is never a default, and its name is part of the fingerprint of all blocks of an engine
that uses it (quire/engine/assembly/kv_store.py): engines with and without it share nothing. Knows
no store. A vector is `width` values that lie one after another in a block.

    payload  a scale (f32) for each vector, then a signed byte for each value
    value    rounded to the nearest of 255 multiples of scale = max |value| / 127
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Float32s = NDArray[np.float32]

SCALE_BYTES = 4
_MOST = np.float32(127.0)


class Int8Encoding:
    """Encodes blocks of block_bytes, bf16 throughout, in vectors of `width` values."""

    number = 1
    name = "int8"

    def __init__(self, block_bytes: int, width: int) -> None:
        if width < 1 or block_bytes % (2 * width):
            raise ValueError(
                f"a block of {block_bytes} bytes has no vectors of {width} bf16 values"
            )
        self._width = width
        self._num_vectors = block_bytes // (2 * width)
        self.payload_bytes = self._num_vectors * (SCALE_BYTES + width)

    def encode(self, raw: Bytes, out: Bytes) -> bool:
        """Fill `out` with the payload of a block; return False for one that is not finite."""
        values = _from_bf16(raw.view(np.uint16)).reshape(self._num_vectors, self._width)
        largest: Float32s = np.abs(values).max(axis=1)
        if not np.isfinite(largest).all():
            return False
        scales = largest / _MOST
        inverse = np.divide(_MOST, largest, out=np.zeros_like(largest), where=largest > 0)
        if not np.isfinite(inverse).all():  # the inverse of subnormal values
            return False
        first = self._num_vectors * SCALE_BYTES
        out[:first].view(np.float32)[:] = scales
        whole = np.rint(values * inverse[:, None]).clip(-_MOST, _MOST)
        out[first:].view(np.int8)[:] = whole.astype(np.int8).reshape(-1)
        return True

    def decode(self, payload: Bytes, out: Bytes) -> None:
        """Fill `out` with the block that a payload stands for."""
        first = self._num_vectors * SCALE_BYTES
        scales = payload[:first].view(np.float32)
        whole = payload[first:].view(np.int8).reshape(self._num_vectors, self._width)
        values = whole.astype(np.float32) * scales[:, None]
        out.view(np.uint16)[:] = _to_bf16(values).reshape(-1)


def _from_bf16(bits: NDArray[np.uint16]) -> Float32s:
    wide = bits.astype(np.uint32) << np.uint32(16)
    found: Float32s = wide.view(np.float32)
    return found


def _to_bf16(values: Float32s) -> NDArray[np.uint16]:
    """Round finite values to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(
        np.uint16
    )
    return rounded

"""The checksum of a block on its way: 64 bits over every byte, at the speed of memory.

Detects bits that links or memory have changed, not deliberate changes: connections are
authenticated (handshake.py). Always holds: both sides compute the same, whatever the machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire import _native


def checksum_of(raw: NDArray[np.uint8]) -> int:
    """Return the checksum of contiguous bytes; other threads go on meanwhile."""
    low, _ = _native.content_digest(raw)
    return low


def copied(raw: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    """Copy contiguous bytes; return the checksum of what `out` has now.

    Bytes are read once, so that another process may change them meanwhile. Other threads go on.
    """
    low, _ = _native.copy_digest(raw, out)
    return low

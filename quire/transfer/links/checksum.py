"""The checksum of a block on its way: 64 bits over every byte, at the speed of memory.

Against links and memory that change bits, not against anyone: connections are authenticated
(handshake.py). Always holds: both sides compute the same, whatever the machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire import _native


def checksum_of(raw: NDArray[np.uint8]) -> int:
    """Return the checksum of contiguous bytes; other threads go on meanwhile."""
    low, _ = _native.content_digest(raw)
    return low

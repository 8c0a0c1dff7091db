"""BlockCopies: KV blocks on their way from tier to tier, and what became of them.

The one verb for blocks that leave or enter the pool: `from_tiers[i]` block `from_blocks[i]` to
`to_tiers[i]` block `to_blocks[i]`. A plan names the copies, the runner makes them beside the steps
and reports each that has ended. Numbers and arrays of numbers only, like the other records.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Uint64s = NDArray[np.uint64]
Bools = NDArray[np.bool_]


class Tier(IntEnum):
    """Where a block lies. HOST: memory of the host, where the pool is in a device's; on a CPU it is
    the pool's own."""

    POOL = 0
    DISK = 1
    HOST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopies:
    """C copies. digests [C, 2]: of the chain that ends in the block (quire.cache.chain); the tier
    keeps it with the bytes, and gives no other bytes out for it."""

    from_tiers: Int32s
    from_blocks: Int32s
    to_tiers: Int32s
    to_blocks: Int32s
    digests: Uint64s

    def __len__(self) -> int:
        """How many."""
        return len(self.from_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesEnded:
    """Copies that have ended, in the order in which they did, since this was asked last.

    arrived[i]: whether the block is there whole; where not, its content must be had otherwise.
    num_bad: blocks read back with other bytes than saved. fetched, saved: how many of them
    came from and went to a tier, and the milliseconds that took. broken: the tier is out of use
    from now on.
    """

    to_tiers: Int32s
    to_blocks: Int32s
    arrived: Bools
    num_bad: int = 0
    fetched: int = 0
    fetch_ms: float = 0.0
    saved: int = 0
    save_ms: float = 0.0
    broken: bool = False


def joined(parts: list[BlockCopies]) -> BlockCopies | None:
    """Return all copies in one record, in order; None for none."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return BlockCopies(
        from_tiers=np.concatenate([part.from_tiers for part in parts]),
        from_blocks=np.concatenate([part.from_blocks for part in parts]),
        to_tiers=np.concatenate([part.to_tiers for part in parts]),
        to_blocks=np.concatenate([part.to_blocks for part in parts]),
        digests=np.concatenate([part.digests for part in parts]),
    )


def between(
    source: Tier, from_blocks: Int32s, target: Tier, to_blocks: Int32s, keys: list[bytes]
) -> BlockCopies:
    """Return copies all of one kind; keys are the digests as bytes."""
    count = len(from_blocks)
    return BlockCopies(
        from_tiers=np.full(count, source, np.int32),
        from_blocks=from_blocks,
        to_tiers=np.full(count, target, np.int32),
        to_blocks=to_blocks,
        digests=np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2),
    )

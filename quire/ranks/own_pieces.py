"""OwnPieces: where the positions of a step are in the memory of one rank under context parallelism.

The engine allocates blocks of `ranks` pieces (256 positions each). Rank r has piece r of each such
block: its pool has as many positions as all its pieces together, in smaller blocks, and a block b
of the engine is the run of these from b * 256 / block_size on. Knows no executor and no process.
Always holds: each position is on exactly one rank; a batch keeps its rows, and only slots and
tables change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.program.batch import CacheRows, ForwardBatch, Int32s
from quire.program.declarations import PIECE_POSITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPieces:
    """Of one rank. block_size: positions of a block in its pool; it divides a piece."""

    ranks: int
    rank: int
    block_size: int

    @property
    def engine_block_size(self) -> int:
        """Positions of a block that the engine allocates."""
        return self.ranks * PIECE_POSITIONS

    @property
    def blocks_of_each(self) -> int:
        """Blocks of this rank's pool for each block of the engine."""
        return PIECE_POSITIONS // self.block_size

    def blocks(self, engine_blocks: Int32s) -> Int32s:
        """Return the blocks of this rank's pool, those of each block in order."""
        first = engine_blocks[:, None] * np.int32(self.blocks_of_each)
        within = np.arange(self.blocks_of_each, dtype=np.int32)
        return (first + within).reshape(-1)

    def batch(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a step with this rank's slots and tables."""
        return replace(batch, caches=tuple(map(self._rows, batch.caches)))

    def _rows(self, cache: CacheRows) -> CacheRows:
        block, within = np.divmod(cache.kv_slots, np.int32(self.engine_block_size))
        piece, position = np.divmod(within, np.int32(PIECE_POSITIONS))
        slots = block * np.int32(PIECE_POSITIONS) + position
        is_own = (piece == self.rank) & (cache.kv_slots >= 0)
        sequences, columns = cache.block_tables.shape
        # A column for each block of this rank's size; those of other ranks are not read.
        tables = np.zeros((sequences, columns, self.ranks, self.blocks_of_each), np.int32)
        own = self.blocks(cache.block_tables.reshape(-1))
        tables[:, :, self.rank] = own.reshape(sequences, columns, self.blocks_of_each)
        return CacheRows(
            kv_slots=np.where(is_own, slots, np.int32(-1)),
            block_tables=tables.reshape(sequences, -1),
        )

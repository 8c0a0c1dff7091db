"""Forks: slots that begin with the tokens of others, for n > 1 and beams.

Full blocks are shared; a partial last block is copied, because the next token of each is written
there. Knows slots, blocks and chains; not why a slot is forked. Always holds: a fork's chain
continues that of its source, so that its blocks can be found under the same digests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.block_operations import BlockOperations
from quire.cache.chain import NO_DIGESTS, SlotChains
from quire.cache.prefix_index import PrefixIndex
from quire.cache.table import BlockTable, Int32s

# Columns of a slot that count as offered to the index where nothing of it may be found.
ALL_COLUMNS = np.iinfo(np.int32).max
NO_BLOCKS: Int32s = np.empty(0, np.int32)


class Forks:
    """Forks slots of `tables`. take_blocks: allocates blocks for no slot."""

    def __init__(
        self,
        tables: BlockTable,
        chains: SlotChains,
        index: PrefixIndex,
        operations: BlockOperations,
        take_blocks: Callable[[int], Int32s],
    ) -> None:
        self._tables, self._chains, self._index = tables, chains, index
        self._operations, self._take_blocks = operations, take_blocks
        self._block_size = tables.block_size

    def fork(self, source: int, slot: int, num_tokens: int) -> tuple[Int32s, Int32s]:
        """Make an empty slot begin with the first `num_tokens` tokens of `source`.

        Full blocks are shared. A partial last block is copied at once, because the fork's next
        token goes into it. Returns (copy_from, copy_to), each of one block or none. The block
        copied from must stay as it is until the step that copies has ended: hold() it.
        """
        full, end = num_tokens // self._block_size, -(-num_tokens // self._block_size)
        first, row = int(self._tables.firsts[source]), self._tables.blocks[source]
        shared, partial = row[first:full].copy(), row[full:end].copy()
        self._inherit_chain(slot, source, shared, full)
        self._operations.share(shared)
        own = self._take_blocks(len(partial))
        self._tables.begin(slot, first)
        self._tables.append(slot, np.concatenate((shared, own)))
        return partial, own

    def branch(
        self,
        sources: Sequence[int],
        slots: Sequence[int],
        num_tokens: int,
        *,
        hold: Callable[[Int32s], None],
    ) -> tuple[Int32s, Int32s]:
        """Make each of `slots` (distinct) begin with the first `num_tokens` tokens of its source.

        Whatever a slot held before is given back, but only after all have what they need: a slot
        may be a source at once. No plan in flight may name any of them. Shares and copies as
        fork() does. hold: keeps the blocks that are copied from until they are.
        """
        full, end = num_tokens // self._block_size, -(-num_tokens // self._block_size)
        firsts = self._tables.firsts[list(sources)].tolist()
        rows = [self._tables.blocks[source, :end].copy() for source in sources]
        for first, row in zip(firsts, rows, strict=True):
            self._operations.share(row[first:full])
        copy_from = np.concatenate([NO_BLOCKS, *(row[full:] for row in rows)])
        # np.unique would import numpy.ma in the first step that forks.
        hold(np.array(sorted(set(copy_from.tolist())), np.int32))
        index = np.array(slots, np.intp)
        self._operations.release(self._tables.take(index))
        copy_to = self._take_blocks(len(copy_from))
        for at, (source, slot, row) in enumerate(zip(sources, slots, rows, strict=True)):
            shared = row[firsts[at] : full]
            self._inherit_chain(slot, source, shared, full)
            own = copy_to[at : at + 1] if end > full else copy_to[:0]
            self._tables.begin(slot, firsts[at])
            self._tables.append(slot, np.concatenate((shared, own)))
        return copy_from, copy_to

    def _inherit_chain(self, slot: int, source: int, shared: Int32s, num_blocks: int) -> None:
        """Continue the chain of `source` in `slot`, behind the `shared` blocks.

        They need no second digest where the index knows the last of them, number num_blocks of the
        chain.
        """
        chains = self._chains
        seed, owner = chains.seeds[source], int(chains.owners[source])
        was_flushed = chains.registered[source] == ALL_COLUMNS  # it may be `slot` itself
        self._operations.attach(slot, NO_DIGESTS, NO_BLOCKS, seed, owner, False)
        if was_flushed:
            chains.registered[slot] = ALL_COLUMNS
            return
        key = self._index.key_of(int(shared[-1])) if len(shared) else None
        if key is None:
            # From the first block on, unless that was given back: then nothing of it is offered.
            chains.registered[slot] = 0 if len(shared) == num_blocks else ALL_COLUMNS
            return
        chains.registered[slot] = num_blocks
        chains.ends[slot] = np.frombuffer(key, np.uint64)

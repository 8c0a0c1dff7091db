"""BlockPool: which blocks of the KV pool are free, and how often each of the others is named.

Knows block numbers only: no tokens, no digests, no requests. Free blocks with content that can
still be found by prefix (`findable`) are allocated last: of those used once the one freed longest
ago first, only then those that were used again (`protected`), and after all others those that are
`pinned` (pins.py), in the same order. So what was used again is safe from a burst of requests that
come once, as far as the share of it allows; beyond that its oldest blocks lose their protection (a
segmented LRU). Always holds: a block is referenced (references > 0), or on the stack of plain free
blocks, or in one of the three queues of findable free blocks; never two of these. One owner thread,
no locks; all state lies in arrays made once, and every operation takes many blocks at a time.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CapacityError
from quire.cache.age_queue import AgeQueue, Index

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

# Free blocks that were used again keep their protection up to this share of the pool
# (measured: bench/memory/prefix.py, EXPERIMENTS.md).
PROTECTED_SHARE = 0.8

_STACK, _MIN_STACK, _ALLOCATED, _EVICTED = range(4)


class BlockPool:
    """`num_blocks` blocks, all free and plain at first; lower numbers are allocated first."""

    def __init__(self, num_blocks: int, *, protected_share: float = PROTECTED_SHARE) -> None:
        if num_blocks < 1:
            raise CapacityError(
                f"the KV cache would have {num_blocks} blocks; it needs at least one: "
                "give it more memory or use a smaller block size"
            )
        self.num_blocks = num_blocks
        self.max_protected = int(protected_share * num_blocks)
        self.references: Int32s = np.zeros(num_blocks, np.int32)
        # Set by the owner of the prefix index, cleared here when such a block is handed out.
        self.findable: Bools = np.zeros(num_blocks, np.bool_)
        self.protected: Bools = np.zeros(num_blocks, np.bool_)  # findable ones only
        self.pinned: Bools = np.zeros(num_blocks, np.bool_)  # findable ones only
        self.stack: Index = np.arange(num_blocks - 1, -1, -1, dtype=np.intp)
        # Size of the stack, its smallest until now, blocks allocated and evicted in all.
        self.counts = np.array([num_blocks, num_blocks, 0, 0], np.int64)
        self._values = memoryview(self.counts.data)  # reads faster
        self.once = AgeQueue(num_blocks)
        self.again = AgeQueue(num_blocks)
        self.kept = AgeQueue(num_blocks)  # pinned ones
        self._scratch: Int32s = np.zeros(num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, findable ones included."""
        return self._values[_STACK] + self.num_free_findable

    @property
    def num_never_used(self) -> int:
        """The last so many blocks were never handed out: they lie at the bottom of the stack."""
        return self._values[_MIN_STACK]

    @property
    def num_free_findable(self) -> int:
        """Free blocks with content that a prefix match would still find."""
        return len(self.once) + len(self.again) + len(self.kept)

    @property
    def num_free_protected(self) -> int:
        """Those of them that were used again and are not pinned."""
        return len(self.again)

    @property
    def num_free_pinned(self) -> int:
        """Those of them that are pinned, handed out after all others."""
        return len(self.kept)

    @property
    def allocated_blocks_total(self) -> int:
        """Blocks handed out in all."""
        return self._values[_ALLOCATED]

    @property
    def evicted_blocks_total(self) -> int:
        """Allocated blocks that a prefix match could find until then."""
        return self._values[_EVICTED]

    def refuse(self, count: int) -> NoReturn:
        """Raise CapacityError: fewer than `count` blocks are free."""
        raise CapacityError(
            f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are "
            "free; the scheduler must make room first"
        )

    def allocate(self, count: int) -> tuple[Int32s, Index]:
        """Allocate `count` blocks, each with one reference.

        Returns (blocks [count], evicted): `evicted` are those of them that were findable until now;
        the caller makes its index forget them. Raises CapacityError if too few are free.
        """
        if count > self.num_free:
            self.refuse(count)
        top = self._values[_STACK]
        plain = min(count, top)
        blocks = self.stack[top - plain : top][::-1].copy()
        self.counts[_STACK] = top - plain
        self.counts[_MIN_STACK] = min(self.num_never_used, top - plain)
        self.counts[_ALLOCATED] += count
        self.counts[_EVICTED] += count - plain
        evicted = blocks[:0]
        if plain < count:
            once = min(count - plain, len(self.once))
            evicted = self.once.pop(once)
            if plain + once < count:
                again = min(count - plain - once, len(self.again))
                last = self.kept.pop(count - plain - once - again)
                evicted = np.concatenate((evicted, self.again.pop(again), last))
                self.protected[evicted] = self.pinned[evicted] = False
            self.findable[evicted] = False
            blocks = np.concatenate((blocks, evicted)) if plain else evicted
        self.references[blocks] = 1
        return blocks.astype(np.int32), evicted

    def share(self, blocks: Int32s) -> None:
        """Add one reference to each of `blocks` (distinct; referenced, or free and findable)."""
        index = blocks.astype(np.intp)
        revived = index[self.references[index] == 0]
        if len(revived):
            self._take(revived)
        self.references[index] += 1

    def protect(self, blocks: Int32s) -> None:
        """Note that `blocks` (referenced and findable) were used again: allocate them last."""
        self.protected[blocks] = True

    def pin(self, blocks: Int32s) -> None:
        """Allocate `blocks` (distinct and findable) after all others from now on."""
        index = blocks.astype(np.intp)
        index = index[~self.pinned[index]]
        free = index[self.references[index] == 0]
        self._take(free)
        self.pinned[index] = True
        self.kept.push(free)

    def unpin(self, blocks: Index) -> None:
        """Undo `pin` for `blocks` (distinct and pinned); free ones count as just used."""
        free = blocks[self.references[blocks] == 0]
        self.kept.take(free)
        self.pinned[blocks] = False
        self._push_findable(free)

    def release(self, blocks: Int32s) -> int:
        """Take one reference from each of `blocks` (a block may occur more than once).

        Returns how many became free. Findable ones are remembered in the given order: the
        first of them is handed out before the others.
        """
        freed = blocks.astype(np.intp)
        if np.count_nonzero(self.references[freed] == 1) == len(freed):  # so none occurs twice
            self.references[freed] = 0
        else:
            freed = self._release_shared(freed)
        if not len(freed):
            return 0
        findable = self.findable[freed]
        if np.count_nonzero(findable):
            self._push_findable(freed[findable])
            self._push_stack(freed[~findable])
        else:
            self._push_stack(freed)
        return len(freed)

    def forget_all(self) -> None:
        """Make no block findable: free ones become plain, others when they are released."""
        self._push_stack(self.once.clear())
        self._push_stack(self.again.clear())
        self._push_stack(self.kept.clear())
        self.findable[:] = self.protected[:] = self.pinned[:] = False

    def num_freed_by(self, blocks: Int32s) -> int:
        """Return how many of `blocks` (distinct) would become free by one reference less."""
        return int(np.count_nonzero(self.references[blocks] == 1))

    def num_unreferenced(self, blocks: Int32s) -> int:
        """Return how many of `blocks` are free now."""
        return int(np.count_nonzero(self.references[blocks] == 0))

    def free_blocks(self) -> tuple[Index, Index]:
        """Return plain free blocks, and findable ones in order of eviction."""
        findable = np.concatenate([each.blocks() for each in (self.once, self.again, self.kept)])
        return self.stack[: self._values[_STACK]].copy(), findable

    def protected_blocks(self) -> Index:
        """Return free blocks that were used again and are not pinned, oldest first."""
        return self.again.blocks()

    def rebuild(self, references: Int32s) -> None:
        """Replace the reference counts and derive the free blocks anew; keeps the order of age."""
        aged = np.concatenate([each.clear() for each in (self.once, self.again, self.kept)])
        self.references[:] = references
        self.protected &= self.findable
        self.pinned &= self.findable
        free = (references == 0) & self.findable
        kept = aged[free[aged]]
        free[kept] = False
        self._push_findable(np.concatenate((kept, np.flatnonzero(free))))
        plain = np.flatnonzero((references == 0) & ~self.findable)[::-1]
        self.stack[: len(plain)] = plain
        self.counts[_STACK] = len(plain)

    def _release_shared(self, blocks: Index) -> Index:
        """Take the references; return which became free, each once."""
        np.subtract.at(self.references, blocks, 1)
        freed = blocks[self.references[blocks] == 0]
        # A block that lost its last two references in this call occurs twice: keep one.
        order = np.arange(len(freed), dtype=np.int32)
        self._scratch[freed] = order
        kept: Index = freed[self._scratch[freed] == order]
        return kept

    def _push_stack(self, blocks: Index) -> None:
        top = self._values[_STACK]
        self.stack[top : top + len(blocks)] = blocks[::-1]
        self.counts[_STACK] = top + len(blocks)

    def _take(self, blocks: Index) -> None:
        """Remove free, findable blocks from their queues."""
        pinned, again = self.pinned[blocks], self.protected[blocks]
        self.once.take(blocks[~again & ~pinned])
        self.again.take(blocks[again & ~pinned])
        self.kept.take(blocks[pinned])

    def _push_findable(self, blocks: Index) -> None:
        pinned = self.pinned[blocks]
        if np.count_nonzero(pinned):
            self.kept.push(blocks[pinned])
            blocks = blocks[~pinned]
        again = self.protected[blocks]
        if not np.count_nonzero(again):
            self.once.push(blocks)
            return
        self.once.push(blocks[~again])
        self.again.push(blocks[again])
        beyond = len(self.again) - self.max_protected
        if beyond > 0:
            oldest = self.again.pop(beyond)
            self.protected[oldest] = False
            self.once.push(oldest)

"""BlockPool: which blocks of the KV pool are free, and how often each of the others is named.

Knows block numbers only: no tokens, no digests, no requests. Free blocks with content that can
still be found by prefix (`findable`) are allocated last: of those used once the one freed longest
ago first, and only then those that were used again (`protected`), in the same order. So what was
used again is safe from a burst of requests that come once, as far as the share of it allows; beyond
that its oldest blocks lose their protection (a segmented LRU). Always holds: a block is referenced
(references > 0), or on the stack of plain free blocks, or in one of the two queues of findable free
blocks; never two of these. One owner thread, no locks; all state lies in arrays made once, and
every operation takes many blocks at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CapacityError
from quire.cache.age_queue import AgeQueue, Index

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

# Free blocks that were used again keep their protection up to this share of the pool
# (measured: bench/memory/prefix.py, EXPERIMENTS.md).
PROTECTED_SHARE = 0.8
# Stands for a clock where nothing is measured: int() is 0.
_NO_CLOCK: Callable[[], int] = int


class BlockPool:
    """`num_blocks` blocks, all free and plain at first; lower numbers are allocated first.

    now_ns: the clock that allocation_ns_total is measured with; without one it stays 0.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        protected_share: float = PROTECTED_SHARE,
        now_ns: Callable[[], int] = _NO_CLOCK,
    ) -> None:
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
        self._stack: Index = np.arange(num_blocks - 1, -1, -1, dtype=np.intp)
        self._stack_size = self._min_stack = num_blocks
        self._once = AgeQueue(num_blocks)
        self._again = AgeQueue(num_blocks)
        self._scratch: Int32s = np.zeros(num_blocks, np.int32)
        self.allocated_blocks_total = 0
        self.allocation_ns_total = 0
        self._now_ns = now_ns

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, findable ones included."""
        return self._stack_size + self._once.size + self._again.size

    @property
    def num_never_used(self) -> int:
        """The last so many blocks were never handed out: they lie at the bottom of the stack."""
        return self._min_stack

    @property
    def num_free_findable(self) -> int:
        """Free blocks with content that a prefix match would still find."""
        return len(self._once) + len(self._again)

    @property
    def num_free_protected(self) -> int:
        """Those of them that were used again, handed out after all others."""
        return len(self._again)

    def allocate(self, count: int) -> tuple[Int32s, Index]:
        """Allocate `count` blocks, each with one reference.

        Returns (blocks [count], evicted): `evicted` are those of them that were findable until now;
        the caller makes its index forget them. Raises CapacityError if too few are free.
        """
        if count > self.num_free:
            raise CapacityError(
                f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are "
                "free; the scheduler must make room first"
            )
        began_ns = self._now_ns()
        plain = min(count, self._stack_size)
        top = self._stack_size
        blocks = self._stack[top - plain : top][::-1].copy()
        self._stack_size = top - plain
        self._min_stack = min(self._min_stack, self._stack_size)
        evicted = blocks[:0]
        if plain < count:
            once = min(count - plain, len(self._once))
            evicted = self._once.pop(once)
            if plain + once < count:
                evicted = np.concatenate((evicted, self._again.pop(count - plain - once)))
                self.protected[evicted] = False
            self.findable[evicted] = False
            blocks = np.concatenate((blocks, evicted)) if plain else evicted
        self.references[blocks] = 1
        allocated = blocks.astype(np.int32)
        self.allocated_blocks_total += count
        self.allocation_ns_total += self._now_ns() - began_ns
        return allocated, evicted

    def share(self, blocks: Int32s) -> None:
        """Add one reference to each of `blocks` (distinct; referenced, or free and findable)."""
        index = blocks.astype(np.intp)
        revived = index[self.references[index] == 0]
        if len(revived):
            again = self.protected[revived]
            self._once.take(revived[~again])
            self._again.take(revived[again])
        self.references[index] += 1

    def protect(self, blocks: Int32s) -> None:
        """Note that `blocks` (referenced and findable) were used again: allocate them last."""
        self.protected[blocks] = True

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
        self._push_stack(self._once.clear())
        self._push_stack(self._again.clear())
        self.findable[:] = False
        self.protected[:] = False

    def num_freed_by(self, blocks: Int32s) -> int:
        """Return how many of `blocks` (distinct) would become free by one reference less."""
        return int(np.count_nonzero(self.references[blocks] == 1))

    def num_unreferenced(self, blocks: Int32s) -> int:
        """Return how many of `blocks` are free now."""
        return int(np.count_nonzero(self.references[blocks] == 0))

    def free_blocks(self) -> tuple[Index, Index]:
        """Return plain free blocks, and findable ones in order of eviction."""
        findable = np.concatenate((self._once.blocks(), self._again.blocks()))
        return self._stack[: self._stack_size].copy(), findable

    def protected_blocks(self) -> Index:
        """Return free blocks that are allocated after all others, oldest first."""
        return self._again.blocks()

    def rebuild(self, references: Int32s) -> None:
        """Replace the reference counts and derive the free blocks anew; keeps the order of age."""
        aged = np.concatenate((self._once.clear(), self._again.clear()))
        self.references[:] = references
        self.protected &= self.findable
        free = (references == 0) & self.findable
        kept = aged[free[aged]]
        free[kept] = False
        self._push_findable(np.concatenate((kept, np.flatnonzero(free))))
        plain = np.flatnonzero((references == 0) & ~self.findable)[::-1]
        self._stack[: len(plain)] = plain
        self._stack_size = len(plain)

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
        top = self._stack_size
        self._stack[top : top + len(blocks)] = blocks[::-1]
        self._stack_size = top + len(blocks)

    def _push_findable(self, blocks: Index) -> None:
        again = self.protected[blocks]
        if not np.count_nonzero(again):
            self._once.push(blocks)
            return
        self._once.push(blocks[~again])
        self._again.push(blocks[again])
        beyond = len(self._again) - self.max_protected
        if beyond > 0:
            oldest = self._again.pop(beyond)
            self.protected[oldest] = False
            self._once.push(oldest)

"""Prefault: the pool's next blocks become memory before a prompt needs them.

A pool is zero pages that the system makes memory of when they are first written. In a virtual
machine that takes milliseconds a megabyte (EXPERIMENTS.md): a prompt's first step would wait longer
for pages than for arithmetic. So an idle engine touches some ahead of use. Knows no
requests. Always holds: only blocks that were never handed out are touched; one call makes about
PIECE_BYTES memory, so that a message that comes waits for no more than that.
"""

from __future__ import annotations

from typing import Protocol

# One huge page.
PIECE_BYTES = 2 * 1024**2


class Touches(Protocol):
    """See Executor.touch_blocks."""

    def touch_blocks(self, layer: int, first: int, last: int) -> None: ...


class Prefault:
    """Keeps ahead_bytes of never used blocks touched, of a pool of num_blocks over `layers`."""

    def __init__(
        self,
        executor: Touches,
        *,
        num_blocks: int,
        layers: int,
        block_bytes: int,
        ahead_bytes: int,
    ) -> None:
        self._executor = executor
        self._num_blocks = num_blocks
        self._layers = layers
        self._ahead_blocks = ahead_bytes // max(block_bytes, 1)
        self._piece_blocks = max(PIECE_BYTES * layers // max(block_bytes, 1), 1)
        self._first = 0  # of the piece that is touched now, one layer after the other
        self._last = 0
        self._layer = layers

    def touch(self, num_never_used: int) -> bool:
        """One more piece, if any is wanted; False: nothing is left to do for now.

        num_never_used: so many of the pool's last blocks were never handed out.
        """
        used = self._num_blocks - num_never_used
        if self._layer == self._layers and not self._begin_piece(used):
            return False
        first = max(self._first, used)  # the rest came into use meanwhile
        if first < self._last:
            self._executor.touch_blocks(self._layer, first, self._last)
        self._layer += 1
        return True

    def _begin_piece(self, used: int) -> bool:
        first = max(self._last, used)
        wanted = min(used + self._ahead_blocks, self._num_blocks)
        if first >= wanted:
            return False
        self._first, self._layer = first, 0
        self._last = min(first + self._piece_blocks, wanted)
        return True

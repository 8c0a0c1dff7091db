"""Watermark: blocks admission leaves free, so that who is admitted is not preempted at once.

A running request takes a block every block_size steps: half a block for each of them is their
growth over half that time. How much more it takes is seen from what happens: each preemption
raises the mark, and steps without one lower it again. Always holds: where nothing runs there is no
mark, or nothing ever would; it never keeps more than a quarter of the pool.
"""

from __future__ import annotations

_RAISE = 1.5
_HIGHEST = 16.0
# Steps after which half of what preemptions added is gone.
_HALF_LIFE_STEPS = 512


class Watermark:
    """Of a pool of `num_blocks`."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._factor = 1.0
        self._at_step = 0

    def preempted(self, step: int) -> None:
        """A request was preempted in `step`."""
        self._factor = min(self._factor_at(step) * _RAISE, _HIGHEST)
        self._at_step = step

    def blocks(self, num_running: int, step: int) -> int:
        """What to leave free while so many run."""
        if not num_running:
            return 0
        least = max(self._num_blocks // 100, num_running // 2)
        return max(least, min(int(least * self._factor_at(step)), self._num_blocks // 4))

    def _factor_at(self, step: int) -> float:
        if self._factor == 1.0:
            return 1.0
        left: float = 0.5 ** ((step - self._at_step) / _HALF_LIFE_STEPS)
        return 1.0 + (self._factor - 1.0) * left

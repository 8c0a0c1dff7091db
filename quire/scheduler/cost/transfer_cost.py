"""TransferCost: what restoring keys and values costs, by moving blocks or by recomputing tokens.

Speeds are learned: of computing by SpeedEstimate, from the steps; of moving here, from copies that
have ended. Knows no clock and no medium. Always holds: a way that was found too expensive is tried
again in the end, because a judgement that nothing confirms fades.
"""

from __future__ import annotations

from enum import StrEnum

from quire.base.block_copies import CopiesEnded
from quire.scheduler.cost.speed import SpeedEstimate

# What a copy leaves of the estimate before it, and a refusal of its height.
_KEEP = 0.9
_FADE = 0.98
# A fetch also takes a plan to begin and one to go on.
_ROUND_TRIP_MS = 1.0


class RestoreMode(StrEnum):
    """How blocks of waiting requests are restored."""

    CHEAPER = "cost"  # whichever is predicted to be cheaper
    MOVE = "always"
    RECOMPUTE = "never"


class TransferCost:
    """block_ms: initial time to load one block; saving one takes about the same."""

    def __init__(
        self, speed: SpeedEstimate, block_size: int, *, block_ms: float, choice: RestoreMode
    ) -> None:
        self._speed = speed
        self._block_size = block_size
        self._choice = choice
        self.fetch_block_ms = block_ms
        self.save_block_ms = block_ms

    def learn(self, copies: CopiesEnded) -> None:
        """Note copies that have ended."""
        if copies.fetched:
            self.fetch_block_ms = _blend(self.fetch_block_ms, copies.fetch_ms, copies.fetched)
        if copies.saved:
            self.save_block_ms = _blend(self.save_block_ms, copies.save_ms, copies.saved)

    def recompute_ms(self, start: int, end: int) -> float:
        """Return the cost of recomputing positions start .. end - 1."""
        return self._speed.span_ms(start, end)

    def fetch_pays(self, start: int, num_blocks: int, num_before: int) -> bool:
        """Return whether loading num_blocks blocks from position `start` on is cheaper.

        num_before: other blocks on their way already.
        """
        if self._choice is not RestoreMode.CHEAPER:
            return self._choice is RestoreMode.MOVE
        recompute_ms = self.recompute_ms(start, start + num_blocks * self._block_size)
        move_ms = _ROUND_TRIP_MS + (num_blocks + num_before) * self.fetch_block_ms
        if move_ms < recompute_ms:
            return True
        self.fetch_block_ms *= _FADE
        return False

    def return_ms(self, start: int, end: int) -> tuple[float, bool]:
        """Return the cost of restoring positions start .. end - 1, and whether by moving blocks.

        After all their blocks were taken: the cheaper of both ways.
        """
        recompute_ms = self.recompute_ms(start, end)
        if self._choice is RestoreMode.RECOMPUTE:
            return recompute_ms, False
        # Saving goes on beside the steps, and costs them its copy within memory at most.
        num_blocks = (end - start) // self._block_size
        rest_ms = self.recompute_ms(start + num_blocks * self._block_size, end)
        both_ms = self.fetch_block_ms + self.save_block_ms
        move_ms = _ROUND_TRIP_MS + num_blocks * both_ms + rest_ms
        if self._choice is RestoreMode.MOVE:
            return move_ms, True
        return (move_ms, True) if move_ms < recompute_ms else (recompute_ms, False)


def _blend(known_ms: float, ms: float, blocks: int) -> float:
    """Return the mean time of a block, weighted by the number of blocks."""
    keep = _KEEP**blocks
    return keep * known_ms + (1.0 - keep) * ms / blocks

"""FetchCosts: whether fetching blocks from a level is faster than computing them.

How long a block of each level and a lookup take is measured; what computing takes is predicted by
the engine's step costs. Knows no request and no thread. Always holds: a level that was found too
slow is tried again in the end, because its estimate fades.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.scheduler.cost.speed import SpeedEstimate

# A prompt of less than this is not looked up, and not claimed, unless fetching is forced.
MIN_ASK_MS, MIN_CLAIM_MS = 1.0, 50.0
_KEEP = 0.9  # what a fetched block leaves of the estimate before it
_FADE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How an engine uses the store. fetch: "cost", "always" or "never".

    timeout_ms: a request waits at most so long for a lookup, or for the next block.
    """

    block_size: int
    fetch: str
    timeout_ms: float


class FetchCosts:
    """The prices of one engine. block_ms: of each level, until it is measured."""

    def __init__(
        self, settings: StoreSettings, speed: SpeedEstimate, block_ms: Sequence[float]
    ) -> None:
        self.settings = settings
        self.is_forced = settings.fetch == "always"
        self.block_ms = list(block_ms)
        self.lookup_ms = MIN_ASK_MS
        self._speed = speed

    def compute_ms(self, first: int, end: int) -> float:
        """Return what computing the blocks first .. end - 1 of a prompt takes."""
        size = self.settings.block_size
        return self._speed.span_ms(first * size, end * size) if end > first else 0.0

    def move_ms(self, levels: Sequence[int]) -> float:
        """Return what fetching blocks takes, which these levels have."""
        return sum(self.block_ms[level] for level in levels)

    def limit_ms(self, compute_ms: float) -> float:
        """Return how long to wait for something that spares so much computing."""
        if self.is_forced:
            return self.settings.timeout_ms
        return min(max(compute_ms, MIN_ASK_MS), self.settings.timeout_ms)

    def lookup_pays(self, compute_ms: float) -> bool:
        """Return whether to look for blocks that take so long to compute."""
        return self.is_forced or (self.settings.fetch == "cost" and compute_ms > self.lookup_ms)

    def claim_pays(self, compute_ms: float) -> bool:
        """Return whether to keep other engines from computing the same."""
        return self.is_forced or compute_ms >= MIN_CLAIM_MS

    def fetch_pays(self, levels: Sequence[int], compute_ms: float) -> bool:
        """Return whether to fetch blocks that these levels have."""
        return self.settings.fetch != "cost" or self.move_ms(levels) < compute_ms

    def fade(self, levels: Sequence[int]) -> None:
        """Note that blocks are not fetched, because these levels are too slow."""
        for level in set(levels):
            self.block_ms[level] *= _FADE

    def note_lookup(self, took_ms: float) -> None:
        """Take in how long a lookup took."""
        self.lookup_ms = _KEEP * self.lookup_ms + (1.0 - _KEEP) * took_ms

    def note_fetch(self, level: int, num_blocks: int, took_ms: float) -> None:
        """Take in how long so many blocks of a level took."""
        keep = _KEEP**num_blocks
        self.block_ms[level] = keep * self.block_ms[level] + (1.0 - keep) * took_ms / num_blocks

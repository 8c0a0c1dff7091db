"""What all proposers that compute share: sizes, a mirror of known tokens, and timed passes.

ComputingProposer is the base class of a draft model, of first layers and of draft heads. Knows no
executor. Always holds: a pass computes at most `max_tokens` token rows, and requests that lack the
fewest come first, so that a long prompt keeps no other request from drafting.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.mirror import Mirror, MirroringModel
from quire.speculative.pass_times import PassTimes
from quire.speculative.proposer import CostlyProposer, Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]
# Known tokens that a call computes at least where texts are behind.
MIN_CATCH_UP = 16


class DraftLimits(NamedTuple):
    """Sizes of what drafts: slots, blocks of its KV cache, their tokens, its longest context, and
    most token rows of a pass (at least one per slot)."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_tokens: int


class ComputingProposer(CostlyProposer):
    """A CostlyProposer over a model or heads that mirror the known tokens. now_ms: times passes."""

    def __init__(self, model: MirroringModel, num_slots: int, now_ms: Callable[[], float]) -> None:
        self.mirror = Mirror(model, num_slots)
        self.pass_times = PassTimes(num_slots)
        self._mirroring, self._now_ms = model, now_ms
        self._passes_ms = 0.0  # of all passes so far

    def close(self) -> None:
        """Free the model or the heads."""
        self._mirroring.close()

    def begin_to_count(self) -> None:
        """Take the best times of the passes so far, which were made to time them, and count the
        time of later ones only."""
        self.pass_times.settle()
        self.drafting_ms = self.catching_up_ms = 0.0

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        self.end(slot)
        self.mirror.begin(slot, request)

    def end(self, slot: int) -> None:
        """See Proposer."""
        self.mirror.end(slot)

    def pass_ms(self, num_requests: int) -> Float64s:
        """See CostlyProposer."""
        return self.pass_times.table(num_requests)

    def call_ms(self) -> float:
        """See CostlyProposer."""
        return self.pass_times.call_ms

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        began_ms, passes_ms = self._now_ms(), self._passes_ms
        try:
            self._compute_drafts(tokens, slots, limits, drafts)
        finally:
            ms = self._now_ms() - began_ms
            self.drafting_ms += ms
            self.pass_times.note_call(ms - (self._passes_ms - passes_ms))

    @abstractmethod
    def _compute_drafts(
        self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts
    ) -> None:
        """Compute what `propose` fills in."""

    def _note_pass(self, num_requests: int, num_tokens: int, num_needed: int, ms: float) -> None:
        """Learn the time of a pass. num_needed: tokens of it that drafts need anyway."""
        self._passes_ms += ms
        if num_tokens > num_needed:
            counted_ms = self.pass_times.counted_ms(num_requests, num_tokens, ms)
            self.catching_up_ms += counted_ms * (num_tokens - num_needed) / num_tokens
        self.pass_times.note_pass(num_requests, num_tokens, ms)

    def _allotted(self, pending: Int32s, max_tokens: int) -> Int32s:
        """Return how many of its `pending` token rows each request computes in the first pass of a
        call."""
        behind = self.pass_times.max_tokens(self.catch_up_ms, max_tokens)
        num_tokens = min(2 * len(pending) + max(behind, MIN_CATCH_UP), max_tokens)
        order = np.argsort(pending, kind="stable")
        before = np.cumsum(pending[order]) - pending[order]
        counts = np.empty_like(pending)
        counts[order] = np.clip(num_tokens - before, 0, pending[order])
        return counts

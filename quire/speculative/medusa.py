"""MedusaProposer: drafts from Medusa heads, one pass of one head per draft, for all slots at once.

Head j guesses token p + 2 + j from what the target's head read at position p. Of a request with L
known tokens that is position L - 2, which its last step computed: as many heads as drafts are
wanted are run on it. Nothing is carried from step to step. Always holds: a request without that row
(its slot's rows were displaced, or its last token is not the target's next) has no drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.features import FeatureRing
from quire.speculative.head_proposer import HeadModel, HeadRequests, HeadRows
from quire.speculative.proposer import Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]


class MedusaProposer:
    """A CostlyProposer over the `num_heads` heads of `model`. now_ms: times the passes."""

    def __init__(
        self,
        model: HeadModel,
        ring: FeatureRing,
        *,
        num_heads: int,
        num_slots: int,
        now_ms: Callable[[], float],
    ) -> None:
        self.requests = HeadRequests(model, num_slots, now_ms)
        self._ring, self._num_heads = ring, num_heads
        self.drafting_ms = 0.0
        self.catch_up_ms = math.inf

    def close(self) -> None:
        """Free the heads."""
        self.requests.model.close()

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        self.requests.begin(slot, request)

    def end(self, slot: int) -> None:
        """See Proposer."""
        self.requests.end(slot)
        self._ring.forget(slot)

    def possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """See CostlyProposer: at most a draft per head, where the hidden state is there."""
        is_there = self._ring.find(slots, tokens.lengths[slots] - 2) >= 0
        return np.where(is_there, np.minimum(limits, self._num_heads), np.int32(0))

    def pass_ms(self, num_requests: int) -> Float64s:
        """See CostlyProposer."""
        return self.requests.pass_times.table(num_requests)

    def behind_ms(self, tokens: TokenTable, slots: Index) -> Float64s:
        """See CostlyProposer: nothing is caught up with."""
        return np.zeros(len(slots))

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        began_ms = self.requests.now_ms()
        try:
            lengths = self.requests.follow(tokens, slots)
            places, features = self._ring.take(slots, lengths - 2)
            limits = np.minimum(limits, self._num_heads)
            rows = ((places >= 0) & (limits > 0)).nonzero()[0]
            features = features[limits[places >= 0] > 0]
            for head in range(int(limits[rows].max(initial=0))):
                going = limits[rows] > head
                rows, features = rows[going], features[going]
                sampled = self._guess(head, slots[rows], lengths[rows], features)
                is_good = sampled >= 0
                rows, features, sampled = rows[is_good], features[is_good], sampled[is_good]
                if not len(rows):
                    return
                drafts.ids[rows, head] = sampled
                drafts.counts[rows] = head + 1
                self.requests.model.tokens.put(slots[rows], lengths[rows] + np.int32(head), sampled)
        finally:
            self.drafting_ms += self.requests.now_ms() - began_ms

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Do nothing: known tokens are read when they are needed."""

    def _guess(
        self, head: int, slots: Index, lengths: Int32s, features: NDArray[np.float32]
    ) -> Int32s:
        """Return the tokens that a head samples [N], -1 where it samples none."""
        num_rows = len(slots)
        if not num_rows:
            return np.empty(0, np.int32)
        rows = HeadRows(
            slots=slots,
            starts=np.zeros(num_rows, np.int32),
            counts=np.ones(num_rows, np.int32),
            positions=lengths + np.int32(head),
            token_ids=np.zeros(num_rows, np.int32),
            features=features,
        )
        return self.requests.compute(head, rows)[0]

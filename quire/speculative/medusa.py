"""MedusaProposer: drafts from Medusa heads, one pass of one head per draft, for all slots at once.

Head j guesses token p + 2 + j from what the target's head read at position p. Of a request with L
known tokens that is position L - 2, which its last step computed: as many heads as drafts are
wanted are run on it. Nothing is carried from step to step. Always holds: a request without that row
(its slot's rows were displaced, or its last token is not the target's next) has no drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.speculative.draft_heads import DraftHeadModel, HeadProposer, HeadRows
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.proposer import Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]


class MedusaProposer(HeadProposer):
    """A CostlyProposer over the `num_heads` heads of `model`. now_ms: times the passes."""

    name = "medusa"
    kept_steps = 4  # heads read one row; rests end a step or two sooner or later than said

    def __init__(
        self,
        model: DraftHeadModel,
        ring: HiddenStateRing,
        *,
        num_heads: int,
        num_slots: int,
        now_ms: Callable[[], float],
    ) -> None:
        super().__init__(model, ring, num_slots, now_ms)
        self._num_heads = num_heads

    def possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """See CostlyProposer: at most a draft per head, where the hidden state is there."""
        is_there = self._ring.find(slots, tokens.lengths[slots] - 2) >= 0
        return np.where(is_there, np.minimum(limits, self._num_heads), np.int32(0))

    def behind_ms(self, tokens: TokenTable, slots: Index) -> Float64s:
        """See CostlyProposer: nothing is caught up with."""
        return np.zeros(len(slots))

    def _compute_drafts(
        self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts
    ) -> None:
        """Run a head per draft, on the hidden state before the last known token."""
        lengths = self.mirror.follow(tokens, slots)
        places, hidden_states = self._ring.take(slots, lengths - 2)
        limits = np.minimum(limits, self._num_heads)
        rows = ((places >= 0) & (limits > 0)).nonzero()[0]
        hidden_states = hidden_states[limits[places >= 0] > 0]
        for head in range(int(limits[rows].max(initial=0))):
            going = limits[rows] > head
            rows, hidden_states = rows[going], hidden_states[going]
            sampled = self._guess(head, slots[rows], lengths[rows], hidden_states)
            is_good = sampled >= 0
            rows, sampled = rows[is_good], sampled[is_good]
            hidden_states = hidden_states[is_good]
            if not len(rows):
                return
            drafts.ids[rows, head] = sampled
            drafts.counts[rows] = head + 1
            self._model.tokens.put(slots[rows], lengths[rows] + np.int32(head), sampled)

    def _guess(
        self, head: int, slots: Index, lengths: Int32s, hidden_states: NDArray[np.float32]
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
            hidden_states=hidden_states,
        )
        return self._pass(head, rows)[0]

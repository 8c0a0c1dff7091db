"""ModelProposer: drafts from a second, smaller model, computed for all slots as one batch.

The draft model has its own KV cache and its own mirror of the known tokens (DraftModel). A call
first computes the known tokens that lack KV, at most one pass of them, then one token per request
and pass. Drafts are sampled as the target samples: same parameters, same noise. What the draft
model computed for drafts stays valid as far as they were accepted; the rest is overwritten. Always
holds: `_computed[slot]` leading positions of the mirror have KV of the tokens in it; a request has
the blocks of all positions it computes; a request without blocks, or behind on known tokens, has no
drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.speculative.draft_blocks import DraftBlocks
from quire.speculative.mirror import MirroringModel
from quire.speculative.passes import ComputingProposer, DraftLimits
from quire.speculative.proposer import Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


class DraftModel(MirroringModel, Protocol):
    """Computes a draft model (quire.runner.draft_runner)."""

    def compute(self, slots: Index, starts: Int32s, counts: Int32s, samples: Bools) -> Int32s:
        """Compute counts[i] tokens of the mirror from starts[i] on, and return the token sampled
        after the last where samples[i]; -1 where none is or the row failed."""


class ModelProposer(ComputingProposer):
    """A CostlyProposer over `model`. now_ms: times the passes."""

    name = "draft"
    may_begin_late = True

    def __init__(self, model: DraftModel, limits: DraftLimits, now_ms: Callable[[], float]) -> None:
        num_slots = limits.num_slots
        super().__init__(model, num_slots, now_ms)
        self._model, self._limits = model, limits
        self.blocks = DraftBlocks(num_slots, limits.num_blocks, limits.block_size, model.set_blocks)
        self._computed: Int32s = np.zeros(num_slots, np.int32)

    def end(self, slot: int) -> None:
        """See Proposer."""
        super().end(slot)
        self.blocks.release(slot)
        self._computed[slot] = 0

    def possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """See CostlyProposer: the draft model's context ends earlier, or no block is free."""
        lengths = tokens.lengths[slots]
        room = np.minimum(limits, self._limits.max_model_len - lengths)
        if not self.blocks.num_free:
            room = np.minimum(room, self.blocks.capacity[slots] - lengths + 1)
        return np.maximum(room, np.int32(0))

    def behind_ms(self, tokens: TokenTable, slots: Index) -> NDArray[np.float64]:
        """See CostlyProposer: of tokens beyond those that a pass for drafts computes anyway."""
        behind = np.maximum(tokens.lengths[slots] - self._computed[slots] - 2, 0)
        behind_ms: NDArray[np.float64] = behind * self.pass_times.token_ms
        return behind_ms

    def _compute_drafts(
        self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts
    ) -> None:
        """Compute known tokens that lack KV, and drafts for the requests that have no more."""
        self._follow(tokens, slots)
        lengths = self.mirror.known[slots]
        limits = np.minimum(limits, self._room(slots, lengths, limits))
        can = (limits > 0).nonzero()[0]
        if len(can):
            self._draft(slots[can], limits[can], can, drafts)

    def _draft(self, slots: Index, limits: Int32s, rows: Index, drafts: Drafts) -> None:
        """Fill rows `rows` of `drafts`: a pass over known tokens, then a pass per further draft."""
        starts = self._computed[slots]
        pending = self.mirror.known[slots] - starts
        counts = self._allotted(pending, self._limits.max_tokens)
        samples = counts == pending
        some = counts.nonzero()[0]
        sampled = np.full(len(slots), -1, np.int32)
        sampled[some] = self._pass(slots[some], starts[some], counts[some], samples[some])
        self._computed[slots] += counts
        going = ((sampled >= 0) & samples).nonzero()[0]
        for place in range(int(limits.max())):
            if not len(going):
                return
            drafts.ids[rows[going], place] = sampled[going]
            drafts.counts[rows[going]] = place + 1
            going = going[limits[going] > place + 1]
            if not len(going):
                return
            of_going, positions = slots[going], self.mirror.known[slots[going]] + np.int32(place)
            self._model.tokens.put(of_going, positions, sampled[going])
            ones = np.ones(len(going), np.int32)
            sampled[going] = self._pass(of_going, positions, ones, ones > 0)
            self._computed[of_going] = positions + 1
            going = going[sampled[going] >= 0]

    def _pass(self, slots: Index, starts: Int32s, counts: Int32s, samples: Bools) -> Int32s:
        """Compute a pass and learn its time."""
        began_ms = self._now_ms()
        sampled = self._model.compute(slots, starts, counts, samples)
        ms = self._now_ms() - began_ms
        needed = np.where(samples, np.minimum(counts, 2), np.int32(0))
        self._note_pass(len(slots), int(np.add.reduce(counts)), int(np.add.reduce(needed)), ms)
        return sampled

    def _follow(self, tokens: TokenTable, slots: Index) -> None:
        """Copy new known tokens to the mirror; KV stays valid up to the first that differs."""
        differs = np.full(len(slots), np.iinfo(np.int32).max, np.int32)
        lengths = self.mirror.follow(tokens, slots, differs)
        self._computed[slots] = np.minimum(self._computed[slots], differs)
        # The last known token is computed for its logits, even if its KV is there.
        self._computed[slots] = np.minimum(self._computed[slots], lengths - 1)

    def _room(self, slots: Index, lengths: Int32s, limits: Int32s) -> Int32s:
        """Return how many drafts the context and the blocks of each request allow; take blocks.

        The last draft is sampled and not computed, so it needs no KV.
        """
        limits = np.minimum(limits, self._limits.max_model_len - lengths)
        capacity, wanted = self.blocks.capacity, lengths + limits - 1
        for row in ((limits > 0) & (wanted > capacity[slots])).nonzero()[0].tolist():
            self.blocks.grow(int(slots[row]), int(lengths[row]), int(wanted[row]))
        room: Int32s = np.minimum(limits, capacity[slots] - lengths + 1)
        return room

"""SelfProposer: drafts from the first layers of the model itself, over the model's KV cache.

A drafted position's keys and values in these layers are those that verification computes there, so
they go into the request's own blocks: there is no second cache, and nothing to catch up with. The
block tables come from the scheduler before each call (`note_kv`). Always holds: only positions that
are not computed yet are stored, in blocks that the request already had in an earlier plan: blocks
that are new in the plan being made may still be copied or saved to a tier. Verification overwrites
what was stored, with equal bits for accepted drafts, before any row attends to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.speculative.draft_model import DraftModel, ModelProposer
from quire.speculative.passes import DraftLimits
from quire.speculative.proposer import CacheProposer, Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class SelfProposer(ModelProposer, CacheProposer):
    """A CacheProposer over `model`, which computes with the target's cache.

    limits: num_blocks is not used. settle: called before each call's passes; stages of a pipeline
    finish what they have begun. The time of it is no part of drafting.
    """

    name = "self"

    def __init__(self, model: DraftModel, limits: DraftLimits, now_ms: Callable[[], float]) -> None:
        super().__init__(model, limits._replace(num_blocks=0), now_ms)
        self._has_kv = False  # since `possible` was called last
        self.settle: Callable[[], None] = _nothing

    def note_kv(self, slots: Index, block_tables: Int32s, capacities: Int32s) -> None:
        """See CacheProposer."""
        self.blocks.capacity[slots] = capacities
        columns = -(-int(capacities.max(initial=0)) // self._limits.block_size)
        tables = np.maximum(block_tables[:, :columns], 0)  # -1: behind the window, never read
        for slot, blocks in zip(slots.tolist(), tables, strict=True):
            self._model.set_blocks(slot, 0, blocks)
        self._has_kv = True

    def possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """See CostlyProposer. The last draft is sampled and not computed, so it needs no block.

        Before the blocks of a step are known, as many as the context allows.
        """
        lengths = tokens.lengths[slots]
        room = np.minimum(limits, self._limits.max_model_len - lengths)
        if self._has_kv:
            self._has_kv = False
            room = np.minimum(room, self.blocks.capacity[slots] - lengths + 1)
        return np.maximum(room, np.int32(0))

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        self.settle()
        super().propose(tokens, slots, limits, drafts)

    def behind_ms(self, tokens: TokenTable, slots: Index) -> NDArray[np.float64]:
        """See CostlyProposer: the model has computed all known tokens but the last."""
        return np.zeros(len(slots))

    def _follow(self, tokens: TokenTable, slots: Index) -> None:
        """Copy new known tokens to the mirror; all but the last are computed by the model."""
        super()._follow(tokens, slots)
        self._computed[slots] = self.mirror.known[slots] - 1


def _nothing() -> None:
    """Do nothing."""

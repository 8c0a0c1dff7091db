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

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.speculative.pass_times import PassTimes
from quire.speculative.proposer import Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
NO_BLOCKS: Int32s = np.empty(0, np.int32)
# Known tokens that a call computes at least where texts are behind.
MIN_CATCH_UP = 16


class DraftLimits(NamedTuple):
    """Sizes of a draft model: slots, blocks of its KV cache, their tokens, its longest context, and
    most token rows of a pass (at least one per slot)."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_tokens: int


class DraftModel(Protocol):
    """Computes a draft model (quire.runner.draft_runner).

    tokens: its mirror of the known tokens and of drafts, by slot.
    """

    @property
    def tokens(self) -> TokenTable: ...

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        """Take over the sampling parameters of `request`; its row of `tokens` becomes empty."""

    def retire(self, slot: int) -> None:
        """Forget the request in `slot`."""

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        """Set entries of the block table of `slot`, from column `first` on."""

    def compute(self, slots: Index, starts: Int32s, counts: Int32s, samples: Bools) -> Int32s:
        """Compute counts[i] tokens of the mirror from starts[i] on, and return the token sampled
        after the last where samples[i]; -1 where none is or the row failed."""

    def close(self) -> None:
        """Free threads and memory."""


class ModelProposer:
    """A CostlyProposer over `model`. now_ms: times the passes."""

    def __init__(self, model: DraftModel, limits: DraftLimits, now_ms: Callable[[], float]) -> None:
        self._model, self._limits, self._now_ms = model, limits, now_ms
        self.pass_times = PassTimes(limits.num_slots)
        self.drafting_ms = 0.0
        self.catch_up_ms = math.inf
        num_slots = limits.num_slots
        self._requests: list[Request | None] = [None] * num_slots
        self._is_admitted = np.zeros(num_slots, np.bool_)
        self._known: Int32s = np.zeros(num_slots, np.int32)  # tokens compared with the mirror
        self._computed: Int32s = np.zeros(num_slots, np.int32)
        self._blocks: list[Int32s] = [NO_BLOCKS] * num_slots
        self._capacity: Int32s = np.zeros(num_slots, np.int32)  # tokens that these hold
        self._free = list(range(limits.num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        """Return the blocks that no request has."""
        return len(self._free)

    def close(self) -> None:
        """Free the draft model."""
        self._model.close()

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        self.end(slot)
        self._requests[slot] = request

    def end(self, slot: int) -> None:
        """See Proposer."""
        self._requests[slot] = None
        self._free += self._blocks[slot].tolist()
        self._blocks[slot] = NO_BLOCKS
        self._known[slot] = self._computed[slot] = self._capacity[slot] = 0
        if self._is_admitted[slot]:
            self._is_admitted[slot] = False
            self._model.retire(slot)

    def possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """See CostlyProposer: the draft model's context ends earlier, or no block is free."""
        lengths = tokens.lengths[slots]
        room = np.minimum(limits, self._limits.max_model_len - lengths)
        if not self._free:
            room = np.minimum(room, self._capacity[slots] - lengths + 1)
        return np.maximum(room, np.int32(0))

    def pass_ms(self, num_requests: int) -> NDArray[np.float64]:
        """See CostlyProposer."""
        return self.pass_times.table(num_requests)

    def behind_ms(self, tokens: TokenTable, slots: Index) -> NDArray[np.float64]:
        """See CostlyProposer: of tokens beyond those that a pass for drafts computes anyway."""
        behind = np.maximum(tokens.lengths[slots] - self._computed[slots] - 2, 0)
        behind_ms: NDArray[np.float64] = behind * self.pass_times.token_ms
        return behind_ms

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        began_ms = self._now_ms()
        try:
            self._follow(tokens, slots)
            lengths = self._known[slots]
            limits = np.minimum(limits, self._room(slots, lengths, limits))
            can = (limits > 0).nonzero()[0]
            if len(can):
                self._draft(slots[can], limits[can], can, drafts)
        finally:
            self.drafting_ms += self._now_ms() - began_ms

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Do nothing: `_follow` compares drafts with the known tokens."""

    def _draft(self, slots: Index, limits: Int32s, rows: Index, drafts: Drafts) -> None:
        """Fill rows `rows` of `drafts`: a pass over known tokens, then a pass per further draft."""
        starts = self._computed[slots]
        pending = self._known[slots] - starts
        counts = self._allotted(pending)
        samples = counts == pending
        some = counts.nonzero()[0]
        sampled = np.full(len(slots), -1, np.int32)
        is_short = int(np.add.reduce(counts)) <= 2 * len(some)
        sampled[some] = self._timed(
            slots[some], starts[some], counts[some], samples[some], is_short
        )
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
            of_going, positions = slots[going], self._known[slots[going]] + np.int32(place)
            self._model.tokens.put(of_going, positions, sampled[going])
            ones = np.ones(len(going), np.int32)
            sampled[going] = self._timed(of_going, positions, ones, ones > 0, True)
            self._computed[of_going] = positions + 1
            going = going[sampled[going] >= 0]

    def _timed(
        self, slots: Index, starts: Int32s, counts: Int32s, samples: Bools, is_short: bool
    ) -> Int32s:
        """Compute a pass; learn its time if it has about one token per request."""
        began_ms = self._now_ms()
        sampled = self._model.compute(slots, starts, counts, samples)
        ms = self._now_ms() - began_ms
        if is_short:
            self.pass_times.note(len(slots), ms)
        else:
            self.pass_times.note_tokens(int(np.add.reduce(counts)), ms)
        return sampled

    def _allotted(self, pending: Int32s) -> Int32s:
        """Return how many of its `pending` tokens each request computes in the first pass: those
        with the fewest come first, so that a long prompt does not keep others from drafting."""
        behind = self.pass_times.max_tokens(self.catch_up_ms, self._limits.max_tokens)
        num_tokens = min(2 * len(pending) + max(behind, MIN_CATCH_UP), self._limits.max_tokens)
        order = np.argsort(pending, kind="stable")
        before = np.cumsum(pending[order]) - pending[order]
        counts = np.empty_like(pending)
        counts[order] = np.clip(num_tokens - before, 0, pending[order])
        return counts

    def _follow(self, tokens: TokenTable, slots: Index) -> None:
        """Copy new known tokens to the mirror; KV stays valid up to the first that differs."""
        for slot in slots[~self._is_admitted[slots]].tolist():
            request = self._requests[slot]
            assert request is not None, "begin was called"
            self._model.admit(slot, request, int(tokens.prompt_lengths[slot]))
            self._is_admitted[slot] = True
        mirror, known = self._model.tokens, self._known[slots]
        lengths = np.minimum(tokens.lengths[slots], mirror.tokens.shape[1])
        width = int((lengths - known).max(initial=0))
        if width > 0:
            positions = (known[:, None] + np.arange(width)).astype(np.int32)
            row, column = (positions < lengths[:, None]).nonzero()
            at, of_rows = positions[row, column], slots[row]
            new = tokens.at(of_rows, at)
            differs = np.full(len(slots), np.iinfo(np.int32).max, np.int32)
            wrong = mirror.at(of_rows, at) != new
            np.minimum.at(differs, row[wrong], at[wrong])
            mirror.put(of_rows, at, new)
            self._computed[slots] = np.minimum(self._computed[slots], differs)
        self._known[slots] = lengths
        # The last known token is computed for its logits, even if its KV is there.
        self._computed[slots] = np.minimum(self._computed[slots], lengths - 1)

    def _room(self, slots: Index, lengths: Int32s, limits: Int32s) -> Int32s:
        """Return how many drafts the context and the blocks of each request allow; take blocks.

        The last draft is sampled and not computed, so it needs no KV.
        """
        limits = np.minimum(limits, self._limits.max_model_len - lengths)
        wanted = lengths + limits - 1
        for row in ((limits > 0) & (wanted > self._capacity[slots])).nonzero()[0].tolist():
            self._grow(int(slots[row]), int(lengths[row]), int(wanted[row]))
        room: Int32s = np.minimum(limits, self._capacity[slots] - lengths + 1)
        return room

    def _grow(self, slot: int, least: int, wanted: int) -> None:
        """Take blocks for `wanted` tokens, or what is free if that is enough for `least`."""
        held, size = len(self._blocks[slot]), self._limits.block_size
        num = min(-(-wanted // size) - held, len(self._free))
        if num < 1 or (held + num) * size < least:
            return
        taken = np.array([self._free.pop() for _ in range(num)], np.int32)
        self._blocks[slot] = np.concatenate((self._blocks[slot], taken))
        self._capacity[slot] = (held + num) * size
        self._model.set_blocks(slot, held, taken)

"""EagleProposer: drafts from an EAGLE-3 head, for all slots as one batch.

The head has a row for each position p of a request: the target's hidden states at p and the token
at p + 1. Its last row, p = L - 2 of L known tokens, guesses the token at L; each further row takes
the guess and the head's own hidden state in place of the target's. So a call first computes the
rows that the target's last steps made possible, over those that were computed with guesses, and
then a row per further draft.

Hidden states are there for what the target computed lately (HiddenStateRing), not for cached
prefixes and not for all of a long prompt. A request's rows begin at the first position of the
newest unbroken run, its origin, and the head counts positions from there. Where it can count no
further, they begin anew with the newest half of that. Always holds: the first `_computed[slot]`
rows from the origin on are of known tokens and the target's hidden states; a request without the
hidden states at L - 2, or without blocks, has no drafts. Letters: N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.speculative.draft_blocks import DraftBlocks
from quire.speculative.draft_heads import DraftHeadModel, HeadProposer, HeadRows
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.passes import DraftLimits
from quire.speculative.proposer import Drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
HEAD = 0  # there is one
# A head guesses worse with fewer rows before its own; with so many, about as well as with all.
KEPT_STEPS = 16


class _Due(NamedTuple):
    """Rows that can be computed with the target's hidden states: counts[i] from position starts[i]
    of slots[i] on, and how many drafts limits[i] may follow. places: in the call."""

    places: Index
    slots: Index
    starts: Int32s
    counts: Int32s
    limits: Int32s


class EagleProposer(HeadProposer):
    """A CostlyProposer over the head of `model`. now_ms: times the passes."""

    name = "eagle"
    kept_steps = KEPT_STEPS

    def __init__(
        self,
        model: DraftHeadModel,
        ring: HiddenStateRing,
        limits: DraftLimits,
        now_ms: Callable[[], float],
    ) -> None:
        num_slots = limits.num_slots
        super().__init__(model, ring, num_slots, now_ms)
        self._limits = limits
        self.blocks = DraftBlocks(num_slots, limits.num_blocks, limits.block_size, model.set_blocks)
        self._origin: Int32s = np.zeros(num_slots, np.int32)
        self._computed: Int32s = np.zeros(num_slots, np.int32)

    def end(self, slot: int) -> None:
        """See Proposer."""
        super().end(slot)
        self.blocks.release(slot)
        self._origin[slot] = self._computed[slot] = 0

    def possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """See CostlyProposer: none without the newest hidden states, or without blocks."""
        lengths = tokens.lengths[slots]
        room = np.where(self._ring.find(slots, lengths - 2) >= 0, limits, 0)
        if not self.blocks.num_free:
            ends = lengths - 1
            rows, kept = ends - self._origin[slots], self._ring.num_kept(slots)
            # A slot with a gap begins at a new origin.
            rows = np.where(rows - self._computed[slots] > kept, kept, rows)
            held = self.blocks.capacity[slots] + 1 - rows
            room = np.minimum(room, held)
        return np.maximum(room, 0).astype(np.int32)

    def behind_ms(self, tokens: TokenTable, slots: Index) -> Float64s:
        """See CostlyProposer: of rows beyond those that a pass for drafts computes anyway, at most
        those that hidden states are kept of."""
        next_ = self._origin[slots] + self._computed[slots]
        missing = tokens.lengths[slots] - 1 - next_
        if int(np.maximum.reduce(missing, initial=0)) > self.kept_steps:
            missing = np.minimum(missing, self._ring.num_kept(slots))
        behind = np.maximum(missing - 2, 0)
        behind_ms: Float64s = behind * self.pass_times.token_ms
        return behind_ms

    def _compute_drafts(
        self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts
    ) -> None:
        """Compute what is due, and the drafts behind it."""
        lengths = self.mirror.follow(tokens, slots)
        due = self._due(slots, lengths, limits)
        if len(due.places):
            self._draft(due, drafts)

    def _due(self, slots: Index, lengths: Int32s, limits: Int32s) -> _Due:
        """Return what can be computed; take blocks."""
        found: list[tuple[int, int, int, int, int]] = []
        for index, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            end = length - 1
            start = self._start(slot, end)
            if start >= end:
                continue
            room = self._room(slot, end - int(self._origin[slot]), int(limits[index]))
            if room > 0:
                found.append((index, slot, start, end - start, room))
        table: Int32s = np.array(found, np.int32).reshape(-1, 5)
        return _Due(
            places=table[:, 0].astype(np.intp),
            slots=table[:, 1].astype(np.intp),
            starts=table[:, 2],
            counts=table[:, 3],
            limits=table[:, 4],
        )

    def _start(self, slot: int, end: int) -> int:
        """Return the first row of `slot` to compute, of those before `end`; `end` if the last one
        cannot be. A slot with a gap, or at the end of what the head counts, begins at a new
        origin."""
        # The last row is computed for its logits, even if it was before.
        next_ = int(min(self._origin[slot] + self._computed[slot], end - 1))
        self._computed[slot] = max(next_ - self._origin[slot], 0)
        longest = self._limits.max_model_len
        if self._computed[slot] and end - self._origin[slot] <= longest:
            missing = np.arange(next_, end, dtype=np.int32)
            if (self._ring.find(np.full(len(missing), slot), missing) >= 0).all():
                return next_
        first = max(self._ring.first_of_run(slot, end), end - max(longest // 2, 1))
        if first < end:
            self._origin[slot], self._computed[slot] = first, 0
        return first

    def _room(self, slot: int, num_rows: int, limit: int) -> int:
        """Return how many drafts context and blocks allow after `num_rows` rows; take blocks."""
        limit = min(limit, self._limits.max_model_len - num_rows + 1)
        if limit < 1:
            return 0
        wanted = num_rows + limit - 1
        if wanted > self.blocks.capacity[slot]:
            self.blocks.grow(slot, num_rows, wanted)
        return min(limit, int(self.blocks.capacity[slot]) - num_rows + 1)

    def _draft(self, due: _Due, drafts: Drafts) -> None:
        """Compute the rows that are due, then a row per further draft."""
        counts = self._allotted(due.counts, self._limits.max_tokens)
        some, rows = self._rows_of_target(due, counts)
        if not len(some):
            return
        slots, starts, counts = due.slots[some], due.starts[some], counts[some]
        limits, index = due.limits[some], due.places[some]
        sampled, hidden = self._pass(HEAD, rows)
        self._computed[slots] += counts
        known = self.mirror.known[slots]
        going = ((sampled >= 0) & (starts + counts == known - 1)).nonzero()[0]
        for place in range(int(limits.max(initial=0))):
            if not len(going):
                return
            ids, positions = sampled[going], known[going] + np.int32(place)
            drafts.ids[index[going], place] = ids
            drafts.counts[index[going]] = place + 1
            self._model.tokens.put(slots[going], positions, ids)
            more = limits[going] > place + 1
            going, ids, positions = going[more], ids[more], positions[more]
            if not len(going):
                return
            rows = HeadRows(
                slots=slots[going],
                starts=positions - 1 - self._origin[slots[going]],
                counts=np.ones(len(going), np.int32),
                positions=positions + 1,
                token_ids=ids,
                hidden_states=hidden[going],
                fed_back=True,
            )
            sampled[going], hidden[going] = self._pass(HEAD, rows)
            going = going[sampled[going] >= 0]

    def _rows_of_target(self, due: _Due, counts: Int32s) -> tuple[Index, HeadRows]:
        """Return which requests have rows to compute, at most counts[i], and the rows.

        With plans in flight the target's thread may have displaced hidden states that were there
        when `due` was made: such a request has no drafts this time.
        """
        some = counts.nonzero()[0]
        slots, starts, counts = due.slots[some], due.starts[some], counts[some]
        row_of = np.repeat(np.arange(len(slots)), counts)
        within = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]
        positions = (starts[row_of] + within).astype(np.int32)
        places, hidden_states = self._ring.take(slots[row_of], positions)
        is_whole = np.ones(len(slots), np.bool_)
        is_whole[row_of[places < 0]] = False
        if not is_whole.all():
            hidden_states = hidden_states[is_whole[row_of[places >= 0]]]
            is_kept = is_whole[row_of]
            row_of, positions = row_of[is_kept], positions[is_kept]
        token_ids = self._model.tokens.at(slots[row_of], positions + 1)
        slots, starts, counts = slots[is_whole], starts[is_whole], counts[is_whole]
        return some[is_whole], HeadRows(
            slots=slots,
            starts=starts - self._origin[slots],
            counts=counts,
            positions=starts + counts + 1,
            token_ids=token_ids,
            hidden_states=hidden_states,
        )

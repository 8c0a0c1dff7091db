"""DraftRows: proposed tokens for rows of running requests, and what came of them.

Drafts are added to a plan at its end: they take tokens and blocks that its other rows leave, so
they never displace a row or preempt a request. A row with k drafts computes k + 1 positions. Of
these only the first counts as computed until the result is known; then as many as the answer
confirms. Knows no proposers and no tokens' meaning. Always holds: a request with drafts in flight
has no row in a later plan; `computed` and `scheduled` count accepted positions only, so that no
block with a rejected token becomes findable.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.records import StepPlan, StepResult
from quire.cache.manager import CacheManager
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.in_flight import PlanOutcome
from quire.scheduler.interfaces import DraftCost, DraftSource, KVDraftSource, StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import Index, Int32s, RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.step_budget import BlockShares


class Rows(NamedTuple):
    """Rows of a plan. slot_index and slots are the same, ends are starts + counts."""

    slot_index: Index
    slots: Int32s
    starts: Int32s
    counts: Int32s
    ends: Int32s
    store_from: Int32s
    sample_counts: Int32s


class VerifiedRows(NamedTuple):
    """Rows with drafts of a plan that has ended: slots, first positions, and accepted drafts."""

    slots: Index
    starts: Int32s
    accepted: Int32s


class DraftRows(StepExtension):
    """Of one scheduler. is_active: a request that speculates may be live.

    was_used: whether drafts were computed or verified. rejected: by row of the last plan with
    drafts, how many of them were not accepted.
    """

    def __init__(
        self,
        requests: RequestTable,
        batch: RunningBatch,
        cache: CacheManager,
        shares: BlockShares,
        speed: SpeedEstimate,
        source: DraftSource,
        *,
        plans_in_flight: int,
    ) -> None:
        self._requests, self._batch, self._cache, self._shares = requests, batch, cache, shares
        self._speed, self._source = speed, source
        self._kv_source = source if isinstance(source, KVDraftSource) else None
        self._overlaps = plans_in_flight > 1
        num_slots = len(batch.sequences)
        self._max_drafts: Int32s = np.zeros(num_slots, np.int32)  # 0: does not speculate
        self._sequences: list[SequenceState | None] = [None] * num_slots
        self._active: Index | None = None  # batch.active when these were filled
        self._stats = DraftStats()
        self.was_used = False
        self.rejected: Int32s = np.zeros(0, np.int32)
        self._drafting_ms = 0.0  # of the source, when it was asked last

    def take_drafting_ms(self) -> float:
        """Return the milliseconds that drafts were computed since the last call."""
        before, self._drafting_ms = self._drafting_ms, self._source.drafting_ms
        return self._drafting_ms - before

    @property
    def fields(self) -> dict[str, Any]:
        """Counters of drafts, as fields of EngineStats."""
        return {
            "drafting_ms_total": self._source.drafting_ms,
            "draft_rows_total": self._stats.rows_total,
            "draft_tokens_total": tuple(self._stats.drafted_at.tolist()),
            "accepted_draft_tokens_total": tuple(self._stats.accepted_at.tolist()),
        }

    def note(self, sequence: SequenceState) -> None:
        """Note a new request that speculates."""
        self.is_active = True

    def begin_step(self, step: Step) -> None:
        """Let requests that will speculate wait until their last token is known."""
        batch = self._batch
        if batch.active is not self._active:
            self._enter_slots()
        if not self._overlaps or not self.is_active:
            return
        index = batch.active
        late = batch.scheduled[index] >= batch.tokens.lengths[index]
        limits = self._limits(index, batch.tokens.lengths[index])
        index, limits = index[late & (limits > 0)], limits[late & (limits > 0)]
        if len(index):
            waits = self._source.would_propose(batch.tokens, index, limits)
            step.paused += index[waits].tolist()

    def end_step(self, step: Step) -> None:
        """Add drafts to the plan's rows, as far as its budget and free blocks reach."""
        batch = self._batch
        if batch.active is not self._active:  # requests were admitted in this step
            self._enter_slots()
        if not step.builder.has_rows or not self._max_drafts.any() or self._source.skips_step():
            return
        rows = Rows(*step.builder.joined_rows())
        is_known = rows.ends == batch.tokens.lengths[rows.slot_index]
        can = is_known & (rows.counts == 1) & (rows.sample_counts == 1)
        places = (can & (self._limits(rows.slot_index, rows.ends) > 0)).nonzero()[0]
        if not len(places) or step.budget.spent:
            return
        index, ends = rows.slot_index[places], rows.ends[places]
        limits = self._limits(index, ends)
        if self._kv_source is not None:
            capacities = self._stored_capacities(step, rows, places)
            self._kv_source.note_kv(index, self._cache.tables.blocks[index], capacities)
        counts, ids = self._source.propose(
            batch.tokens, index, limits, lambda: self._cost(rows, ends)
        )
        self.was_used |= self._source.drafting_ms > 0.0
        if not len(ids):
            return
        fits = step.budget.allot(ends, counts)
        fits = np.minimum(fits, self._blocks(step, index, ends, fits))
        if not fits.any():
            return
        if self._kv_source is not None:  # blocks in which the next drafts can be computed
            grows = index[fits > 0]
            ahead = np.minimum(
                fits + 1 + self._source.max_drafts, self._batch.ceiling[index] - ends
            )
            self._blocks(step, grows, ends[fits > 0], ahead[fits > 0])
        in_fit = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        of_rows = np.zeros(len(rows.slot_index), np.int32)
        of_rows[places] = fits
        drafted = rows._replace(
            counts=rows.counts + of_rows, sample_counts=rows.sample_counts + of_rows
        )  # `ends` stay before the drafts: these are not computed until they are accepted
        step.builder.set_drafts(drafted, of_rows, ids[in_fit < np.repeat(fits, counts)])
        self._await_run(index[fits > 0])

    def verify(self, plan: StepPlan, result: StepResult, outcome: PlanOutcome) -> VerifiedRows:
        """Compare the runs of a plan with its drafts, before the runs are appended in full."""
        rows = np.arange(len(plan.slots)) if outcome.rows is None else outcome.rows
        counts = plan.draft_counts[rows]
        has_drafts = counts > 0
        rows, counts = rows[has_drafts], counts[has_drafts]
        index = plan.slots[rows].astype(np.intp)
        width = int(counts.max(initial=0))
        columns = np.arange(width)
        drafts = _padded(plan.draft_ids, plan.draft_counts, rows, width)
        firsts = np.cumsum(result.token_counts) - result.token_counts
        entries = firsts[rows, None] + columns
        is_run = columns < result.token_counts[rows, None]
        tokens = result.token_ids[np.where(is_run, entries, 0)]
        same = is_run & (tokens == drafts)
        accepted: Int32s = np.cumprod(same, axis=1).sum(axis=1).astype(np.int32)
        self.rejected = plan.draft_counts.copy()
        self.rejected[rows] -= accepted
        self._stats.count(counts, accepted)
        self.was_used = True
        for slot, num, good in zip(index.tolist(), counts.tolist(), accepted.tolist(), strict=True):
            sequence = self._batch.sequence(slot)
            sequence.accepted_drafts += good
            sequence.rejected_drafts += num - good
        self._source.verified(index, counts, accepted)
        return VerifiedRows(index, plan.starts[rows], accepted)

    def advance(self, verified: VerifiedRows) -> None:
        """Count the accepted positions as computed. The runs were appended."""
        index, starts, accepted = verified
        last = self._batch.tokens.lengths[index] - 1
        batch = self._batch
        batch.scheduled[index] = batch.computed[index] = np.minimum(starts + 1 + accepted, last)
        batch.goal[index] = np.minimum(last + 1, batch.ceiling[index])
        batch.forget_totals()

    def _await_run(self, index: Index) -> None:
        """Plan no further rows of slots `index` until `advance`: how many tokens their rows in
        flight yield is open."""
        self._batch.goal[index] = self._batch.scheduled[index]
        self._batch.forget_totals()

    def _enter_slots(self) -> None:
        """Note which requests are in the slots now."""
        batch, found = self._batch, False
        self._active = batch.active
        for slot, known in enumerate(self._sequences):
            sequence = batch.sequences[slot]
            if sequence is not known:
                if known is not None and self._max_drafts[slot]:
                    self._source.end(slot)
                self._sequences[slot] = sequence
                self._max_drafts[slot] = 0 if sequence is None else self._begin(slot, sequence)
            found |= self._max_drafts[slot] > 0
        if not found:
            live = self._requests.sequences.values()
            self.is_active = any(one.request.speculation is not None for one in live)

    def _begin(self, slot: int, sequence: SequenceState) -> int:
        """Return how many drafts a request may have per step; 0 where none are made for it.

        The state of mirostat and the candidates of beams depend on each sampled token.
        """
        request = sequence.request
        if request.speculation is None or sequence.group is not None or request.sampling.mirostat:
            return 0
        self._source.begin(slot, request)
        return min(request.speculation.max_drafts, self._source.max_drafts)

    def _limits(self, index: Index, lengths: Int32s) -> Int32s:
        """Return how many drafts may follow the known tokens: a run has one token more."""
        limits: Int32s = np.minimum(self._max_drafts[index], self._batch.ceiling[index] - lengths)
        return np.maximum(limits, np.int32(0))

    def _cost(self, rows: Rows, ends: Int32s) -> DraftCost:
        price = self._speed.now
        rows_ms = float(np.add.reduce(price.rows_ms(rows.starts, rows.counts)))
        num_sampled = int(np.count_nonzero(rows.sample_counts))
        return DraftCost(
            step_ms=price.fixed_ms + rows_ms + num_sampled * price.score_ms,
            step_tokens=num_sampled,
            draft_ms=price.token_ms + price.score_ms + price.position_ms * ends.astype(np.float64),
        )

    def _blocks(self, step: Step, index: Index, ends: Int32s, counts: Int32s) -> Int32s:
        """Return how many drafts the blocks of `index` hold, with free ones where there are."""
        needs = self._cache.blocks_short(index, ends + counts)
        grows = (needs > 0).nonzero()[0]
        if len(grows):
            self._shares.changed()
            if self._shares.can_grow(index[grows], needs[grows]):
                step.builder.add_deltas(self._cache.allocate(index[grows], needs[grows]))
        room: Int32s = np.maximum(self._cache.capacities[index] - ends, 0)
        return room

    def _stored_capacities(self, step: Step, rows: Rows, places: Index) -> Int32s:
        """Return how many positions of the requests in rows `places` are in blocks that the worker
        knows and that only the request writes; 0 while an earlier row is in flight.

        Entries of the plan being made are not in effect: the block may still be saved to a tier, or
        be the target of a copy.
        """
        index, size = rows.slot_index[places], self._cache.block_size
        firsts = self._cache.tables.counts.copy()  # of entries that the worker does not know
        for deltas in step.builder.deltas:
            np.minimum.at(firsts, deltas.slots, deltas.columns)
        capacities = firsts[index] * np.int32(size)
        starts = rows.starts[places]
        stores = (self._batch.computed[index] == starts) & (rows.store_from[places] <= starts)
        return np.where(stores, capacities, np.int32(0))


class DraftStats:
    """Drafts in all. accepted_at: by position in the draft, from 0 on; drafted_at likewise."""

    def __init__(self) -> None:
        self.rows_total = 0
        self.drafted_at = np.zeros(0, np.int64)
        self.accepted_at = np.zeros(0, np.int64)

    def count(self, drafted: Int32s, accepted: Int32s) -> None:
        """Add rows with drafted[i] drafts, of which the first accepted[i] were right."""
        width = int(drafted.max(initial=0))
        if width > len(self.drafted_at):
            more = width - len(self.drafted_at)
            self.drafted_at = np.pad(self.drafted_at, (0, more))
            self.accepted_at = np.pad(self.accepted_at, (0, more))
        self.rows_total += len(drafted)
        columns = np.arange(width)
        self.drafted_at[:width] += np.count_nonzero(columns < drafted[:, None], axis=0)
        self.accepted_at[:width] += np.count_nonzero(columns < accepted[:, None], axis=0)


def _padded(ids: Int32s, counts: Int32s, rows: Index, width: int) -> NDArray[np.int32]:
    """Return the ids of `rows` [R, width], padded with -1; counts[i] of them are of row i."""
    firsts = np.cumsum(counts) - counts
    columns = np.arange(width)
    has = columns < counts[rows, None]
    padded = np.full((len(rows), width), -1, np.int32)
    padded[has] = ids[(firsts[rows, None] + columns)[has]]
    return padded

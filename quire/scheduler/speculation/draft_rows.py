"""DraftRows: proposed tokens for rows of running requests, and what came of them.

Drafts are added to a plan at its end: they take tokens and blocks that its other rows leave, so
they never displace a row or preempt a request. A row with k drafts computes k + 1 positions. Of
these only the first counts as computed until the result is known; then as many as the answer
confirms. Knows no proposers and no tokens' meaning. Always holds: a request with drafts in flight
has no row in a later plan; `computed` and `scheduled` count accepted positions only, so that no
block with a rejected token becomes findable; while the source rests, no hook of a step is called,
and which requests came and went is found out afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quire import _native
from quire.base.records import StepPlan, StepResult
from quire.cache.manager import CacheManager
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.in_flight import PlanOutcome
from quire.scheduler.interfaces import DraftCost, DraftSource, StepExtension
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.plan_builder import Step
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import Bools, Index, Int32s, RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.speculation.draft_prices import DraftedStep
from quire.scheduler.speculation.draft_stats import DraftStats
from quire.scheduler.speculation.plain_steps import TIMED_STEPS, PlainSteps
from quire.scheduler.step_budget import BlockShares

# Predictions kept for plans in flight.
MAX_PREDICTED = 16
NEVER = 1 << 62  # a step that does not come
# Where the source notes steps without drafts, one is noted for all that took together so many
# milliseconds: noting each would take a part of the step of a small model.
NOTED_MS, MAX_NOTED_STEPS = 4.0, 16
# Their mean counts as at most so many times the last one: no request may have run in between.
MAX_NOTED_TIMES = 1.25


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
    """Of one scheduler. is_active: a request that speculates may be live, and the source does not
    rest.

    is_resting: the source rests. noted_from: `took` must be called for plans from this step on.
    proposer: the name of its kind. was_used: whether drafts were computed or verified, or failed;
    no property, as a plain chat asks for it too. rejected: by row of the last plan with drafts, how
    many of them were not accepted.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        requests: RequestTable,
        batch: RunningBatch,
        cache: CacheManager,
        shares: BlockShares,
        speed: SpeedEstimate,
        source: DraftSource,
    ) -> None:
        self._requests, self._batch, self._cache, self._shares = requests, batch, cache, shares
        self._source, self._overlaps = source, limits.plans_in_flight > 1
        num_slots = len(batch.sequences)
        self._max_drafts: Int32s = np.zeros(num_slots, np.int32)  # 0: does not speculate
        self._sequences: list[SequenceState | None] = [None] * num_slots
        self._preemptions = [0] * num_slots  # of these before they entered
        self._num_speculating = 0
        self._active: Index | None = None  # batch.active when these were filled
        self._waiting = batch.active[:0]  # slots paused in this step, for drafts in the next one
        self.noted_from = NEVER
        # The latter: a live request may bring a prediction that the source does not know yet.
        self.is_resting = self._may_predict = False
        self._rest_from = self._rest_until = 0  # steps: the last one noted, and the last of all
        self._rest_active: Index | None = None  # batch.active when these were noted
        self._rest_sequences: list[SequenceState | None] = []  # by slot
        self._took_step, self._took_at_ms = 0, 0.0  # of the last call of `took`
        self._num_arrived = 0  # requests that the source knows of before they enter
        self._stats = DraftStats(source.max_drafts)
        self._prediction_stats = DraftStats(source.max_drafts)  # of those: from predictions
        self._plain = PlainSteps(speed, overlaps=self._overlaps)
        self._predicted: dict[int, DraftedStep] = {}  # of plans in flight with drafts, by step
        self.proposer, self.was_used = source.proposer_name, False
        self.rejected: Int32s = np.zeros(0, np.int32)
        self._drafting_ms = 0.0  # of the source, when it was asked last
        self._saved_ms = self._added_ms = 0.0  # by accepted drafts, and to steps with drafts
        # Of the last step with drafts, until it is verified: its time, what was predicted, and what
        # computing them took.
        self._timed: tuple[float, DraftedStep, float] | None = None

    def took(self, plan: StepPlan, ms: float, *, follows: bool) -> float:
        """Note that a plan took `ms`; return what the cost model may learn from it: 0 for nothing.

        follows: it was submitted while another was computed, as all are in turn without drafts. The
        first one after drafts is not: the host's time for it is not hidden, and it says nothing of
        what others take. Passes of a draft model are no cost of rows, and steps with drafts have
        prices of their own.
        """
        if not (self.is_active or self.is_resting):
            return ms
        source = self._source
        try:
            computed_ms = source.drafting_ms - self._drafting_ms
            predicted = self._predicted.pop(plan.step, None) if self._predicted else None
            self._drafting_ms = source.drafting_ms
            ms -= computed_ms
            if predicted is None:
                is_timed = self._plain.num_untimed and plan.layers is None
                if is_timed and plan.num_tokens == len(plan.slots):
                    self._plain.note(plan, ms, follows=follows)
                    source.plain_ms = ms
                if computed_ms or source.notes_plain_steps:
                    each_ms, num_steps = self._plain_since(plan, ms)
                    source.note_step(each_ms, None, computed_ms, num_steps)
            else:
                self._plain.note_drafted(predicted, ms)
                self._timed = (ms, predicted, computed_ms)
            if self.is_resting:
                self._note_rest(plan)
            self._took_step, self._took_at_ms = plan.step, self._requests.now_ms
            self.noted_from = self._rest_until if self.is_resting else NEVER
            if self._plain.num_untimed or self._predicted:
                self.noted_from = 0
            elif source.notes_plain_steps:
                num_steps = min(int(NOTED_MS / max(ms, 1e-3)), MAX_NOTED_STEPS)
                self.noted_from = min(self.noted_from, plan.step + max(num_steps, 1))
            return ms if predicted is None else 0.0
        except Exception as error:  # noqa: BLE001  prices change no answer
            source.fail(error)
            self.was_used = True
            return 0.0

    def _plain_since(self, plan: StepPlan, ms: float) -> tuple[float, int]:
        """Return what a step without drafts took since the last one noted, and how many of them
        there were, with `plan`."""
        num_steps = plan.step - self._took_step
        if not 1 < num_steps <= MAX_NOTED_STEPS:
            return ms, 1
        each_ms = (self._requests.now_ms - self._took_at_ms) / num_steps
        return min(each_ms, MAX_NOTED_TIMES * ms), num_steps

    @property
    def fields(self) -> dict[str, Any]:
        """Counters of drafts, as fields of EngineStats."""
        return {
            "drafting_ms_total": self._source.drafting_ms,
            "draft_saved_ms_total": self._saved_ms,
            "draft_added_ms_total": self._added_ms,
            "draft_proposer_errors_total": self._source.num_proposer_errors,
            "draft_errors_total": self._source.num_errors,
            "draft_rows_total": self._stats.rows_total,
            "draft_tokens_total": self._stats.drafted_at,
            "accepted_draft_tokens_total": self._stats.accepted_at,
            "prediction_rows_total": self._prediction_stats.rows_total,
            "prediction_tokens_total": self._prediction_stats.drafted_at,
            "accepted_prediction_tokens_total": self._prediction_stats.accepted_at,
        }

    def note(self, sequence: SequenceState) -> None:
        """Note a new request that speculates."""
        source, predicts = self._source, _predicts(sequence)  # it may have drafts at once
        self._may_predict |= predicts
        if self.is_resting:
            # Requests that are paused for their client have no slots.
            live = self._requests.sequences.values()
            is_alone = not len(self._batch.active) and all(one.is_held for one in live)
            wakes = predicts or (source.asks_predictions_only and _uses_proposer(sequence))
            if not (wakes or is_alone):
                return
            self._pass_rest(self._requests.in_flight.step)
            if is_alone:
                source.note_arrivals(0, 1)
            if source.rest_steps and not wakes:
                return
            if source.notes_rests:
                source.note_rest(self._requests.in_flight.step, 0)
        self.is_resting, self.is_active, self.noted_from = False, True, 0

    def begin_step(self, step: Step) -> None:
        """Let requests that will speculate wait until their last token is known."""
        batch = self._batch
        if batch.active is not self._active and (self._overlaps or self._source.learns):
            if self._source.learns:
                self._learn_outputs()
            self._enter_slots()
        if not self._overlaps:
            return
        self._waiting = batch.active[:0]
        if not self._num_speculating or self._plain.left or self._source.rest_steps:
            return
        index, lengths = batch.active, batch.tokens.lengths[batch.active]
        limits: Int32s = np.minimum(self._max_drafts[index], batch.ceiling[index] - lengths)
        late = (batch.scheduled[index] >= lengths) & (limits > 0)
        index, limits = index[late], limits[late]
        if len(index):
            waits = self._source.would_propose(batch.tokens, index, limits)
            self._waiting = index[waits]
            step.paused += self._waiting.tolist()

    def end_step(self, step: Step) -> None:
        """Add drafts to the plan's rows, as far as its budget and free blocks reach."""
        batch = self._batch
        has_tokens = step.budget.tokens > 0
        if batch.active is not self._active and (has_tokens or not self._source.may_begin_late):
            self._enter_slots()  # requests were admitted since
        if not self._num_speculating or not has_tokens:
            return
        if self._plain.left and step.builder.has_rows:
            self._plain.left -= 1
            return
        if self._source.skips_step(batch.tokens, lambda: self._able_slots(step)):
            self._begin_rest(step.builder.step)
            return
        if step.budget.spent or not step.builder.has_rows:
            return
        rows = Rows(*step.builder.joined_rows())
        self.noted_from, self._plain.num_untimed = 0, TIMED_STEPS
        is_due = self._source.takes_plain_step()
        if self._plain.begin_if_due(rows.counts, rows.ends, step.builder.step, is_due=is_due):
            return
        can, limits = self._able(rows, step)
        if not (num_able := int(np.add.reduce(can))):
            return
        index, ends, places = rows.slot_index, rows.ends, None
        if num_able < len(can):
            places = can.nonzero()[0]
            index, ends, limits = index[places], ends[places], limits[places]
        if self._source.uses_cache:
            capacities = self._stored_capacities(step, rows, can.nonzero()[0])
            self._source.note_kv(index, self._cache.tables.blocks[index], capacities)
        costs: list[DraftCost] = []

        def cost() -> DraftCost:
            if not costs:
                most = int(np.add.reduce(limits))
                costs.append(self._plain.cost(rows.starts, rows.counts, rows.ends, ends, most))
            return costs[0]

        self._plain.note_ask(step.builder.step)
        counts, ids = self._source.propose(batch.tokens, index, limits, cost)
        failed = self._source.num_errors > 0 or self._source.num_proposer_errors > 0
        self.was_used |= failed or self._source.drafting_ms > 0.0
        if not len(ids):
            if costs:
                self._plain.prices.fade()
            return
        fits = step.budget.allot(ends, counts)
        fits = np.minimum(fits, self._blocks(step, index, ends, fits))
        has_drafts = fits > 0
        if not np.logical_or.reduce(has_drafts):
            return
        if self._source.uses_cache:  # blocks in which the next drafts can be computed
            grows, room = index[has_drafts], self._batch.ceiling[index] - ends
            ahead = np.minimum(fits + 1 + self._source.max_drafts, room)
            self._blocks(step, grows, ends[has_drafts], ahead[has_drafts])
        if np.logical_or.reduce(fits < counts):
            in_fit = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
            ids = ids[in_fit < np.repeat(fits, counts)]
        of_rows = fits
        if places is not None:
            of_rows = np.zeros(len(rows.slot_index), np.int32)
            of_rows[places] = fits
        drafted = rows._replace(
            counts=rows.counts + of_rows, sample_counts=rows.sample_counts + of_rows
        )  # `ends` stay before the drafts: these are not computed until they are accepted
        step.builder.set_drafts(drafted, of_rows, ids)
        self._await_run(index[has_drafts])
        if len(self._predicted) > MAX_PREDICTED:  # left by steps with errors, which teach nothing
            self._predicted.clear()
        num_rows, num_drafts, price = int(np.add.reduce(has_drafts)), len(ids), cost()
        num_positions = int(np.add.reduce(rows.counts))
        added_ms = float(price.added_ms[num_drafts]) + num_rows * price.row_ms
        self._predicted[step.builder.step] = DraftedStep(
            num_rows,
            num_positions + num_drafts,
            price.step_ms,
            added_ms - self._plain.prices.after_ms,
            self._plain.prompts_ms,
        )

    def _able(self, rows: Rows, step: Step) -> tuple[Bools, Int32s]:
        """Return which of `rows` of a step may have drafts, and these how many: those that sample
        one token after all known ones, and may have another."""
        index, ends = rows.slot_index, rows.ends
        limits: Int32s = np.minimum(self._max_drafts[index], self._batch.ceiling[index] - ends)
        can: Bools = (ends == self._batch.tokens.lengths[index]) & (limits > 0)
        can &= (rows.counts == 1) & (rows.sample_counts == 1)
        if self._source.notes_rests and step.builder.admissions:
            admitted = [one.slot for one in step.builder.admissions]
            can &= ~np.isin(index, admitted)  # none of their steps has left anything behind
        return can, limits

    def _able_slots(self, step: Step) -> Index:
        """Return the slots that may have drafts in a step, and those that wait for the next one."""
        if step.budget.spent or not step.builder.has_rows:
            return self._waiting
        rows = Rows(*step.builder.joined_rows())
        can, _ = self._able(rows, step)
        able = rows.slot_index[can]
        return np.concatenate((self._waiting, able)) if self._overlaps else able

    def _begin_rest(self, step: int) -> None:
        """Take no part in the steps after `step`, as long as the source rests."""
        self.was_used |= self._source.num_errors > 0 or self._source.num_proposer_errors > 0
        num_steps = self._source.rest_steps
        if num_steps < 2 or not self._source.may_begin_late:
            return
        if self._may_predict:
            self._may_predict = self._awaits(_predicts)
        # A rest of predictions says nothing of the engine's proposer.
        wakes = self._source.asks_predictions_only and self._awaits(_uses_proposer)
        if not (self._may_predict or wakes):
            self.is_active, self.is_resting, self._rest_from = False, True, step
            self._rest_active = self._batch.active
            self._rest_sequences = self._batch.sequences.copy()
            self._rest_until = step + num_steps - self._overlaps
            if self._source.notes_rests:
                self._source.note_rest(step, num_steps)
            if self._rest_until < self.noted_from:
                self.noted_from = self._rest_until

    def _awaits(self, is_such: Callable[[SequenceState], bool]) -> bool:
        """Return whether such a request lives that the source does not know yet."""
        live, known = self._requests.sequences.values(), self._sequences
        return any(is_such(one) and known[one.slot] is not one for one in live)

    def _note_rest(self, plan: StepPlan) -> None:
        """Note that the rest has come to `plan`; it ends where its steps are over."""
        source, active = self._source, self._batch.active
        self._pass_rest(plan.step)
        if active is not self._rest_active:
            before, now = self._rest_sequences, self._batch.sequences.copy()
            self._rest_active, self._rest_sequences = active, now
            pairs = zip(before, now, strict=True)
            if num_new := len([new for old, new in pairs if new is not old and new is not None]):
                source.note_arrivals(num_new, len(active))
                self._num_arrived += num_new
        num_steps = source.rest_steps
        self._rest_until = self._rest_from + num_steps - self._overlaps
        is_over = num_steps <= self._overlaps
        if source.notes_rests:
            source.note_rest(plan.step, 0 if is_over else num_steps)
        if is_over:
            self.is_resting, self.is_active = False, True

    def _pass_rest(self, step: int) -> None:
        """Let the source know of the steps of its rest up to `step`."""
        if step > self._rest_from:
            self._source.rested(step - self._rest_from)
            self._rest_from = step

    def verify(self, plan: StepPlan, result: StepResult, outcome: PlanOutcome) -> VerifiedRows:
        """Compare the runs of a plan with its drafts, before the runs are appended in full."""
        drafted, num_rows = plan.draft_counts, len(plan.slots)
        self._predicted.pop(plan.step, None)  # there still, if the step was not timed
        accepted = np.empty(num_rows, np.int32)
        tokens = (result.token_counts, result.token_ids)
        _native.count_accepted(drafted, plan.draft_ids, *tokens, accepted)
        self.rejected = drafted - accepted
        index, starts = plan.slots, plan.starts
        rows = outcome.rows
        if rows is not None and len(rows) < num_rows:  # what left or failed has accepted nothing
            self.rejected = drafted.copy()
            self.rejected[rows] -= accepted[rows]
            drafted, accepted = drafted[rows], accepted[rows]
            index, starts = index[rows], starts[rows]
        has_drafts = drafted > 0
        if not np.logical_and.reduce(has_drafts):
            drafted, accepted = drafted[has_drafts], accepted[has_drafts]
            index, starts = index[has_drafts], starts[has_drafts]
        self.was_used = True
        nums, goods = drafted.tolist(), accepted.tolist()
        for slot, num, good in zip(index.tolist(), nums, goods, strict=True):
            sequence = self._batch.sequence(slot)
            sequence.accepted_drafts += good
            sequence.rejected_drafts += num - good
        self._stats.count(nums, goods)
        slots = index.astype(np.intp)
        if (predicted := self._source.from_prediction) is not None:
            of_some = predicted[slots]
            self._prediction_stats.count(drafted[of_some].tolist(), accepted[of_some].tolist())
        self._source.verified(slots, drafted, accepted)
        if self._timed is not None:
            try:
                self._note_gain(*self._timed, plan, int(np.add.reduce(accepted)))
            except Exception as error:  # noqa: BLE001  prices change no answer
                self._source.fail(error)
        return VerifiedRows(slots, starts, accepted)

    def _note_gain(
        self,
        ms: float,
        predicted: DraftedStep,
        computed_ms: float,
        plan: StepPlan,
        num_accepted: int,
    ) -> None:
        """Let the source know what the accepted drafts of a step gained: as much time as so many
        tokens take without drafts, less what the step took longer."""
        self._timed = None
        plain_ms, added_ms = predicted.plain_ms, predicted.added_ms
        if not predicted.prompts_ms:  # the predicted time of a prompt is a rough guess
            added_ms = ms - plain_ms
        added_ms += self._plain.prices.after_ms
        saved_ms = num_accepted * plain_ms / len(plan.slots)
        self._saved_ms += saved_ms
        self._added_ms += added_ms
        self._source.note_step(plain_ms, saved_ms - added_ms, computed_ms, added_ms=added_ms)
        self.noted_from = 0  # the source may note steps without drafts now

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

    def _learn_outputs(self) -> None:
        """Note the outputs of requests that have ended since the last step.

        Their rows of the table are intact as long as no request was admitted.
        """
        tokens = self._batch.tokens
        for slot, known in enumerate(self._sequences):
            if known is None or known.alive or not self._max_drafts[slot]:
                continue
            begin, end = known.num_prompt_tokens, int(tokens.lengths[slot])
            self._source.learn(slot, tokens.tokens[slot, begin:end])

    def _enter_slots(self) -> None:
        """Note which requests are in the slots now."""
        batch = self._batch
        self._active = batch.active
        before, now, preemptions = self._sequences, batch.sequences, self._preemptions
        changed = [
            slot
            for slot, (old, new, count) in enumerate(zip(before, now, preemptions, strict=True))
            if old is not new or (new is not None and new.preemption.count != count)
        ]
        num_new = -self._num_arrived
        for slot in changed:
            old = before[slot]
            if old is not None and self._max_drafts[slot]:
                self._source.end(slot)
                self._num_speculating -= 1
                self._may_predict |= old.alive and _predicts(old)  # it comes back
            before[slot] = sequence = now[slot]
            preemptions[slot] = 0 if sequence is None else sequence.preemption.count
            self._max_drafts[slot] = num = 0 if sequence is None else self._begin(slot, sequence)
            self._num_speculating += num > 0
            num_new += num > 0
        self._num_arrived = 0
        if num_new > 0:
            self._source.note_arrivals(num_new, self._num_speculating)
        if not self._num_speculating:
            live = self._requests.sequences.values()
            self.is_active = any(one.request.speculation is not None for one in live)
            if not self.is_active:
                self.noted_from = NEVER

    def _begin(self, slot: int, sequence: SequenceState) -> int:
        """Return how many drafts a request may have per step; 0 where none are made for it.

        The state of mirostat and the candidates of beams depend on each sampled token.
        """
        request = sequence.request
        if request.speculation is None or sequence.group is not None or request.sampling.mirostat:
            return 0
        self._source.begin(slot, request)
        return min(request.speculation.max_drafts, self._source.max_drafts)

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


def _predicts(sequence: SequenceState) -> bool:
    """Return whether a request brings a prediction."""
    speculation = sequence.request.speculation
    return speculation is not None and len(speculation.prediction_ids) > 0


def _uses_proposer(sequence: SequenceState) -> bool:
    """Return whether a request asks the engine's proposer."""
    speculation = sequence.request.speculation
    return speculation is not None and speculation.uses_proposer

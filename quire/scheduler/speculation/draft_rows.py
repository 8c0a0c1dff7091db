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

from collections.abc import Sequence
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
from quire.scheduler.speculation.draft_prices import DraftedStep, DraftPrices
from quire.scheduler.speculation.step_curve import bucket_of
from quire.scheduler.step_budget import BlockShares

# Predictions kept for plans in flight.
MAX_PREDICTED = 16
# Steps without drafts in turn until one can be timed, to judge drafts against, and one more where
# plans overlap: the first after drafts is slower than those that follow it, and does not overlap.
# Short steps are slower until about so many milliseconds have passed; so many steps at most count.
PLAIN_STEPS, SETTLING_MS, MAX_PLAIN_STEPS = 2, 3.0, 8
# So many are timed after these.
TIMED_STEPS = 2
# Where no step of about as many rows was timed, steps without drafts are made once in so many
# steps: prompts may come between them, so that none is timed.
FIRST_RUN_EVERY = 128
NEVER = 1 << 62  # a step that does not come
# Where the source wants to know of steps without drafts, one is noted for all that took together so
# many milliseconds: noting each would take a part of the step of a small model.
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
        self._speed, self._source = speed, source
        self._overlaps = limits.plans_in_flight > 1
        num_slots = len(batch.sequences)
        self._max_drafts: Int32s = np.zeros(num_slots, np.int32)  # 0: does not speculate
        self._sequences: list[SequenceState | None] = [None] * num_slots
        self._preemptions = [0] * num_slots  # of these before they entered
        self._num_speculating = 0
        self._active: Index | None = None  # batch.active when these were filled
        self.noted_from = NEVER
        self.is_resting = self._may_predict = False  # the latter: a live request may
        self._rest_from = self._rest_until = 0  # steps: the last one noted, and the last of all
        self._rest_active: Index | None = None  # batch.active when these were noted
        self._rest_sequences: list[SequenceState | None] = []  # by slot
        self._took_step, self._took_at_ms = 0, 0.0  # of the last call of `took`
        self._num_arrived = 0  # requests that the source knows of before they enter
        self._stats = DraftStats(source.max_drafts)
        self._prediction_stats = DraftStats(source.max_drafts)  # of those: from predictions
        self._prices = DraftPrices()
        # Steps without drafts: how many come in turn until one can be timed, are due, are made
        # still; come since drafts were asked for, and are timed still.
        self._plain_steps = PLAIN_STEPS + self._overlaps
        self._plain_due, self._plain_left = self._plain_steps - 1, 0
        self._num_plain, self._num_timed = 0, TIMED_STEPS
        # What the steps since one with drafts took longer than they do without; None: that is over.
        self._after_ms: float | None = None
        self._asked_step = 0  # the last for which drafts were asked for
        self._known_rows = 0  # steps of so many without drafts were timed
        self._first_runs: dict[int, int] = {}  # when some were made to be timed, by bucket of rows
        self._prompts_ms = 0.0  # what prompts add to the step for which the price was asked last
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
                is_timed = self._num_timed and plan.layers is None
                if is_timed and plan.num_tokens == len(plan.slots):
                    self._note_plain(plan, ms, follows=follows)
                if computed_ms or source.notes_plain_steps:
                    each_ms, num_steps = self._plain_since(plan, ms)
                    source.note_step(each_ms, None, computed_ms, num_steps)
            else:
                self._num_plain = 0
                self._prices.note(predicted, ms)
                self._end_after()
                self._after_ms = 0.0
                self._timed = (ms, predicted, computed_ms)
            if self.is_resting:
                self._note_rest(plan)
            self._took_step, self._took_at_ms = plan.step, self._requests.now_ms
            self.noted_from = self._rest_until if self.is_resting else NEVER
            if self._num_timed or self._predicted:
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

    def _note_plain(self, plan: StepPlan, ms: float, *, follows: bool) -> None:
        """Learn from a step without drafts, of one position a row."""
        num_rows = len(plan.slots)
        self._num_plain += 1
        if plan.step == self._asked_step:  # in vain
            self._end_after()
            if not plan.admissions:
                self._prices.note_asked(num_rows, ms)
        elif follows or self._num_plain >= self._plain_steps:
            self._end_after()
            self._num_timed -= 1
            self._prices.note_plain(num_rows, ms)
            self._known_rows = 0
        elif self._after_ms is not None:
            self._after_ms += self._prices.excess_ms(num_rows, ms)

    def _end_after(self) -> None:
        """Let the price of a step with drafts have what later ones took longer for it."""
        if self._after_ms is not None:
            self._prices.note_after(self._after_ms)
            self._after_ms = None

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
            is_alone = not self._requests.sequences
            if not (predicts or is_alone):
                return
            self._pass_rest(self._requests.in_flight.step)
            if is_alone:
                source.note_arrivals(0, 1)
            if source.rest_steps and not predicts:
                return
        self.is_resting, self.is_active, self.noted_from = False, True, 0

    def begin_step(self, step: Step) -> None:
        """Let requests that will speculate wait until their last token is known."""
        batch = self._batch
        if batch.active is not self._active and (self._overlaps or self._source.learns):
            if self._source.learns:
                self._learn_outputs()
            self._enter_slots()
        if not self._overlaps or not self._num_speculating:
            return
        if self._plain_left or self._source.rest_steps:
            return
        index, lengths = batch.active, batch.tokens.lengths[batch.active]
        limits: Int32s = np.minimum(self._max_drafts[index], batch.ceiling[index] - lengths)
        late = (batch.scheduled[index] >= lengths) & (limits > 0)
        index, limits = index[late], limits[late]
        if len(index):
            waits = self._source.would_propose(batch.tokens, index, limits)
            step.paused += index[waits].tolist()

    def end_step(self, step: Step) -> None:
        """Add drafts to the plan's rows, as far as its budget and free blocks reach."""
        batch = self._batch
        has_tokens = step.budget.tokens > 0
        if batch.active is not self._active and (has_tokens or not self._source.may_begin_late):
            self._enter_slots()  # requests were admitted since
        if not self._num_speculating or not has_tokens:
            return
        if self._plain_left and step.builder.has_rows:
            self._plain_left -= 1
            return
        if self._source.skips_step(batch.tokens, lambda: self._able_slots(step)):
            self._begin_rest(step.builder.step)
            return
        if step.budget.spent or not step.builder.has_rows:
            return
        rows = Rows(*step.builder.joined_rows())
        self._num_timed, self.noted_from = TIMED_STEPS, 0
        if (plain_steps := self._steps_to_time(rows, step.builder.step)) > 0:
            self._plain_due, self._plain_left = 0, plain_steps - 1
            return
        can, limits = self._able(rows)
        num_able = int(np.add.reduce(can))
        if not num_able:
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
                costs.append(self._cost(rows, ends, int(np.add.reduce(limits))))
            return costs[0]

        self._num_plain, self._asked_step = 0, step.builder.step
        counts, ids = self._source.propose(batch.tokens, index, limits, cost)
        self._note_use()
        if not len(ids):
            if costs:
                self._prices.fade()
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
        self._predicted[step.builder.step] = DraftedStep(
            num_rows,
            num_positions + num_drafts,
            price.step_ms,
            float(price.added_ms[num_drafts]) + num_rows * price.row_ms - self._prices.after_ms,
            self._prompts_ms,
        )

    def _able(self, rows: Rows) -> tuple[Bools, Int32s]:
        """Return which of `rows` may have drafts, and these how many: those that sample one token
        after all known ones, and may have another."""
        index, ends = rows.slot_index, rows.ends
        limits: Int32s = np.minimum(self._max_drafts[index], self._batch.ceiling[index] - ends)
        can: Bools = (ends == self._batch.tokens.lengths[index]) & (limits > 0)
        can &= (rows.counts == 1) & (rows.sample_counts == 1)
        return can, limits

    def _able_slots(self, step: Step) -> Index:
        """Return the slots that may have drafts in a step."""
        if step.budget.spent or not step.builder.has_rows:
            return self._batch.active[:0]
        rows = Rows(*step.builder.joined_rows())
        can, _ = self._able(rows)
        return rows.slot_index[can]

    def _note_use(self) -> None:
        """Note whether drafts were computed, or failed."""
        source = self._source
        failed = source.num_errors > 0 or source.num_proposer_errors > 0
        self.was_used |= failed or source.drafting_ms > 0.0

    def _begin_rest(self, step: int) -> None:
        """Take no part in the steps after `step`, as long as the source rests."""
        self.was_used |= self._source.num_errors > 0 or self._source.num_proposer_errors > 0
        num_steps = self._source.rest_steps
        if num_steps < 2 or not self._source.may_begin_late:
            return
        if self._may_predict:
            live = self._requests.sequences.values()
            self._may_predict = any(map(_predicts, live))
        if not self._may_predict:
            self.is_active, self.is_resting, self._rest_from = False, True, step
            self._rest_active = self._batch.active
            self._rest_sequences = self._batch.sequences.copy()
            self._rest_until = step + num_steps - self._overlaps
            if self._rest_until < self.noted_from:
                self.noted_from = self._rest_until

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
        if num_steps <= self._overlaps:
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
        added_ms += self._prices.after_ms
        saved_ms = num_accepted * plain_ms / len(plan.slots)
        self._saved_ms += saved_ms
        self._added_ms += added_ms
        self._source.note_step(plain_ms, saved_ms - added_ms, computed_ms)
        self.noted_from = 0  # the source may want steps without drafts now

    def _one_each_ms(self, starts: Int32s) -> float:
        """Return what a step of rows with one token each is predicted to take by the cost model."""
        price = self._speed.latest
        rows_ms = price.rows_ms(starts, np.ones_like(starts))
        return price.fixed_ms + float(np.add.reduce(rows_ms)) + len(starts) * price.score_ms

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
            if before[slot] is not None and self._max_drafts[slot]:
                self._source.end(slot)
                self._num_speculating -= 1
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

    def _steps_to_time(self, rows: Rows, step: int) -> int:
        """Return how many steps from `step` on have no drafts, so that they can be timed: because
        as many are due, or none of so many rows was timed."""
        self._plain_due += self._source.takes_plain_step()
        if self._plain_due >= self._plain_steps:
            return self._plain_steps
        num_rows = len(rows.counts)  # 0: layers of a prompt only
        if num_rows in (0, self._known_rows) or int(np.add.reduce(rows.counts)) > num_rows:
            return 0
        step_ms = self._prices.known_plain_ms(num_rows)
        self._known_rows = num_rows * (step_ms > 0.0)
        settling_steps = 0  # where plans overlap, the first that follows another is timed
        if not self._overlaps:
            settling_steps = int(SETTLING_MS / max(step_ms or self._one_each_ms(rows.ends), 1e-3))
        self._plain_steps = min(PLAIN_STEPS + settling_steps, MAX_PLAIN_STEPS) + self._overlaps
        bucket = bucket_of(num_rows)
        if step_ms or step < self._first_runs.get(bucket, -FIRST_RUN_EVERY) + FIRST_RUN_EVERY:
            return 0
        self._first_runs[bucket] = step
        return self._plain_steps + TIMED_STEPS - 1

    def _cost(self, rows: Rows, ends: Int32s, num_drafts: int) -> DraftCost:
        """Return what up to `num_drafts` drafts cost in a step of `rows`, some of which end at
        `ends`."""
        price, prices, num_rows = self._speed.latest, self._prices, len(rows.counts)
        depth = float(np.add.reduce(ends)) / len(ends)
        slope_ms = price.token_ms + price.score_ms + price.position_ms * depth
        num_positions, self._prompts_ms = int(np.add.reduce(rows.counts)), 0.0
        plain_ms = step_ms = prices.plain_ms(num_rows, slope_ms)
        if not plain_ms:
            step_ms = self._one_each_ms(rows.ends)
        if num_positions > num_rows:  # the tokens of drafts would come from steps without prompts
            rows_ms = float(np.add.reduce(price.rows_ms(rows.starts, rows.counts)))
            one_ms = float(np.add.reduce(price.rows_ms(rows.ends, np.ones_like(rows.ends))))
            plain_ms, self._prompts_ms = 0.0, max(rows_ms - one_ms, 1e-9)
        return DraftCost(
            step_ms=step_ms,
            step_tokens=num_rows,
            added_ms=prices.added_ms(num_positions, num_drafts, plain_ms, slope_ms),
            row_ms=prices.row_ms,
            asked_ms=max(prices.asked_ms, 0.0),
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


def _predicts(sequence: SequenceState) -> bool:
    """Return whether a request brings a prediction."""
    speculation = sequence.request.speculation
    return speculation is not None and len(speculation.prediction_ids) > 0


class DraftStats:
    """Drafts in all, of rows with at most `max_drafts`.

    drafted_at: how many drafts there were at each position in the draft, from 0 on; as long as the
    longest one. accepted_at: how many of them were accepted.
    """

    def __init__(self, max_drafts: int) -> None:
        self.rows_total = 0
        self.drafted_at: tuple[int, ...] = ()
        self.accepted_at: tuple[int, ...] = ()
        self._drafted, self._accepted = [0] * max_drafts, [0] * max_drafts

    def count(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add rows with so many drafts, of which the first accepted[i] were right."""
        self.rows_total += len(drafted)
        for counts, added in ((self._drafted, drafted), (self._accepted, accepted)):
            for num in added:
                for place in range(num):
                    counts[place] += 1
        longest = max([len(self.drafted_at), *drafted])
        self.drafted_at = tuple(self._drafted[:longest])
        self.accepted_at = tuple(self._accepted[:longest])

"""PromptShares: which prompts go on in a step, and how far, beside rows of one token.

Rows of one token are served first. What is left goes to prompts in the policy's order, running and
waiting ones alike, within bounds in predicted milliseconds: a step that generates tokens shall not
take longer than the tightest target for the time between two of them; and where a long prompt is
computed in chunks, these shall not double the step. Takes no blocks from other requests. Always
holds: prompts get a few tokens a step, however tight the target.
"""

from __future__ import annotations

import math

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.plan_builder import Step
from quire.scheduler.policy.policy import Policy
from quire.scheduler.prefill.layered import LayeredChunks
from quire.scheduler.running_batch import Bools, Index, Int32s, RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.step_budget import BlockShares, StepBudget

# A chunk of a long prompt may take this share of the time that the step's other rows take.
LONG_SHARE = 0.65


class PromptShares:
    """Allots `StepBudget`s to running prompts, and bounds them for waiting ones."""

    def __init__(
        self,
        limits: SchedulerLimits,
        batch: RunningBatch,
        policy: Policy,
        speed: SpeedEstimate,
        layered: LayeredChunks,
    ) -> None:
        self._limits = limits
        self._layered = layered
        self._batch = batch
        self._policy = policy
        self._speed = speed

    def allot(
        self,
        step: Step,
        index: Index,
        starts: Int32s,
        wanted: Int32s,
        scored: Bools | None,
        first_waiting: SequenceState | None,
        num_waiting: int,
    ) -> Int32s:
        """Return tokens for the running rows of slots `index`, of which some want more than one.

        Prompts that rank behind first_waiting get none yet; they go to step.yielding.
        """
        budget = step.budget
        is_prompt = wanted > 1
        ones, prompts = (~is_prompt).nonzero()[0], is_prompt.nonzero()[0]
        counts = np.zeros(len(index), np.int32)
        of_ones = None if scored is None else scored[ones]
        counts[ones] = budget.allot(starts[ones], wanted[ones], of_ones)
        num_prompts = len(prompts) + num_waiting
        self._bound(budget, index[ones], starts[ones], num_prompts, is_urgent=step.is_urgent)
        rank = self._policy.rank
        ranks = {row: rank(self._batch.sequence(int(index[row]))) for row in prompts.tolist()}
        until = None if first_waiting is None else rank(first_waiting)
        yielding = []
        for row in sorted(ranks, key=ranks.__getitem__):
            if until is not None and ranks[row] > until:
                yielding.append(self._batch.sequence(int(index[row])))
            elif not budget.spent:
                counts[row] = self.allot_one(budget, int(index[row]), scored, row)
        step.yielding = yielding
        return counts

    def allot_one(self, budget: StepBudget, slot: int, scored: Bools | None, row: int) -> int:
        """Return tokens for the prompt in `slot`; scored[row] says whether it is scored."""
        batch, sequence = self._batch, self._batch.sequence(slot)
        start, is_scored = int(batch.scheduled[slot]), scored is not None and bool(scored[row])
        wanted = int(batch.goal[slot]) - start
        count = self._layered.allot(budget, sequence, start, wanted, scored=is_scored)
        if count is not None:
            return count
        return budget.allot_one(start, wanted, scored=is_scored, is_long=sequence.entry.is_long)

    def advance_yielding(self, step: Step, cache: CacheManager, shares: BlockShares) -> None:
        """Schedule the prompts in step.yielding, while budget and blocks last."""
        batch, builder, budget = self._batch, step.builder, step.budget
        index = np.array([sequence.slot for sequence in step.yielding], np.intp)
        starts = batch.scheduled[index]
        scored = batch.still_scored(index, starts)
        counts = np.zeros(len(index), np.int32)
        for row, slot in enumerate(index.tolist()):
            if not budget.spent:
                counts[row] = self.allot_one(budget, slot, scored, row)
        needs = cache.blocks_short(index, starts + counts)
        # Their blocks were reserved when they were admitted; a prompt that lacks them now, because
        # others have grown since, waits a step. None are taken out of a tenant's floor.
        shares.changed()
        fits = counts > 0
        for row in (fits & (needs > 0)).nonzero()[0].tolist():
            taking = fits & (np.arange(len(index)) <= row)
            fits[row] = shares.can_grow(index[taking], needs[taking])
        grows = fits & (needs > 0)
        if np.count_nonzero(grows):
            builder.add_deltas(cache.allocate(index[grows], needs[grows]))
        by_layers = self._layered.row(index)
        if by_layers is not None and fits[by_layers]:
            self._layered.send(builder)
            fits[by_layers] = False
        if not np.count_nonzero(fits):
            return
        index, starts, counts = index[fits], starts[fits], counts[fits]
        ends, goals = starts + counts, batch.goal[index]
        sample_counts = batch.schedule(index, ends, goals)
        store_from = np.maximum(starts, batch.stored[index])
        slots = index.astype(np.int32)
        builder.add_rows(index, slots, starts, counts, ends, store_from, sample_counts)

    def bound(self, step: Step, num_waiting: int, left_out: list[int]) -> None:
        """Bound what waiting prompts may take beside running rows, all served by now.

        left_out: slots of running requests that have no row in this step.
        """
        if not step.budget.is_bounded:
            active = self._batch.active
            if left_out:
                active = active[~np.isin(active, left_out)]
            starts = self._batch.scheduled[active]
            self._bound(step.budget, active, starts, num_waiting, is_urgent=step.is_urgent)

    def _bound(
        self,
        budget: StepBudget,
        ones: Index,
        starts: Int32s,
        num_prompts: int,
        *,
        is_urgent: bool,
    ) -> None:
        """Bound prompts: rows of slots `ones` take a token each; num_prompts want more."""
        if not len(ones):
            budget.bound(math.inf, math.inf, self._speed)
            return
        target_ms = float(np.minimum.reduce(self._batch.tpot_slo_ms[ones]))
        if self._limits.tpot_target_ms:
            target_ms = min(target_ms, self._limits.tpot_target_ms)
        target_ms /= max(self._limits.micro_batches, 1)  # so many plans for a token of each request
        ones_ms = self._speed.step_ms(len(ones), float(np.add.reduce(starts, dtype=np.float64)))
        # Where more wait for prompts than for tokens, the time is shared by heads.
        share = max(LONG_SHARE, min(num_prompts, self._limits.max_num_seqs) / len(ones))
        long_ms = math.inf if is_urgent else share * ones_ms
        budget.bound(target_ms - ones_ms, long_ms, self._speed)

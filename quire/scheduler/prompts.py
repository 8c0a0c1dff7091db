"""PromptShares: which prompts go on in a step, and how far, beside the rows that take one token.

Rows of one token are served first. What is left goes to prompts in the policy's order, running and
waiting ones alike, within bounds in predicted milliseconds: a step that makes tokens shall not
take longer than the tightest target for the time between two of them; and where a long prompt is
computed in parts, its parts shall not double the step. Takes no blocks from anybody. Always holds:
prompts get a few tokens a step, however tight the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.budget import StepBudget
from quire.scheduler.draft import PlanDraft
from quire.scheduler.layered import LayeredParts
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy import Policy
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import Bools, Index, Int32s, RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import Ticket

# A part of a long prompt may take so much of the time that the step's other rows take.
LONG_SHARE = 0.65


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """counts: tokens of each row. behind: rows of prompts that come after waiting ones, in order,
    with nothing yet."""

    counts: Int32s
    behind: list[int]


class PromptShares:
    """Hands out `StepBudget`s to running prompts, and bounds them for waiting ones."""

    def __init__(
        self,
        limits: SchedulerLimits,
        state: RunningState,
        policy: Policy,
        speed: SpeedEstimate,
        layered: LayeredParts,
    ) -> None:
        self._limits = limits
        self._layered = layered
        self._state = state
        self._policy = policy
        self._speed = speed

    def hand_out(
        self,
        budget: StepBudget,
        index: Index,
        starts: Int32s,
        wanted: Int32s,
        scored: Bools | None,
        first_waiting: Ticket | None,
        num_waiting: int,
        is_hurried: bool,
    ) -> Shares:
        """Tokens for the running rows of slots `index`, of which some want more than one.

        is_hurried: rows stand back for a prompt in this step, which is not kept short for them."""
        is_prompt = wanted > 1
        ones, prompts = (~is_prompt).nonzero()[0], is_prompt.nonzero()[0]
        counts = np.zeros(len(index), np.int32)
        of_ones = None if scored is None else scored[ones]
        counts[ones] = budget.hand_out(starts[ones], wanted[ones], of_ones)
        num_prompts = len(prompts) + num_waiting
        self._bound(budget, index[ones], starts[ones], num_prompts, is_hurried=is_hurried)
        rank = self._policy.rank
        ranks = {row: rank(self._state.ticket(int(index[row]))) for row in prompts.tolist()}
        until = None if first_waiting is None else rank(first_waiting)
        behind = []
        for row in sorted(ranks, key=ranks.__getitem__):
            if until is not None and ranks[row] > until:
                behind.append(row)
            elif not budget.spent:
                counts[row] = self.hand_out_one(budget, int(index[row]), scored, row)
        return Shares(counts=counts, behind=behind)

    def hand_out_one(self, budget: StepBudget, slot: int, scored: Bools | None, row: int) -> int:
        """Tokens for the prompt that runs in `slot`; scored[row] says whether it is scored."""
        state, ticket = self._state, self._state.ticket(slot)
        start, is_scored = int(state.scheduled[slot]), scored is not None and bool(scored[row])
        wanted = int(state.goal[slot]) - start
        count = self._layered.hand_out(budget, ticket, start, wanted, scored=is_scored)
        if count is not None:
            return count
        return budget.hand_out_one(start, wanted, scored=is_scored, is_long=ticket.is_long)

    def go_on_behind(
        self,
        draft: PlanDraft,
        budget: StepBudget,
        tickets: list[Ticket],
        cache: CacheManager,
        tenants: TenantBooks,
    ) -> None:
        """Schedule running prompts that let waiting ones go first, while budget and blocks last."""
        state = self._state
        index = np.array([ticket.slot for ticket in tickets], np.intp)
        starts = state.scheduled[index]
        scored = state.still_scored(index, starts)
        counts = np.zeros(len(index), np.int32)
        for row, slot in enumerate(index.tolist()):
            if not budget.spent:
                counts[row] = self.hand_out_one(budget, slot, scored, row)
        needs = cache.blocks_short(index, starts + counts)
        # Their blocks were spoken for when they were admitted; who lacks them now, because others
        # have grown since, waits a step. None are taken out of a tenant's floor.
        tenants.changed()
        fits = counts > 0
        for row in (fits & (needs > 0)).nonzero()[0].tolist():
            taking = fits & (np.arange(len(index)) <= row)
            fits[row] = tenants.can_grow(index[taking], needs[taking])
        grows = fits & (needs > 0)
        if np.count_nonzero(grows):
            draft.add_deltas(cache.allocate(index[grows], needs[grows]))
        by_layers = self._layered.row(index)
        if by_layers is not None and fits[by_layers]:
            self._layered.send(draft)
            fits[by_layers] = False
        if not np.count_nonzero(fits):
            return
        index, starts, counts = index[fits], starts[fits], counts[fits]
        ends, goals = starts + counts, state.goal[index]
        sample_counts = state.schedule(index, ends, goals)
        store_from = np.maximum(starts, state.stored[index])
        slots = index.astype(np.int32)
        draft.add_rows(index, slots, starts, counts, ends, store_from, sample_counts)

    def bound(
        self, budget: StepBudget, num_waiting: int, left_out: list[int], *, is_hurried: bool
    ) -> None:
        """Before waiting prompts are admitted beside rows of one token, all served by now but
        those of slots left_out. is_hurried: see hand_out."""
        if not budget.is_bounded:
            active = self._state.active
            if left_out:
                active = active[~np.isin(active, left_out)]
            starts = self._state.scheduled[active]
            self._bound(budget, active, starts, num_waiting, is_hurried=is_hurried)

    def _bound(
        self,
        budget: StepBudget,
        ones: Index,
        starts: Int32s,
        num_prompts: int,
        *,
        is_hurried: bool,
    ) -> None:
        """Rows of slots `ones` take a token each; num_prompts want more."""
        if not len(ones):
            budget.bound(math.inf, math.inf, self._speed)
            return
        target_ms = float(np.minimum.reduce(self._state.tpot_slo_ms[ones]))
        if self._limits.tpot_target_ms:
            target_ms = min(target_ms, self._limits.tpot_target_ms)
        ones_ms = self._speed.step_ms(len(ones), float(np.add.reduce(starts, dtype=np.float64)))
        # Where more wait for prompts than for tokens, the time is shared by heads.
        share = max(LONG_SHARE, min(num_prompts, self._limits.max_num_seqs) / len(ones))
        long_ms = math.inf if is_hurried else share * ones_ms
        budget.bound(target_ms - ones_ms, long_ms, self._speed)

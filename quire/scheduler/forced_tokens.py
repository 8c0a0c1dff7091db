"""What a step's result makes certain beyond its tokens: tokens that must follow, answers that are
complete.

Knows rows and results, no grammar. Always holds: certain tokens are taken only by a request that no
other plan out has a row of, so that each token is made once; all others drop them, and get the same
ones step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.base.records import StepPlan, StepResult
from quire.scheduler.in_flight import InFlightPlans, PlanOutcome
from quire.scheduler.sequence import SequenceState

NO_IDS: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedTokens:
    """Of one row: ids after its token, and whether the answer can only end after them."""

    ids: tuple[int, ...]
    is_complete: bool

    def within(
        self, sequence: SequenceState, length: int
    ) -> tuple[tuple[int, ...], int | None, bool]:
        """What a request of `length` tokens takes of it: ids, the last of them where that stops
        the request, and whether it is over."""
        room = max(sequence.limit - length, 0)
        for place, token_id in enumerate(self.ids[:room]):
            if token_id in sequence.request.stop_ids:
                return self.ids[: place + 1], token_id, True
        return self.ids[:room], None, self.is_complete and len(self.ids) <= room


NO_FORCED_TOKENS: Mapping[int, ForcedTokens] = {}


def forced_tokens_of(
    plan: StepPlan, result: StepResult, outcome: PlanOutcome, in_flight: InFlightPlans
) -> dict[int, ForcedTokens]:
    """By rows of outcome.sampled. in_flight: the plans that are still out."""
    rows = np.arange(len(plan.slots)) if outcome.rows is None else outcome.rows
    rows = rows[plan.samples[rows]]
    firsts = np.cumsum(result.forced_counts) - result.forced_counts
    found: dict[int, ForcedTokens] = {}
    told = (result.forced_counts[rows] > 0) | result.complete[rows]
    last_steps = in_flight.last_steps(outcome.sampled)
    for place in told.nonzero()[0].tolist():
        row = rows[place]
        count = int(result.forced_counts[row])
        if count and last_steps[place]:
            continue
        ids = result.forced_ids[firsts[row] : firsts[row] + count].tolist()
        found[place] = ForcedTokens(ids=tuple(ids), is_complete=bool(result.complete[row]))
    return found

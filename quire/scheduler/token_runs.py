"""RunTail: the tokens that a row of a step yields after its first one.

Invariant: the tail of a run is taken only by a request that no other in-flight plan has a row of,
so that each token is appended once. All other requests drop the tail, and their next steps yield
the same tokens.
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
class RunTail:
    """ids: the tokens after the first. is_complete: the answer can only end after them."""

    ids: tuple[int, ...]
    is_complete: bool

    def within(
        self, sequence: SequenceState, length: int
    ) -> tuple[tuple[int, ...], int | None, bool]:
        """Cut the tail at the end of a request that has `length` tokens.

        Returns the ids to append, the last of them if it is a stop token, and whether the request
        has ended.
        """
        room = max(sequence.limit - length, 0)
        for place, token_id in enumerate(self.ids[:room]):
            if token_id in sequence.request.stop_ids:
                return self.ids[: place + 1], token_id, True
        return self.ids[:room], None, self.is_complete and len(self.ids) <= room


NO_TAILS: Mapping[int, RunTail] = {}


def run_tails(
    plan: StepPlan, result: StepResult, outcome: PlanOutcome, in_flight: InFlightPlans
) -> Mapping[int, RunTail]:
    """Return the tails of a step's runs, by their places in outcome.sampled.

    Runs of one token that do not complete an answer have none. in_flight: plans still in flight.
    """
    lengths, entries = outcome.run_lengths, outcome.entries
    is_long = None if lengths is None else lengths > 1
    if not len(result.complete) and (is_long is None or not is_long.any()):
        return NO_TAILS
    rows = np.arange(len(plan.slots)) if outcome.rows is None else outcome.rows
    rows = rows[plan.samples[rows]]
    is_complete = result.complete[rows] if len(result.complete) else np.zeros(len(rows), np.bool_)
    has_tail = is_complete if is_long is None else is_complete | is_long
    last_steps = in_flight.last_steps(outcome.sampled)
    tails: dict[int, RunTail] = {}
    for place in has_tail.nonzero()[0].tolist():
        ids = NO_IDS
        if lengths is not None and entries is not None and lengths[place] > 1:
            if last_steps[place]:
                continue
            first = entries[place]
            ids = tuple(result.token_ids[first + 1 : first + lengths[place]].tolist())
        tails[place] = RunTail(ids=ids, is_complete=bool(is_complete[place]))
    return tails

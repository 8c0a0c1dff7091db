"""Flight: a plan that is out, and which rows of its result still stand when it comes back.

Knows rows and slots, not what they are for. A row stands if its slot still has the request it
had when the plan was made, and the worker did not report an error for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.base.errors import WorkerError
from quire.base.records import RowError, StepPlan, StepResult
from quire.scheduler.state import Bools, Int32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """The rows of a result that stand, and the errors of requests that are still there.

    slots, ends: rows computed well, and how far. sampled: slots that got a token; entries: the
    indices of these tokens in the result's arrays, None for all of them in order.
    """

    slots: Int32s
    ends: Int32s
    sampled: Int32s
    entries: Int32s | None
    errors: tuple[RowError, ...]


@dataclass(slots=True, kw_only=True)
class Flight:
    """`plan` is out. `left`: slots whose request has left them since the plan was made."""

    plan: StepPlan
    left: list[Int32s] = field(default_factory=list)

    def land(self, result: StepResult) -> Landing:
        """Sort out `result`. Raises WorkerError if it is not an answer to the plan."""
        plan = self.plan
        if result.step != plan.step or len(result.token_counts) != len(plan.slots):
            raise WorkerError(
                f"the worker answered step {result.step} with {len(result.token_counts)} rows; "
                f"step {plan.step} has {len(plan.slots)} rows: it must answer plans in order"
            )
        if not self.left and not result.errors:
            self._check(result, result.token_counts == plan.samples)
            sampled = plan.slots if len(result.token_ids) == len(plan.slots) else None
            return Landing(
                slots=plan.slots,
                ends=plan.starts + plan.counts,
                sampled=plan.slots[plan.samples] if sampled is None else sampled,
                entries=None,
                errors=(),
            )
        return self._land_part(result)

    def _land_part(self, result: StepResult) -> Landing:
        plan = self.plan
        present = np.ones(len(plan.slots), np.bool_)
        for slots in self.left:
            present &= ~np.isin(plan.slots, slots)
        errors = tuple(error for error in result.errors if present[error.row])
        stands = present.copy()
        stands[[error.row for error in result.errors]] = False
        self._check(result, ~stands | (result.token_counts == plan.samples))
        first_entry = np.cumsum(result.token_counts) - result.token_counts
        sampling = np.flatnonzero(stands & plan.samples)
        return Landing(
            slots=plan.slots[stands],
            ends=(plan.starts + plan.counts)[stands],
            sampled=plan.slots[sampling],
            entries=first_entry[sampling].astype(np.int32),
            errors=errors,
        )

    def _check(self, result: StepResult, right: Bools) -> None:
        if right.all() and int(result.token_counts.sum()) == len(result.token_ids):
            return
        wrong = np.flatnonzero(~right)[:8].tolist()
        raise WorkerError(
            f"step {result.step}: rows {wrong} of the result have not one token for each row "
            f"that samples, or its {len(result.token_ids)} tokens do not match its counts"
        )

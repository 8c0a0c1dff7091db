"""VirtualRunner: answers plans as a worker would, in virtual time and without computing anything.

A request goes on until the length that is planned for it and then gets the stop token; which
tokens it gets before is of no matter to anybody but the prefix cache, so each request has one of
its own, over and over. Always holds: plans end in the order they were handed in, none begins
before the one before it has ended, and waiting for one is what makes time pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.records import StepPlan, StepResult
from quire.runner.handle import Handle
from quire.sim.clock import VirtualClock
from quire.sim.cost import StepCost

STOP_ID = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """What becomes of a request: tokens it ends with, prompt and output, and the token it gets."""

    total_tokens: int
    token_id: int


class PlannedEnds:
    """Which tokens rows get so that requests end where it is planned.

    planned: by request id, filled before a request is added.
    """

    def __init__(self, planned: Mapping[str, Planned], *, num_slots: int) -> None:
        self._planned = planned
        self._last_known = np.zeros(num_slots, np.int32)  # tokens it has before its last one
        self._token_ids = np.zeros(num_slots, np.int32)

    def admit(self, plan: StepPlan) -> None:
        """Who takes a slot in this plan. Plans come in order."""
        for admission in plan.admissions:
            planned = self._planned[admission.request_id]
            self._last_known[admission.slot] = planned.total_tokens - 1
            self._token_ids[admission.slot] = planned.token_id

    def token_ids(self, plan: StepPlan) -> NDArray[np.int32]:
        """A token for each row that samples; the stop token where the request is complete."""
        slots, known = plan.slots.astype(np.intp), plan.starts + plan.counts
        samples = plan.samples
        if np.count_nonzero(samples) < len(slots):
            slots, known = slots[samples], known[samples]
        token_ids = self._token_ids[slots]
        token_ids[known >= self._last_known[slots]] = STOP_ID
        return token_ids


@dataclass(frozen=True, slots=True)
class Computing:
    """A plan that was handed in: its result, and when it is there."""

    result: StepResult
    until_ms: float

    def outcome(self) -> StepResult:
        """See Handle; the runner lets the time pass."""
        return self.result


class VirtualRunner:
    """A Runner of the engine's loop. on_plan sees every plan as it is handed in."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: StepCost,
        ends: PlannedEnds,
        *,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._ends = ends
        self._until_ms = 0.0
        self._on_plan = on_plan
        self.busy_ms = 0.0

    def submit(self, plan: StepPlan) -> Computing:
        """Begin as soon as the plan before has ended."""
        if plan.admissions:
            self._ends.admit(plan)
        cost_ms = self._cost.step_ms(plan)
        self._until_ms = max(self._clock.now_ms(), self._until_ms) + cost_ms
        self.busy_ms += cost_ms
        if self._on_plan is not None:
            self._on_plan(plan)
        result = StepResult(
            step=plan.step,
            token_counts=plan.sample_counts,
            token_ids=self._ends.token_ids(plan),
        )
        return Computing(result, self._until_ms)

    def collect(self, handle: Handle) -> StepResult:
        """The result, once its time has come."""
        assert isinstance(handle, Computing)
        self._clock.wait_until(handle.until_ms)
        return handle.result

    def close(self) -> None:
        """Nothing to close."""

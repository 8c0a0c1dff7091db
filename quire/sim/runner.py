"""VirtualRunner: answer plans in virtual time without computing anything.

A request produces tokens up to its planned length and then the stop token. Its tokens matter to the
prefix cache only, so each request repeats one token of its own. Always holds: plans end in
submission order, a stage begins none before the one before it has ended there, and time passes only
by waiting for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.records import StepPlan, StepResult
from quire.runner.handle import Handle
from quire.runner.pipelined_runner import must_follow
from quire.sim.clock import VirtualClock
from quire.sim.cost import StepCost

STOP_ID = 0


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """The output of a request: total tokens with the prompt, and the token it repeats."""

    total_tokens: int
    token_id: int


class PlannedOutputs:
    """Chooses tokens so that requests end at their planned length.

    planned: by request id, filled before a request is added.
    """

    def __init__(self, planned: Mapping[str, PlannedOutput], *, num_slots: int) -> None:
        self._planned = planned
        self._last_known = np.zeros(num_slots, np.int32)  # known tokens before the last
        self._token_ids = np.zeros(num_slots, np.int32)

    def admit(self, plan: StepPlan) -> None:
        """Record the slots of a plan's admissions. Plans must come in order."""
        for admission in plan.admissions:
            planned = self._planned[admission.request_id]
            self._last_known[admission.slot] = planned.total_tokens - 1
            self._token_ids[admission.slot] = planned.token_id

    def token_ids(self, plan: StepPlan) -> NDArray[np.int32]:
        """Return a token for each sampled row; the stop token where the request is complete."""
        slots, known = plan.slots.astype(np.intp), plan.starts + plan.counts
        samples = plan.samples
        if np.count_nonzero(samples) < len(slots):
            slots, known = slots[samples], known[samples]
        token_ids = self._token_ids[slots]
        token_ids[known >= self._last_known[slots]] = STOP_ID
        return token_ids

    def runs(self, plan: StepPlan) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the length of each row's run in a plan with drafts, and the tokens of all."""
        sampled = plan.sample_counts
        rows = np.repeat(np.arange(len(sampled)), sampled)
        places = np.arange(len(rows)) - (np.cumsum(sampled) - sampled)[rows]
        slots = plan.slots[rows].astype(np.intp)
        known = (plan.starts + plan.counts - sampled + 1)[rows] + places
        token_ids = self._token_ids[slots]
        token_ids[known >= self._last_known[slots]] = STOP_ID
        _native.drop_after_mismatch(plan.draft_counts, plan.draft_ids, sampled, token_ids)
        counts, kept = np.empty_like(sampled), np.empty(len(token_ids), np.intp)
        none_failed = np.zeros(len(sampled), np.bool_)
        num = _native.leading_tokens(sampled, token_ids, none_failed, counts, kept)
        return counts, token_ids[kept[:num]]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A submitted plan: its result, and when it will be available."""

    result: StepResult
    until_ms: float

    def outcome(self) -> StepResult:
        """See Handle; the runner advances the time."""
        return self.result


class VirtualRunner:
    """A Runner of the engine's loop. stages: the cost of each stage that a plan goes through, one
    or more; each computes one plan at a time. on_plan receives every plan as it is submitted.

    busy_ms: in which the last stage computes or waits for rows, while it has a plan. waited_ms: in
    which it waits. stage_busy_ms: in which each stage computes.
    """

    def __init__(
        self,
        clock: VirtualClock,
        stages: Sequence[StepCost],
        ends: PlannedOutputs,
        *,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._clock = clock
        self._stages = stages
        self._ends = ends
        self._until_ms = [0.0] * len(stages)  # when each stage has computed what it has
        self._flight: deque[tuple[StepPlan, float]] = deque()  # of a pipeline, with their ends
        self._on_plan = on_plan
        self.stage_busy_ms = [0.0] * len(stages)
        self.busy_ms = self.waited_ms = 0.0

    def submit(self, plan: StepPlan) -> PendingStep:
        """Begin in each stage as soon as that is free and the stage before has ended the plan."""
        if len(self._stages) > 1:
            self._make_way(plan)
        if plan.admissions:
            self._ends.admit(plan)
        until_ms = self._run(plan)
        if len(self._stages) > 1:
            self._flight.append((plan, until_ms))
        if self._on_plan is not None:
            self._on_plan(plan)
        if plan.draft_ids.size:
            counts, token_ids = self._ends.runs(plan)
        else:
            counts, token_ids = plan.sample_counts, self._ends.token_ids(plan)
        result = StepResult(step=plan.step, token_counts=counts, token_ids=token_ids)
        return PendingStep(result, until_ms)

    def _run(self, plan: StepPlan) -> float:
        """Return when the plan ends in the last stage."""
        until_ms, now_ms = self._until_ms, self._clock.now_ms()
        free_ms = max(now_ms, until_ms[-1])
        if not (len(plan.slots) or plan.layers is not None):  # it only copies blocks
            until_ms[-1] = free_ms
            return free_ms
        ready_ms = now_ms
        for stage, cost in enumerate(self._stages):
            begun_ms, cost_ms = max(ready_ms, until_ms[stage]), cost.step_ms(plan)
            until_ms[stage] = ready_ms = begun_ms + cost_ms
            self.stage_busy_ms[stage] += cost_ms
        self.waited_ms += begun_ms - free_ms
        self.busy_ms += cost_ms + (begun_ms - free_ms)
        return ready_ms

    def _make_way(self, plan: StepPlan) -> None:
        """Wait for the plans in flight where a pipeline's runner finishes them before this one."""
        while self._flight and self._flight[0][1] <= self._clock.now_ms():
            self._flight.popleft()
        if must_follow(plan, (before for before, _ in self._flight)):
            self._clock.wait_until(self._flight[-1][1])

    def collect(self, handle: Handle) -> StepResult:
        """Advance the time to the end of the plan and return its result."""
        assert isinstance(handle, PendingStep)
        self._clock.wait_until(handle.until_ms)
        return handle.result

    def close(self) -> None:
        """Do nothing; there are no resources."""

"""TappedRunner: a ModelRunner that keeps hidden states of what it computes, for draft heads; and
TappedPipelinedRunner, the same on several stages.

After the trunk it keeps the tapped layers of all token rows, or after each slice of the head what
the head read, by slot and position (HiddenStateRing). Knows no proposer. Always holds: rows are
kept in the order of the plans; parts of prompts that are computed by layers leave none, nor do
steps that are computed by halves for lack of memory, and steps of decoding while drafts rest for
long, in which no layer is tapped; which these are is decided when a plan is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ModelError
from quire.base.records import StepPlan, StepResult
from quire.execute.executor import Executor, StepMemoryError, TappedExecutor
from quire.program.taps import HEAD_INPUT, TAPS
from quire.runner.async_steps import AsyncSteps
from quire.runner.batch_builder import Index, Int32s
from quire.runner.grammar_rows import Masks
from quire.runner.model_runner import ModelRunner
from quire.runner.pipelined_runner import PipelinedRunner
from quire.runner.step_result import no_rows, step_result
from quire.runner.step_run import RunnerResources, StepRun
from quire.speculative.hidden_states import HiddenStateRing, Int64s
from quire.weights.dtypes import from_bf16_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """Where hidden states are stored. of_layers: those of tapped layers, for all token rows;
    otherwise the inputs of the head, for the rows that sample."""

    ring: HiddenStateRing
    of_layers: bool


class TappedRunner(ModelRunner):
    """See ModelRunner for `settings`. Raises ModelError for an executor without outputs."""

    def __init__(self, executor: Executor, *, taps: Taps, **settings: Any) -> None:
        _check(executor)
        super().__init__(executor, **settings)
        self._taps, self._ring = taps, taps.ring
        taps.ring.tenancy = self.tables.tenancy
        if self._overlap is not None:
            self._overlap = AsyncSteps(self._resources, self._apply, partial(_run_of, taps=taps))

    def _rows_result(self, plan: StepPlan) -> StepResult:
        if len(plan.slots) == 0:
            return no_rows(plan)
        run = StepRun(plan, self._resources)
        # As in _run_of; a call more takes 0.5 % of the step of a small model.
        if plan.step > self._ring.idle_until or not run.rows.is_decode:
            run = _TappedRun(run, self._taps)
        return step_result(plan, self.tables, self._computed(plan, run), run.rows)


class TappedPipelinedRunner(PipelinedRunner):
    """See PipelinedRunner for `settings`. The last stage has the hidden states of all. Raises
    ModelError for an executor without outputs."""

    def __init__(self, executor: Executor, *, taps: Taps, **settings: Any) -> None:
        _check(executor)
        super().__init__(executor, **settings)
        self._taps = taps
        taps.ring.tenancy = self.tables.tenancy

    def run_of(self, plan: StepPlan) -> StepRun:
        """See PipelinedRunner."""
        return _run_of(plan, self._resources, taps=self._taps)


def _check(executor: Executor) -> None:
    if not isinstance(executor, TappedExecutor):
        raise ModelError(
            f"the {executor.name} executor hands out no hidden states, which draft heads need; "
            "take --executor native, or another value of --speculate"
        )


def _run_of(plan: StepPlan, resources: RunnerResources, *, taps: Taps, **settings: bool) -> StepRun:
    """Return the run of a plan: one like any other where nothing of it is kept or noted."""
    run = StepRun(plan, resources, **settings)
    if plan.step <= taps.ring.idle_until and run.rows.is_decode:
        return run
    return _TappedRun(run, taps)


class _TappedRun(StepRun):
    """Goes on as `run`, which was made and not begun. It keeps hidden states as soon as they are
    computed, or notes that it does not."""

    def __init__(self, run: StepRun, taps: Taps) -> None:
        vars(self).update(vars(run))
        self._taps = taps
        self._keeps = taps.ring.keeps(self._plan.step, is_decode=self.rows.is_decode)
        if self._keeps and taps.of_layers:
            self.batch = replace(self.batch, keeps_taps=True)

    def begin(self) -> None:
        """Run the trunk, and keep the tapped layers."""
        try:
            super().begin()
        except StepMemoryError:  # its halves keep nothing
            self._taps.ring.note_gap(self._plan.step)
            raise
        if not self._keeps:
            self._taps.ring.note_gap(self._plan.step)
            return
        if not self._taps.of_layers:
            return
        slots, tenancies = self.rows.slots, self.rows.tenancy
        if not self.rows.is_decode:
            slots = np.repeat(self._plan.slots, self._plan.counts).astype(np.intp)
            tenancies = self._resources.tables.tenancy[slots]
        self._keep(TAPS, slots, tenancies, self.batch.positions)

    def _choose_slice(self, first: int, slots: Index, positions: Int32s, masks: Masks) -> None:
        try:
            super()._choose_slice(first, slots, positions, masks)
        except StepMemoryError:  # as above
            self._taps.ring.note_gap(self._plan.step)
            raise
        if self._keeps and not self._taps.of_layers:
            tenancies = self._resources.tables.tenancy[slots]
            self._keep(HEAD_INPUT, slots, tenancies, positions - np.int32(1))

    def _keep(self, name: str, slots: Index, tenancies: Int64s, positions: Int32s) -> None:
        # Checked when the runner was made: to look at all methods in each step takes long.
        executor = cast(TappedExecutor, self._resources.executor)
        rows: NDArray[Any] = executor.output(name, len(slots))
        if rows.dtype == np.uint16:
            rows = from_bf16_bits(rows)
        self._taps.ring.put(slots, tenancies, positions, rows)

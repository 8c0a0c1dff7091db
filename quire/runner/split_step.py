"""A step that does not fit into the device's memory, computed a half of its rows at a time, and so
on down to one row: a row that does not fit by itself fails alone, with what to do about it.

What a row computes does not depend on the rows beside it, so this changes no answer. Knows no
device. Always holds: the plan was applied and all steps before it are finished.
"""

from __future__ import annotations

import numpy as np

from quire.base.records import StepPlan
from quire.execute.executor import StepMemoryError
from quire.runner.step_result import Computed, failed_row, joined_rows
from quire.runner.step_run import RunnerResources, StepRun


def computed_by_halves(plan: StepPlan, resources: RunnerResources) -> Computed:
    """Return what comes of the rows of a plan that did not fit as a whole."""
    half = len(plan.slots) // 2
    halves = [_rows(plan, 0, half), _rows(plan, half, len(plan.slots))]
    parts = [part for part in halves if len(part.slots)]
    return joined_rows(parts, [_computed(part, resources) for part in parts])


def _computed(plan: StepPlan, resources: RunnerResources) -> Computed:
    try:
        run = StepRun(plan, resources)
        run.begin()
        run.choose()
        return run.computed()
    except StepMemoryError as error:
        if len(plan.slots) == 1:
            return failed_row(plan, f"this request alone does not fit: {error}")
    return computed_by_halves(plan, resources)


def _rows(plan: StepPlan, first: int, end: int) -> StepPlan:
    """Return rows of a plan without what is applied once: nothing but what computing them reads."""
    rows = np.s_[first:end]
    return StepPlan(
        step=plan.step,
        slots=plan.slots[rows],
        starts=plan.starts[rows],
        counts=plan.counts[rows],
        store_from=plan.store_from[rows],
        sample_counts=plan.sample_counts[rows],
    )

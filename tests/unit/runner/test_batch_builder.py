"""Sampled positions of a plan: none, one or several at the end of a row."""

import numpy as np

from quire.base.records import StepPlan
from quire.runner.batch_builder import sampled_positions


def test_each_row_samples_its_last_positions() -> None:
    plan = StepPlan(
        step=1,
        slots=np.array([3, 0, 2], np.int32),
        starts=np.array([0, 7, 4], np.int32),
        counts=np.array([2, 1, 5], np.int32),
        store_from=np.array([0, 7, 4], np.int32),
        sample_counts=np.array([0, 1, 3], np.int32),
    )
    assert sampled_positions(plan, np.array([1, 2, 7], np.int32)).tolist() == [2, 5, 6, 7]
    positions = sampled_positions(plan, plan.starts + plan.counts)
    assert positions.tolist() == [8, 7, 8, 9]
    assert positions.dtype == np.int32
    assert plan.samples.tolist() == [False, True, True]

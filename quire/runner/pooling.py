"""Sums of final hidden rows of prompts that are pooled, as the rows are computed.

A row is rounded to multiples of 2^-28 and summed as 64-bit integers, so that a sum is exact and the
same however a prompt is cut into chunks, steps and slices. Knows slots and positions; decides
nothing, divides nothing. Always holds: a row that is not finite, or too large for an exact sum,
fails its own request only. Letters: N rows of the plan, P of them pooled, S token rows to sum, H
hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.rare_records import POOL_SCALE, PooledSums
from quire.base.records import StepPlan
from quire.execute.executor import Executor, PoolingExecutor
from quire.program.batch import ForwardBatch
from quire.weights.dtypes import from_bf16_bits

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Larger values fail: sums of 2^21 rows (MAX_MEAN_TOKENS) of such values fit into 64 bits.
MAX_VALUE = 2.0**14
POOL_FAILED = (
    "the prompt has no embedding: a final hidden value is NaN, infinite or beyond 16384, which the "
    "weights or the precision cause; try --dtype f32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRows:
    """What rows of a plan pooled. failed: rows without a sum [N]."""

    sums: PooledSums
    failed: Bools


def pool_prompts(
    plan: StepPlan,
    batch: ForwardBatch,
    firsts: Int32s,
    counts: Int32s,
    executor: Executor,
    *,
    max_samples: int,
) -> PooledRows:
    """Sum counts[i] positions of row i from position firsts[i] on [N]; the trunk has run.

    counts is 0 for rows that are not pooled. Raises WorkerError where the executor's program has no
    segment "pool".
    """
    if not isinstance(executor, PoolingExecutor):
        raise WorkerError(f"the {executor.name} executor computes no rows to pool")
    rows = counts.nonzero()[0].astype(np.int32)
    place_of = np.repeat(np.arange(len(rows)), counts[rows])  # [S]
    within = np.arange(len(place_of)) - (np.cumsum(counts[rows]) - counts[rows])[place_of]
    token_rows = (batch.seq_starts[:-1] - plan.starts + firsts)[rows][place_of] + within
    of_prompts = replace(batch, sample_rows=token_rows.astype(np.int32))
    sums: Int64s | None = None
    is_bad = np.zeros(len(rows), np.bool_)
    for first in range(0, len(place_of), max_samples):
        places = place_of[first : first + max_samples]
        integers, is_wrong = _integers(executor.run_pool(of_prompts, first, len(places)))
        if sums is None:
            sums = np.zeros((len(rows), integers.shape[1]), np.int64)
        found, begins = np.unique(places, return_index=True)
        sums[found] += np.add.reduceat(integers, begins, axis=0)
        is_bad[places[is_wrong]] = True
    failed = np.zeros(len(counts), np.bool_)
    failed[rows[is_bad]] = True
    good = ~is_bad
    if sums is None:
        sums = np.zeros((0, 0), np.int64)
    pooled = PooledSums(rows=rows[good], counts=counts[rows[good]], sums=sums[good])
    return PooledRows(sums=pooled, failed=failed)


def _integers(values: NDArray[np.float32] | NDArray[np.uint16]) -> tuple[Int64s, Bools]:
    """Return rows [S, H] as multiples of 1 / POOL_SCALE, and which rows cannot be summed."""
    rows = from_bf16_bits(values) if values.dtype == np.uint16 else values  # type: ignore[arg-type]
    is_wrong: Bools = np.logical_not(np.logical_and.reduce(np.abs(rows) <= MAX_VALUE, axis=1))
    scaled = np.where(is_wrong[:, None], 0.0, rows).astype(np.float64) * POOL_SCALE
    return np.rint(scaled).astype(np.int64), is_wrong

"""Steps that are measured: a batch, what it takes, and what a rank has received meanwhile.

Knows executors; no layout and no result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np

from quire.execute.native import NativeExecutor
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.comm_ops import AllGather, AllReduce
from quire.program.ops import Attention
from quire.program.stage_ops import Recv
from quire.ranks.rank_executor import MirroredExecutor
from quire.ranks.stage_executor import PipelineExecutor

BLOCK_SIZE, DEPTH = 16, 512
# Between two steps: threads of the executor that waits have gone to sleep.
PAUSE_S = 0.005
# A median of fewer pairs says little, however long they take.
MIN_PAIRS = 3


class Pairs:
    """Counts the pairs of a step until there are enough or the time is over; shows progress."""

    def __init__(self, what: str, pairs: int, seconds: float | None) -> None:
        self._what = what
        self._pairs = pairs
        self._seconds = seconds

    def __iter__(self) -> Iterator[int]:
        """Yield -2 and -1, which warm up, then 0, 1, ..."""
        began_s = time.perf_counter()
        for number in range(-2, self._pairs):
            is_over = self._seconds is not None and time.perf_counter() - began_s > self._seconds
            if is_over and number >= MIN_PAIRS:
                break
            yield number
        took_s = time.perf_counter() - began_s
        print(f"{self._what}: {took_s:.1f} s", file=sys.stderr, flush=True)


def step_batch(
    rows: int,
    tokens: int,
    vocab_size: int,
    seed: int,
    *,
    depth: int = DEPTH,
    block_size: int = BLOCK_SIZE,
) -> ForwardBatch:
    """Return a step of `rows` sequences that compute `tokens` tokens each after `depth` others."""
    rng, columns = np.random.default_rng(seed), (depth + tokens) // block_size + 1
    positions = np.tile(np.arange(depth, depth + tokens, dtype=np.int32), rows)
    tables = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    owner = np.repeat(np.arange(rows), tokens)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    starts = np.arange(rows + 1, dtype=np.int32) * tokens
    return ForwardBatch(
        token_ids=rng.integers(0, vocab_size, rows * tokens).astype(np.int32),
        positions=positions,
        rope_positions=positions,
        caches=(CacheRows(kv_slots=slots.astype(np.int32), block_tables=tables),),
        seq_starts=starts.astype(np.int32),
        sample_rows=(starts[1:] - 1).astype(np.int32),
    )


def part_of(batch: ForwardBatch, first: int, end: int) -> ForwardBatch:
    """Return sequences first .. end - 1 of a step of one token each."""
    rows = slice(first, end)
    (cache,) = batch.caches
    return ForwardBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        rope_positions=batch.rope_positions[rows],
        caches=(CacheRows(kv_slots=cache.kv_slots[rows], block_tables=cache.block_tables[rows]),),
        seq_starts=np.arange(end - first + 1, dtype=np.int32),
        sample_rows=np.arange(end - first, dtype=np.int32),
    )


def run_step(executor: NativeExecutor, batch: ForwardBatch) -> tuple[float, bytes]:
    """Return the milliseconds of a step, and its logits."""
    time.sleep(PAUSE_S)
    rows = len(batch.sample_rows)
    began_s = time.perf_counter()
    executor.run_trunk(batch, head_rows=rows)
    logits = executor.run_head(batch, 0, rows)
    return 1e3 * (time.perf_counter() - began_s), logits.tobytes()


def received_by(ranks: MirroredExecutor) -> int:
    """Return the bytes that rank 0 has received from other ranks so far."""
    received = ranks.group.native.received_bytes
    if isinstance(ranks, PipelineExecutor) and ranks.links.source is not None:
        received += ranks.links.source.native.received_bytes
    return received


def shares_of_time(ranks: MirroredExecutor) -> tuple[float, float]:
    """Return the shares of rank 0's time in exchanges and in attention; takes it no longer."""
    seconds = [unit for segment in ("trunk", "head") for unit in ranks.times(segment)]
    exchanged = sum(s for ops, s in seconds if isinstance(ops[0], AllGather | AllReduce | Recv))
    attended = sum(s for ops, s in seconds if isinstance(ops[0], Attention))
    ranks.set_timed(False)
    total = sum(s for _, s in seconds)
    return exchanged / total, attended / total

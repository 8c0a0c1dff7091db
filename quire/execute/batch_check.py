"""Checks a ForwardBatch against a program and a cache: NumPy would wrap a wrong index silently.

A batch that fails is our bug, never a caller's: the runner makes batches. The native executor
makes the same checks where it runs.
"""

from __future__ import annotations

import numpy as np

from quire.program.batch import CacheRows, ForwardBatch, Int32s
from quire.program.forms import IdSource
from quire.program.ops import Embed
from quire.program.program import Program


def check_batch(
    batch: ForwardBatch, *, vocab_size: int, num_blocks: int, block_size: int, num_slots: int = 0
) -> None:
    """Raise ValueError where an index of the batch leads nowhere. num_slots: of how many slots the
    last tokens are kept; 0 for none."""
    if num_blocks == 0:
        raise ValueError("the cache has not been allocated")
    rows = len(batch.token_ids)
    for name in ("positions", "rope_positions"):
        if len(getattr(batch, name)) != rows:
            raise ValueError(f"{name} has {len(getattr(batch, name))} entries for {rows} rows")
    check_range("token_ids", batch.token_ids, 0, vocab_size)
    check_range("rope_positions", batch.rope_positions, 0, np.iinfo(np.int32).max)
    check_range("sample_rows", batch.sample_rows, 0, rows)
    if len(batch.late_slots) not in (0, rows):
        raise ValueError(f"late_slots has {len(batch.late_slots)} entries for {rows} rows")
    check_range("late_slots", batch.late_slots, -1, num_slots)
    starts = batch.seq_starts
    if starts[0] != 0 or starts[-1] != rows or (np.diff(starts) < 0).any():
        raise ValueError(f"seq_starts {starts.tolist()} do not span {rows} token rows")
    for cache in batch.caches:
        _check_cache(batch, cache, num_blocks=num_blocks, block_size=block_size)


def _check_cache(
    batch: ForwardBatch, cache: CacheRows, *, num_blocks: int, block_size: int
) -> None:
    """Check slots and tables of one cache group."""
    rows, starts = len(batch.token_ids), batch.seq_starts
    if len(cache.kv_slots) != rows:
        raise ValueError(f"kv_slots has {len(cache.kv_slots)} entries for {rows} rows")
    columns = cache.block_tables.shape[1]
    check_range("positions", batch.positions, 0, columns * block_size)
    check_range("kv_slots", cache.kv_slots, -1, num_blocks * block_size)
    if len(cache.block_tables) != len(starts) - 1:
        raise ValueError(f"{len(cache.block_tables)} block tables for {len(starts) - 1} sequences")
    ends = starts[1:][np.diff(starts) > 0]  # positions of a sequence are consecutive
    needed = np.zeros(len(starts) - 1, np.int32)
    needed[np.diff(starts) > 0] = batch.positions[ends - 1] // block_size + 1
    is_read = np.arange(columns) < needed[:, None]
    check_range("block_tables", cache.block_tables[is_read], 0, num_blocks)


def check_range(name: str, values: Int32s, low: int, end: int) -> None:
    """Raise ValueError unless all values are at least `low` and below `end`."""
    wrong = (values < low) | (values >= end)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(f"{name}[{index}] is {values[index]}; allowed are {low} to {end - 1}")


def num_ids(program: Program) -> int:
    """Return how many token ids a batch may have: the rows of the table that they are looked up
    in."""
    tables = [
        program.weights[op.weight].rows
        for op in program.segments["trunk"]
        if isinstance(op, Embed) and op.ids is IdSource.TOKENS
    ]
    return min(tables, default=program.vocab_size)

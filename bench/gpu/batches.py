"""Batches as the runner builds them, for sequences that each own a contiguous run of blocks.

Independent of the model, except for the number of its tokens, and of the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.program.batch import CacheRows, ForwardBatch

BLOCK_SIZE = 16


def batch_of(
    counts: Sequence[int], starts: Sequence[int], *, columns: int, vocab_size: int, samples: bool
) -> ForwardBatch:
    """Return a batch in which sequence i computes counts[i] tokens after starts[i] cached ones.

    Its blocks are i * columns and on; `samples`: whether its last row samples.
    """
    seq_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(seq_starts[-1]) - seq_starts[owner]
    positions = (np.array(starts)[owner] + within).astype(np.int32)
    tables = np.arange(len(counts) * columns, dtype=np.int32).reshape(len(counts), columns)
    blocks = tables[owner, positions // BLOCK_SIZE]
    last = (seq_starts[1:] - 1).astype(np.int32)
    return ForwardBatch(
        token_ids=((positions * 7 + owner * 13) % vocab_size).astype(np.int32),
        positions=positions,
        rope_positions=positions,
        caches=(
            CacheRows(
                kv_slots=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32),
                block_tables=tables,
            ),
        ),
        seq_starts=seq_starts,
        sample_rows=last if samples else last[:0],
    )


def columns_for(positions: int) -> int:
    """Return the number of blocks for so many positions."""
    return -(-positions // BLOCK_SIZE)

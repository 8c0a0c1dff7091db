"""ForwardBatch: the inputs of one step of a program, in flat arrays.

Built by the runner, read by executors. T token rows, S sequences, C table columns, R sample rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
NO_SLOTS: Int32s = np.empty(0, np.int32)
NO_SLOTS.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRows:
    """Where a step's rows lie in one cache group of the program.

    kv_slots are block * block_size + position % block_size, or -1 where nothing is stored.
    block_tables[s, c] is the pool block of positions c*block_size .. (c+1)*block_size-1; columns
    past the sequence's last position are not read.
    """

    kv_slots: Int32s  # [T]
    block_tables: Int32s  # [S, C]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's inputs, C-contiguous and, but for features, int32.

    Sequence s owns rows seq_starts[s]:seq_starts[s+1], at consecutive `positions`. caches: one for
    each of the program's cache groups, in order; without any, one that nothing reads. sample_rows
    index token rows, ascending. late_slots, where it is not empty: row i takes the token chosen
    last for slot late_slots[i], which only the device has yet, and token_ids[i] where that is -1.
    features: what a Feed reads. keeps_taps: each Tap is computed, as its output is read afterwards.
    """

    token_ids: Int32s  # [T]
    positions: Int32s  # [T] in the cache
    rope_positions: Int32s  # [T]
    caches: tuple[CacheRows, ...]
    seq_starts: Int32s  # [S + 1]
    sample_rows: Int32s  # [R]
    late_slots: Int32s = field(default_factory=lambda: NO_SLOTS)  # [T] or empty
    features: NDArray[np.float32] | None = None  # [T, W]
    keeps_taps: bool = False

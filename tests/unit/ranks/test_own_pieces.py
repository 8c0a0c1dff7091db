"""OwnPieces: slots, tables and blocks of each rank, by hand and by exhaustion."""

from __future__ import annotations

import numpy as np

from quire.program.batch import CacheRows, ForwardBatch
from quire.ranks.own_pieces import OwnPieces


def batch(positions: list[int], table: list[int], block_size: int) -> ForwardBatch:
    """Return rows of one sequence."""
    at, blocks = np.array(positions, np.int32), np.array(table, np.int32)
    slots = blocks[at // block_size] * block_size + at % block_size
    return ForwardBatch(
        token_ids=at,
        positions=at,
        rope_positions=at,
        caches=(CacheRows(kv_slots=slots.astype(np.int32), block_tables=blocks[None, :]),),
        seq_starts=np.array([0, len(at)], np.int32),
        sample_rows=np.empty(0, np.int32),
    )


def test_slots_and_tables_by_hand() -> None:
    step = batch([0, 255, 256, 511, 512, 800], [7, 3], 512)
    first, second = (
        OwnPieces(ranks=2, rank=rank, block_size=128).batch(step).caches[0] for rank in (0, 1)
    )
    assert first.kv_slots.tolist() == [7 * 256, 7 * 256 + 255, -1, -1, 3 * 256, -1]
    assert second.kv_slots.tolist() == [-1, -1, 7 * 256, 7 * 256 + 255, -1, 3 * 256 + 32]
    # Two blocks of 128 for each piece; those of the other rank are not read.
    assert first.block_tables.tolist() == [[14, 15, 0, 0, 6, 7, 0, 0]]
    assert second.block_tables.tolist() == [[0, 0, 14, 15, 0, 0, 6, 7]]


def test_every_position_is_on_one_rank_at_a_place_of_its_own() -> None:
    ranks, blocks = 3, [4, 0, 2]
    step = batch(list(range(3 * 768)), blocks, 768)
    found = [
        OwnPieces(ranks=ranks, rank=rank, block_size=16).batch(step).caches[0]
        for rank in range(ranks)
    ]
    slots = np.stack([cache.kv_slots for cache in found])
    assert ((slots >= 0).sum(axis=0) == 1).all()
    for rank, cache in enumerate(found):
        own = np.flatnonzero(slots[rank] >= 0)
        assert len(set(slots[rank][own].tolist())) == len(own) == 3 * 256
        # The table leads to the slot.
        in_table = cache.block_tables[0][own // 16] * 16 + own % 16
        np.testing.assert_array_equal(in_table, slots[rank][own])


def test_slots_that_store_nothing_and_blocks_that_are_copied() -> None:
    pieces = OwnPieces(ranks=2, rank=0, block_size=64)
    step = batch([5], [1], 512)
    empty = ForwardBatch(
        token_ids=step.token_ids,
        positions=step.positions,
        rope_positions=step.positions,
        caches=(
            CacheRows(kv_slots=np.array([-1], np.int32), block_tables=step.caches[0].block_tables),
        ),
        seq_starts=step.seq_starts,
        sample_rows=step.sample_rows,
    )
    assert pieces.batch(empty).caches[0].kv_slots.tolist() == [-1]
    assert pieces.blocks(np.array([3, 0], np.int32)).tolist() == [12, 13, 14, 15, 0, 1, 2, 3]
    assert pieces.engine_block_size == 512

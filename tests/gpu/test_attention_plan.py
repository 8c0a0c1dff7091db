"""Attention plans: every piece of every row is done once, and captured launches have room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from quire.execute.gpu.kernels import attention_plan as plans

pytestmark = pytest.mark.gpu

lengths = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 3_000)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    spans=lengths,
    group=st.sampled_from([1, 3, 4, 16]),
    rows=st.sampled_from([16, 128]),
    kv_heads=st.sampled_from([1, 8]),
    programs=st.sampled_from([0, 1, 40, 1_056]),
    max_partials=st.sampled_from([0, 7, 1_000]),
)
def test_each_piece_of_each_row_is_in_one_work_item(
    spans: list[tuple[int, int]],
    group: int,
    rows: int,
    kv_heads: int,
    programs: int,
    max_partials: int,
) -> None:
    starts = np.cumsum([0, *(count for count, _ in spans)]).astype(np.int32)
    firsts = np.array([first for _, first in spans], np.int32)
    plan = plans.plan_tiles(
        starts,
        firsts,
        np.arange(len(spans)),
        group=group,
        rows=rows,
        kv_heads=kv_heads,
        programs=programs,
        max_partials=max_partials,
    )
    seen: dict[tuple[int, int], int] = {}
    slots: dict[int, tuple[int, int]] = {}
    for sequence, row, tokens, first, end, partial in plan.items.tolist():
        assert 0 < tokens * group <= rows
        assert starts[sequence] <= row
        assert row + tokens <= starts[sequence + 1]
        last = firsts[sequence] + row - starts[sequence] + tokens - 1
        assert (partial == plans.WHOLE) <= (first == 0 and end == last // 256 + 1)
        for piece in range(first, end):
            for token in range(row, row + tokens):
                seen[token, piece] = seen.get((token, piece), 0) + 1
            if partial != plans.WHOLE:
                assert slots.setdefault(partial + piece - first, (row, piece)) == (row, piece)
    for sequence, (count, position) in enumerate(spans):
        for token in range(count):
            for piece in range((position + token) // 256 + 1):
                assert seen[starts[sequence] + token, piece] == 1
    assert sorted(slots) == list(range(plan.num_partials))
    assert plan.num_partials <= max_partials
    cut = {row for row, _ in slots.values()}
    for row, first, place in plan.merges.tolist():
        assert row - place in cut
        assert slots[first] == (row - place, 0)
    counts = [
        tokens for _, row, tokens, first, _, partial in plan.items if first == 0 and partial >= 0
    ]
    assert len(plan.merges) == sum(counts)
    if all(count == 1 for count, _ in spans):
        most = plans.max_items(len(spans), kv_heads=kv_heads, programs=programs)
        assert len(plan.items) <= most


def test_no_sequences_give_no_work_items() -> None:
    empty = np.zeros(0, np.int32)
    plan = plans.plan_tiles(
        np.zeros(1, np.int32),
        empty,
        empty,
        group=4,
        rows=16,
        kv_heads=8,
        programs=100,
        max_partials=10,
    )
    assert plan.items.shape == (0, plans.ITEM_FIELDS)
    assert plan.merges.shape == (0, plans.MERGE_FIELDS)


@pytest.mark.parametrize(("sequences", "items"), [(1, 16), (16, 64), (64, 64), (256, 256)])
def test_tiles_are_split_only_to_fill_the_gpu(sequences: int, items: int) -> None:
    """Plan for 4,096 positions and 8 KV heads on a GPU of 132 multiprocessors."""
    plan = plans.plan_tiles(
        np.arange(sequences + 1, dtype=np.int32),
        np.full(sequences, 4095, np.int32),
        np.arange(sequences),
        group=4,
        rows=16,
        kv_heads=8,
        programs=4 * 132,
        max_partials=10_000,
    )
    assert len(plan.items) == items


def test_a_plan_larger_than_its_captured_launch_is_rejected() -> None:
    plan = plans.plan_tiles(
        np.array([0, 1], np.int32),
        np.array([2_000], np.int32),
        np.arange(1),
        group=1,
        rows=16,
        kv_heads=1,
        programs=8,
        max_partials=8,
    )
    assert len(plans.padded(plan, items=12, merges=2).items) == 12
    with pytest.raises(ValueError, match="8 items and 1 merged rows; the launch was made for 4"):
        plans.padded(plan, items=4, merges=2)

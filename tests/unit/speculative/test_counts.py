"""Counts of accepted drafts and the loops over drafts, native and plain: the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire import _native
from quire.runner import plain_drafts
from quire.speculative import plain_counts
from quire.speculative.plain_counts import NUM_KINDS, PlainDraftCounts

NUM_SLOTS, MAX_DRAFTS, WIDTH = 4, 5, 24
both = pytest.mark.parametrize("loops", [_native, plain_drafts])


def ints(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_native_counts_are_the_plain_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    native = _native.DraftCounts(NUM_SLOTS, MAX_DRAFTS)
    plain = PlainDraftCounts(NUM_SLOTS, MAX_DRAFTS)
    for _ in range(int(rng.integers(1, 40))):
        slots = rng.permutation(NUM_SLOTS)[: int(rng.integers(1, NUM_SLOTS + 1))]
        drafted = rng.integers(1, MAX_DRAFTS + 1, len(slots)).astype(np.int32)
        accepted = rng.integers(0, drafted + 1).astype(np.int32)
        found = [np.empty((len(slots), MAX_DRAFTS)) for _ in range(2)]
        begins, kind, num_steps = rng.random() < 0.2, rng.integers(NUM_KINDS), rng.integers(1, 18)
        for counts, chances in zip((native, plain), found, strict=True):
            if begins:
                counts.begin(int(slots[0]), int(kind))
            counts.verified(slots, drafted, accepted)
            counts.chances(slots, int(num_steps), chances)
        np.testing.assert_allclose(*found, rtol=1e-12)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_native_lengths_are_the_plain_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 6))
    chances = np.cumprod(rng.uniform(0.2, 1.0, (num, MAX_DRAFTS)), axis=1)
    limits = rng.integers(0, MAX_DRAFTS + 1, num).astype(np.int32)
    times = (10.0, num, *(rng.choice([0.0, 1.0]) * rng.uniform(0.0, 5.0, 2)), 1.1)
    draft_ms = rng.choice([0.0, 1.0]) * rng.uniform(0.0, 6.0, num)
    jumps = rng.choice([0.0, 0.1, 1.0, 8.0], int(rng.integers(2, 1 + num * MAX_DRAFTS + 1)))
    added_ms = np.add.accumulate(jumps) - jumps[0]  # shorter than all drafts, at times
    found, speedups = [np.empty(num, np.int32) for _ in range(2)], []
    for module, lengths in zip((_native, plain_counts), found, strict=True):
        speedups.append(module.draft_lengths(chances, limits, draft_ms, added_ms, *times, lengths))
    assert found[0].tolist() == found[1].tolist()
    assert speedups[0] == pytest.approx(speedups[1], rel=1e-12)
    assert (speedups[0] > 1.0) == bool(found[0].any())
    assert (found[0] <= limits).all()


class Case:
    """Rows of a plan with drafts, drawn; some rows have none."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.num = int(rng.integers(1, NUM_SLOTS + 1))
        self.slots = rng.permutation(NUM_SLOTS)[: self.num].astype(np.int32)
        self.counts = rng.integers(0, MAX_DRAFTS + 1, self.num).astype(np.int32)
        self.firsts = rng.integers(1, WIDTH - MAX_DRAFTS, self.num).astype(np.int32)
        self.ids = rng.integers(1, 4, int(self.counts.sum())).astype(np.int32)
        more = rng.integers(1, 3, self.num)
        self.sample_counts = (self.counts + more).astype(np.int32)
        self.token_ids = rng.integers(1, 4, int(self.sample_counts.sum())).astype(np.int32)
        self.flags = rng.random(self.num) < 0.7
        self.missing = rng.random(len(self.token_ids)) < 0.2

    def table(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        tokens, lengths = np.zeros((NUM_SLOTS, WIDTH), np.int32), np.zeros(NUM_SLOTS, np.int32)
        lengths[self.slots] = self.firsts
        return tokens, lengths

    def results(self, loops: Any) -> list[list[Any]]:
        """Return what all loops make of this case."""
        placed = (self.slots, self.firsts, self.counts, self.ids)
        put, kept = self.table(), self.table()
        loops.put_drafts(*placed, *put)
        loops.put_drafts(*placed, *kept)
        loops.take_back_drafts(*placed, self.flags, *kept)
        dropped = self.token_ids.copy()
        loops.drop_after_mismatch(self.counts, self.ids, self.sample_counts, dropped)
        accepted = np.empty(self.num, np.int32)
        loops.count_accepted(self.counts, self.ids, self.sample_counts, self.token_ids, accepted)
        holed = np.where(self.missing, np.int32(-1), self.token_ids)
        counts, places = np.empty(self.num, np.int32), np.empty(len(holed), np.intp)
        num = loops.leading_tokens(self.sample_counts, holed, ~self.flags, counts, places)
        return [
            *(array.tolist() for array in (*put, *kept, dropped, accepted, counts, places[:num]))
        ]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_native_loops_over_drafts_are_the_plain_ones(seed: int) -> None:
    case = Case(seed)
    assert case.results(_native) == case.results(plain_drafts)


@both
def test_a_run_ends_with_the_first_token_that_differs(loops: Any) -> None:
    counts, ids = ints([2, 0, 2]), ints([7, 8, 4, 5])
    tokens = ints([7, 9, 6, 3, 4, 5, 6])
    loops.drop_after_mismatch(counts, ids, ints([3, 1, 3]), tokens)
    assert tokens.tolist() == [7, 9, -1, 3, 4, 5, 6]
    accepted = ints([0, 0, 0])
    loops.count_accepted(counts, ids, ints([2, 1, 3]), ints([7, 9, 3, 4, 5, 6]), accepted)
    assert accepted.tolist() == [1, 0, 2]


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    tokens, lengths = np.zeros((2, 4), np.int32), ints([1, 1])
    for slots, firsts, counts, ids in [
        ([2], [1], [1], [7]),  # no such slot
        ([0], [3], [2], [7, 8]),  # beyond the row
        ([0], [-1], [1], [7]),
        ([0], [1], [2], [7]),  # fewer ids than counted
        ([0], [1], [-1], []),
    ]:
        with pytest.raises(ValueError, match=r"drafts|rows"):
            _native.put_drafts(ints(slots), ints(firsts), ints(counts), ints(ids), tokens, lengths)
    assert not tokens.any()
    with pytest.raises(ValueError, match="sampled"):
        _native.drop_after_mismatch(ints([1]), ints([7]), ints([1]), ints([7]))
    counted = _native.DraftCounts(2, 3)
    with pytest.raises(ValueError, match="slot"):
        counted.begin(2, 0)
    with pytest.raises(ValueError, match="kind"):
        counted.begin(0, NUM_KINDS)
    with pytest.raises(ValueError, match="accepted"):
        counted.verified(np.array([0]), ints([2]), ints([3]))
    with pytest.raises(ValueError, match="verified"):
        counted.verified(np.array([0]), ints([4]), ints([3]))

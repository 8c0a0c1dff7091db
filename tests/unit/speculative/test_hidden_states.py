"""HiddenStateRing: the newest rows by slot and position, and which are found."""

from __future__ import annotations

import numpy as np

from quire.speculative.hidden_states import HiddenStateRing


def put(
    ring: HiddenStateRing, slot: int, positions: list[int], value: float, tenancy: int | None = None
) -> None:
    """Keep rows of the request that is in the slot now, or of an earlier one."""
    num = len(positions)
    rows = np.full((num, 2), value, np.float32)
    slots = np.full(num, slot)
    tenancies = ring.tenancy[slots] if tenancy is None else np.full(num, tenancy)
    ring.put(slots, tenancies, np.array(positions, np.int32), rows)


def value(ring: HiddenStateRing, slot: int, position: int) -> float | None:
    places, rows = ring.take(np.array([slot]), np.array([position], np.int32))
    return float(rows[0, 0]) if places[0] >= 0 else None


def test_the_newer_row_of_a_position_is_found() -> None:
    ring = HiddenStateRing(8, 2, 3)
    put(ring, 0, [4, 5, 6], 1.0)
    put(ring, 0, [6, 7], 2.0)
    assert [value(ring, 0, at) for at in (3, 4, 6, 7, 8)] == [None, 1.0, 2.0, 2.0, None]
    assert value(ring, 1, 4) is None
    places, rows = ring.take(np.array([1, 0, 2]), np.array([4, 4, 4], np.int32))
    assert (places >= 0).tolist() == [False, True, False]
    assert rows.tolist() == [[1.0, 1.0]]


def test_the_oldest_rows_of_all_slots_are_displaced() -> None:
    ring = HiddenStateRing(4, 2, 2)
    put(ring, 0, [0, 1, 2], 1.0)
    put(ring, 1, [7, 8], 2.0)
    assert [value(ring, 0, at) for at in (0, 1, 2)] == [None, 1.0, 1.0]
    put(ring, 1, [9, 10, 11, 12, 13, 14], 3.0)
    assert [value(ring, 1, at) for at in (8, 10, 11, 14)] == [None, None, 3.0, 3.0]
    assert value(ring, 0, 2) is None


def test_rows_of_an_earlier_tenancy_are_not_found() -> None:
    ring = HiddenStateRing(8, 2, 2)
    put(ring, 0, [0, 1, 2], 1.0)
    ring.tenancy[0] += 1  # given back
    assert value(ring, 0, 2) is None
    put(ring, 0, [3], 1.0, tenancy=0)  # of a step in flight
    ring.tenancy[0] += 1  # given to the next request
    assert value(ring, 0, 3) is None
    put(ring, 0, [2], 2.0)
    assert [value(ring, 0, at) for at in (0, 1, 2, 3)] == [None, None, 2.0, None]
    assert ring.first_of_run(0, 3) == 2


def test_runs_end_at_the_position_asked_for() -> None:
    ring = HiddenStateRing(16, 2, 2)
    put(ring, 0, [2, 3, 4, 7, 8, 9], 1.0)
    put(ring, 0, [8, 9], 1.0)
    put(ring, 1, [5, 6], 1.0)
    runs = [ring.first_of_run(0, end) for end in (10, 9, 8, 7, 5, 1)]
    assert runs == [7, 7, 7, 7, 2, 1]
    assert ring.find(np.empty(0, np.intp), np.empty(0, np.int32)).tolist() == []


def test_steps_of_decoding_put_no_rows_during_a_pause() -> None:
    ring = HiddenStateRing(8, 2, 2)
    assert [ring.keeps(step, is_decode=True) for step in (1, 2)] == [True, True]
    ring.pause(6)
    decodes = [(3, True), (4, False), (5, True), (6, True), (7, True)]
    assert [ring.keeps(step, is_decode=one) for step, one in decodes] == [
        *(False, True, False, False, True)
    ]
    ring.pause(10)
    assert not ring.keeps(8, is_decode=True)
    ring.pause(8)
    assert ring.keeps(9, is_decode=True)


def test_steps_without_rows_count_for_a_pause() -> None:
    """Such as those that compute layers of a prompt only: the runner is not asked in these."""
    ring = HiddenStateRing(8, 2, 2)
    ring.keeps(1, is_decode=True)
    ring.pause(5)
    assert not ring.keeps(2, is_decode=True)
    assert ring.keeps(6, is_decode=True)


def test_steps_of_a_pause_are_idle_once_a_gap_was_noted_and_nothing_is_put_since() -> None:
    ring = HiddenStateRing(8, 2, 2)
    assert ring.keeps(1, is_decode=True)
    ring.pause(9)
    for step in (2, 3):  # the second while the first is in flight
        assert ring.idle_until == -1
        assert not ring.keeps(step, is_decode=True)
    ring.note_gap(2)
    assert ring.idle_until == 9
    ring.pause(12)
    assert ring.idle_until == 12
    assert ring.keeps(5, is_decode=False)  # step 3 is still in flight
    assert ring.idle_until == -1
    ring.note_gap(3)
    assert ring.idle_until == -1
    assert not ring.keeps(6, is_decode=True)
    ring.note_gap(6)
    assert ring.idle_until == 12
    ring.pause(8)
    assert ring.idle_until == 8
    assert ring.keeps(9, is_decode=True)
    ring.pause(12)
    assert ring.idle_until == -1


def test_rows_that_follow_each_other_are_at_most_those_since_a_step_that_put_none() -> None:
    ring, slots = HiddenStateRing(8, 2, 3), np.arange(3)
    put(ring, 0, [0, 1, 2], 1.0)
    put(ring, 1, [0, 1], 1.0)
    assert ring.num_kept(slots).tolist() == [3, 2, 0]
    ring.pause(1)
    ring.keeps(1, is_decode=False)
    put(ring, 1, [2], 1.0)
    assert ring.num_kept(slots).tolist() == [3, 3, 0]
    ring.pause(2)
    assert not ring.keeps(2, is_decode=True)
    assert ring.num_kept(slots).tolist() == [3, 3, 0]  # a step before may still put some
    put(ring, 0, [3], 1.0)
    assert ring.num_kept(slots).tolist() == [4, 3, 0]
    ring.note_gap(2)
    assert ring.num_kept(slots).tolist() == [0, 0, 0]
    put(ring, 0, [4, 5], 1.0)
    put(ring, 2, [7], 1.0)
    assert ring.num_kept(slots).tolist() == [2, 0, 1]
    ring.tenancy[2] += 1
    assert ring.num_kept(slots).tolist() == [2, 0, 0]
    put(ring, 1, list(range(7)), 1.0)  # which displace others
    assert ring.num_kept(slots).tolist() == [0, 7, 0]


def test_rows_from_before_a_step_that_put_none_are_not_found() -> None:
    """Those of rejected drafts would be the newest of positions that it computed anew."""
    ring = HiddenStateRing(8, 2, 2)
    put(ring, 0, [4, 5, 6, 7], 1.0)  # of drafts, of which the first was right
    put(ring, 1, [2], 1.0)
    ring.note_gap(2)  # a step that computed position 6 of slot 0
    assert [value(ring, 0, at) for at in (5, 6, 7)] == [None, None, None]
    assert (value(ring, 1, 2), ring.first_of_run(0, 7)) == (None, 7)
    put(ring, 0, [7], 2.0)
    assert [value(ring, 0, at) for at in (6, 7)] == [None, 2.0]
    put(ring, 0, [8, 9, 10, 11], 2.0)
    assert (value(ring, 0, 11), ring.first_of_run(0, 12)) == (2.0, 7)


def test_it_does_not_matter_when_rows_are_looked_for() -> None:
    """Also over many puts, which displace rows that were never looked for."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        seldom, often = HiddenStateRing(7, 2, 3), HiddenStateRing(7, 2, 3)
        for number in range(rng.integers(1, 30)):
            slot, first = int(rng.integers(3)), int(rng.integers(20))
            is_other = rng.random() < 0.2
            positions = list(range(first, first + int(rng.integers(1, 10))))
            for ring in (seldom, often):
                ring.tenancy[slot] += is_other
                put(ring, slot, positions, float(number))
            value(often, slot, 0)
            if rng.random() < 0.2:
                gone = int(rng.integers(3))
                for ring in (seldom, often):
                    ring.tenancy[gone] += 1
                    before = int(ring.tenancy[gone]) - 1
                    put(ring, gone, [first], -1.0, before)  # of a step in flight
        for slot in range(3):
            for at in range(30):
                assert value(seldom, slot, at) == value(often, slot, at)

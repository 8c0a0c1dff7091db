"""HiddenStateRing: hidden states of the newest positions that the target computed, for draft heads.

The runner puts rows in, by slot and position; proposers take them out. Bounded: a new row takes the
place of the oldest of all slots, so that a request without rows has no drafts until it is
computed again. What the model can offer is listed in quire/program/taps.py. Knows no executor.
Always holds: of two rows of a position the newer one is found; rows of an earlier request never
are, as its slot has another tenancy, nor are rows from before a step that put none, as that step
may have computed their position again, with another token than a rejected draft. Each step puts
rows, and few look for some, so places are noted when they are looked for; while drafts rest for
long, steps put none. Letters: N rows, R rows that are kept, W columns.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


class HiddenStateRing:
    """At most `num_rows` rows of `width` columns. Two threads may use it.

    idle_until: steps of decoding up to this one put nothing, which need not be noted, as nothing
    was put since that was noted; read in each step. tenancy: of each slot now, a number that
    changes whenever the slot is given to a request or given back (SlotTables of the runner that
    puts rows in).
    """

    def __init__(self, num_rows: int, width: int, num_slots: int) -> None:
        self.rows: Float32s = np.zeros((num_rows, width), np.float32)  # [R, W]
        self._slots: Index = np.full(num_rows, -1, np.intp)
        self._positions: Int32s = np.zeros(num_rows, np.int32)
        self._tenancies: Int64s = np.zeros(num_rows, np.int64)
        # The newest row of a slot at the positions that are equal modulo R.
        self._places = np.full((num_slots, num_rows), -1, np.int32)
        self.tenancy: Int64s = np.zeros(num_slots, np.int64)
        self._num_put = self._num_indexed = 0
        # Numbers of steps, as in plans. The thread that puts rows writes the last step that was to
        # put some, and the last that noted that it puts none.
        self._kept_step = self._gap_step = -1
        self._paused_until = 0  # the last step of a pause
        self.idle_until = -1
        self._steps_lock = threading.Lock()
        self._first_kept = 0  # the first row that was put since a step of decoding put none
        self._lock = threading.Lock()

    def put(self, slots: Index, tenancies: Int64s, positions: Int32s, rows: Float32s) -> None:
        """Keep rows [N, W] of slots[i] at positions[i]; only the last R of more.

        tenancies: of their slots, when they were computed.
        """
        most = len(self.rows)
        if len(rows) > most:
            slots, tenancies = slots[-most:], tenancies[-most:]
            positions, rows = positions[-most:], rows[-most:]
        with self._lock:
            if self._num_put + len(rows) - self._num_indexed > most:
                self._index()
            first = self._num_put % most
            end = first + len(rows)
            # Rows that lie together are put as such, which takes half as long for a few.
            at: slice | Index = slice(first, end)
            if end > most:
                at = np.arange(first, end) % most
            self.rows[at], self._slots[at] = rows, slots
            self._positions[at], self._tenancies[at] = positions, tenancies
            self._num_put += len(rows)

    def pause(self, last_step: int) -> None:
        """Let steps of decoding put no rows up to `last_step`."""
        with self._steps_lock:
            self._paused_until = max(last_step, 0)
            self._note_idle()

    def keeps(self, step: int, *, is_decode: bool) -> bool:
        """Return whether the rows of `step` are put in: all but those of decoding during a pause.
        Called for each step, in their order, but for those of decoding up to `idle_until`; steps
        before it may not have put theirs. The thread is that of `put` and `note_gap`."""
        if is_decode and step <= self._paused_until:
            return False
        self._kept_step = step
        if self.idle_until >= 0:
            with self._steps_lock:
                self._note_idle()
        return True

    def note_gap(self, step: int) -> None:
        """Note that `step` puts no rows, after those of the steps before it."""
        self._first_kept = self._num_put
        with self._steps_lock:
            self._gap_step = step
            self._note_idle()

    def _note_idle(self) -> None:
        is_gap = self._gap_step > self._kept_step
        self.idle_until = self._paused_until if is_gap else -1

    def num_kept(self, slots: Index) -> Index:
        """Return how many rows at most follow each other up to the newest one of slots[i]: those of
        its request since a step of decoding put none."""
        with self._lock:
            first = max(self._num_put - len(self.rows), self._first_kept)
            at = np.arange(first, self._num_put) % len(self.rows)
            of_slots = self._slots[at]
            of_slots = of_slots[self._tenancies[at] == self.tenancy[of_slots]]
            counts: Index = np.bincount(of_slots, minlength=len(self.tenancy))[slots]
        return counts

    def find(self, slots: Index, positions: Int32s) -> Index:
        """Return the places of the rows of slots[i] at positions[i]; -1 where there is none."""
        with self._lock:
            return self._find(slots, positions)

    def take(self, slots: Index, positions: Int32s) -> tuple[Index, Float32s]:
        """Return which rows there are [N] (see find), and copies of those that are."""
        with self._lock:
            places = self._find(slots, positions)
            return places, self.rows[places[places >= 0]]

    def first_of_run(self, slot: int, end: int) -> int:
        """Return the first position of the longest run of rows of `slot` that ends at position
        end - 1; `end` if that one is missing."""
        num = min(end, len(self.rows))
        positions = np.arange(end - 1, end - 1 - num, -1, dtype=np.int32)
        with self._lock:
            is_there = self._find(np.full(num, slot), positions) >= 0
        return end - (num if is_there.all() else int(is_there.argmin()))

    def _index(self) -> None:
        """Note the places of what was put since; of two rows of a position that of the newer."""
        if self._num_indexed == self._num_put:
            return
        most = len(self.rows)
        at = np.arange(self._num_indexed, self._num_put) % most
        self._places[self._slots[at], self._positions[at] % most] = at
        self._num_indexed = self._num_put

    def _find(self, slots: Index, positions: Int32s) -> Index:
        self._index()
        places: Index = self._places[slots, positions % len(self.rows)].astype(np.intp)
        is_right = self._slots[places] == slots
        is_right &= self._positions[places] == positions
        is_right &= self._tenancies[places] == self.tenancy[slots]
        if (num_since := self._num_put - self._first_kept) < len(self.rows):  # rows since the gap
            is_right &= (self._num_put - 1 - places) % len(self.rows) < num_since
        return np.where(is_right & (places >= 0), places, -1)


def ring_bytes(num_rows: int, width: int, *, num_slots: int) -> int:
    """Return the memory of a ring: f32 rows, what is known of each, and the table of places."""
    return num_rows * (4 * width + 8 + 4 + 8 + 4 * num_slots)

"""StepHistory: the last steps of a scheduler, and the requests that ended, for timelines.

Noting a step is an append to `recent`. Every PACK_STEPS steps these are packed: 37 bytes a step, a
bit for each slot, and 16 bytes for a row of several tokens. Read on request, also by other threads.
Always holds: bounded in steps, bytes, requests and obstacles; a step holds slots and counts, no
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.records import PartLayers
from quire.base.timeline import MAX_HISTORIES
from quire.scheduler.request_history import Obstacles, RequestHistory

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
Uint8s = NDArray[np.uint8]
Uint16s = NDArray[np.uint16]
T = TypeVar("T")

# A power of two: the scheduler packs where a step's number is a multiple.
PACK_STEPS = 256
# Packs take no more bytes than these for each step that is to be kept; long ones keep fewer steps.
BYTES_PER_STEP = 256
# Of a pack beside the contents of its arrays.
_PACK_BYTES = 1536
MAX_OBSTACLES = 4096
MAX_MASK_WAITS = 4096

# number, began_ms, ended_ms, slots, starts, counts, sample_counts, layers
Noted = tuple[int, float, float, Int32s, Int32s, Int32s, Int32s, PartLayers | None]


@dataclass(frozen=True, slots=True, eq=False)
class StepPack:
    """Consecutive steps. rows, tokens: of each step. slot_bits: for each slot one bit per step, 1
    where it has a row.

    long_*: rows of several tokens, or without a sample: the step as a place in this pack, the slot,
    the first position, the tokens and the number of them sampled. A part by layers is such a row,
    the last of them, and counts its tokens in the step of the last layer. part_shares: of layers.
    """

    steps: Int64s
    began_ms: Float64s
    ended_ms: Float64s
    rows: Int32s
    tokens: Int32s
    slot_bits: Uint8s
    long_at: Uint16s
    long_slots: Int32s
    long_starts: Int32s
    long_counts: Int32s
    long_samples: Uint16s
    part_shares: Float64s

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        steps = 3 * self.steps.nbytes + 2 * self.rows.nbytes + self.slot_bits.nbytes
        return _PACK_BYTES + steps + 16 * len(self.long_at) + self.part_shares.nbytes

    @property
    def long_shares(self) -> Float64s:
        """The share of the layers that each long row computes: 1.0 but for parts by layers."""
        return np.concatenate(
            (np.ones(len(self.long_at) - len(self.part_shares)), self.part_shares)
        )

    def has_row(self, slot: int) -> Uint8s:
        """Return for each step 1 if `slot` has a row in it, else 0."""
        if slot >= len(self.slot_bits):
            return np.zeros(len(self.steps), np.uint8)
        return np.unpackbits(self.slot_bits[slot], count=len(self.steps))


class StepHistory:
    """num_steps: how many steps are kept; 0: nothing is.

    recent: steps that are not packed yet. ended: histories of requests that ended, oldest first.
    obstacles: (ms, reason, arrival) of what ended a walk along the queue; arrival: of the request
    that could not begin, -1 for any; a reason of None: there was no obstacle. mask_waits: (end,
    ms) that steps waited for grammar masks; other threads append to it.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        kept = num_steps > 0
        self.recent: deque[Noted] = deque(maxlen=2 * PACK_STEPS if kept else 0)
        self.ended: deque[RequestHistory] = deque(maxlen=MAX_HISTORIES if kept else 0)
        self.obstacles: Obstacles = deque(maxlen=MAX_OBSTACLES if kept else 0)
        self.mask_waits: deque[tuple[float, float]] = deque(maxlen=MAX_MASK_WAITS if kept else 0)
        self._packs: deque[StepPack] = deque()
        self._num_bytes = 0

    @property
    def first_step(self) -> int:
        """The oldest step that is kept."""
        if self._packs:
            return int(self._packs[0].steps[0])
        return self.recent[0][0] if self.recent else 0

    @property
    def last_step(self) -> int:
        """The newest step that is kept."""
        if self.recent:
            return self.recent[-1][0]
        return int(self._packs[-1].steps[-1]) if self._packs else 0

    @property
    def oldest_ms(self) -> float | None:
        """When the oldest step that is kept ended; None before any."""
        if self._packs:
            return float(self._packs[0].ended_ms[0])
        return self.recent[0][2] if self.recent else None

    def pack(self) -> None:
        """Pack the recent steps, and forget requests that ended before the oldest step."""
        if not self.recent:
            return
        packs = self._packs
        packs.append(packed(self.recent))
        self.recent.clear()
        self._num_bytes += packs[-1].num_bytes
        max_packs, max_bytes = self.num_steps // PACK_STEPS, self.num_steps * BYTES_PER_STEP
        if len(packs) < max_packs and self._num_bytes <= max_bytes:
            return
        while len(packs) > 1 and (len(packs) > max_packs or self._num_bytes > max_bytes):
            self._num_bytes -= packs.popleft().num_bytes
        oldest_ms = packs[0].began_ms[0]
        while self.ended and self.ended[0].ended_ms < oldest_ms:
            self.ended.popleft()

    def steps_after(self, number: int) -> tuple[list[tuple[int, float, float, int, int]], int]:
        """Return the kept steps after step `number`, and how many after it are kept no more.

        Each as (step, began_ms, ended_ms, rows, tokens). May be called in any thread.
        """
        # In this order steps that are packed meanwhile are in both, in the other in none.
        recent = copied(self.recent)
        packs = [pack for pack in copied(self._packs) if pack.steps[-1] > number]
        if recent:
            packs.append(packed(recent))
        found: dict[int, tuple[int, float, float, int, int]] = {}
        for pack in packs:
            columns = (pack.steps, pack.began_ms, pack.ended_ms, pack.rows, pack.tokens)
            for step in zip(*(column.tolist() for column in columns), strict=True):
                if step[0] > number:
                    found[step[0]] = step
        steps = list(found.values())
        return steps, max(steps[0][0] - number - 1, 0) if steps else 0

    def packs_between(self, first: int, last: int) -> list[StepPack]:
        """Return the packs with steps from `first` to `last`, oldest first."""
        packs: list[StepPack] = []
        if self.recent and self.recent[-1][0] >= first and self.recent[0][0] <= last:
            packs.append(packed(self.recent))
        for pack in reversed(self._packs):
            if pack.steps[-1] < first:
                break
            if pack.steps[0] <= last:
                packs.append(pack)
        return packs[::-1]


def copied(items: deque[T]) -> list[T]:
    """Return the items of a deque that another thread changes."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # changed meanwhile
            continue


def packed(noted: Sequence[Noted] | deque[Noted]) -> StepPack:
    """Return these steps as a pack."""
    sizes = np.array([each[3].size for each in noted])
    places = np.repeat(np.arange(len(noted), dtype=np.int32), sizes)
    slots, starts, counts, samples = (
        np.concatenate([each[column] for each in noted]) for column in (3, 4, 5, 6)
    )
    present = np.zeros((int(slots.max(initial=-1)) + 1, len(noted)), np.bool_)
    present[slots, places] = True
    long = (counts > 1) | (samples == 0)
    layered = [(at, each[7]) for at, each in enumerate(noted)]
    parts = [(at, part) for at, part in layered if part is not None]

    def with_parts(values: Int32s, of_parts: list[int]) -> Int32s:
        return np.concatenate((values[long], np.array(of_parts, np.int32)))

    return StepPack(
        steps=np.array([each[0] for each in noted], np.int64),
        began_ms=np.array([each[1] for each in noted]),
        ended_ms=np.array([each[2] for each in noted]),
        rows=sizes.astype(np.int32),
        tokens=np.bincount(places, counts, len(noted)).astype(np.int32),
        slot_bits=np.packbits(present, axis=1),
        long_at=with_parts(places, [at for at, _ in parts]).astype(np.uint16),
        long_slots=with_parts(slots, [part.slot for _, part in parts]),
        long_starts=with_parts(starts, [part.start for _, part in parts]),
        long_counts=with_parts(counts, [part.count for _, part in parts]),
        long_samples=with_parts(samples, [0 for _ in parts]).astype(np.uint16),
        part_shares=np.array([part.share for _, part in parts], np.float64),
    )

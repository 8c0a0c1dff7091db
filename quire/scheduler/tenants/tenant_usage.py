"""TenantUsage: what each tenant's requests hold, and what its limits allow.

A tenant's *charge* is the blocks its running requests name; one that r requests name counts 1/r for
each, so charges add up to the blocks in use, shared prefixes and forks included. Its *commitment*
is that and what those requests still lack for the tokens they know. A floor reserves blocks as far
as its tenant's commitment is below it; a ceiling bounds the commitment. Knows no order and no time.
Always holds: the longest accepted request fits below its tenant's ceiling and beside all others'
floors, so that the first request can always advance.

Charges are summed up on demand, at admissions and where blocks run short; never where no tenant has
a floor or a ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidParameter, SettingError, TenantLimit
from quire.base.records import Request
from quire.cache.manager import CacheManager
from quire.scheduler.limits import queue_factor
from quire.scheduler.running_batch import Index, Int32s, RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.step_budget import BlockShares

Float64s = NDArray[np.float64]
_NOBODY = -1
# Sums of thirds and the like are not whole numbers to the last bit.
_SLACK = 1e-6
# Reported blocks may be so old: they are summed up for metrics only.
REPORT_EVERY_MS = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant's requests may have; None for no limit.

    name: as requests carry it; "" is the tenant of those that carry none, and shown is its name in
    messages. max_queued: that wait, beside those that could run at once; twice as many with streams
    that continue.
    """

    name: str
    shown: str
    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    max_running: int | None = None
    max_queued: int | None = None


ANYBODY = TenantLimits(name="", shown="default")


class TenantUsage(BlockShares):
    """Usage by tenant of one scheduler. limits: of all tenants, at least one.

    Raises SettingError where the floors leave a tenant nothing.
    """

    def __init__(
        self, limits: Sequence[TenantLimits], batch: RunningBatch, cache: CacheManager
    ) -> None:
        self.limits = tuple(limits) or (ANYBODY,)
        self._knows_names = bool(limits)
        self._numbers = {one.name: number for number, one in enumerate(self.limits)}
        super().__init__(cache, len(batch.sequences))
        self._batch = batch
        num_tenants = len(self.limits)
        self.waiting = [0] * num_tenants
        self.running = [0] * num_tenants
        self._of_slot: Index = np.full(len(batch.sequences), _NOBODY, np.intp)
        self._floors: Float64s = np.array([one.floor_blocks for one in self.limits], np.float64)
        self._ceilings: Float64s = np.array(
            [math.inf if one.ceiling_blocks is None else one.ceiling_blocks for one in self.limits]
        )
        self.has_floors = bool(self._floors.any())
        self.limits_running = any(one.max_running is not None for one in self.limits)
        self.has_ceilings = bool(np.isfinite(self._ceilings).any())
        self._sum_floors = int(self._floors.sum())
        self._max_blocks = self._check_floors()
        self._last_charges: Float64s | None = None
        self._last_commitments: Float64s | None = None
        self._reported_ms = -math.inf
        self._reported_blocks = (0,) * num_tenants

    # ---- arrivals and departures

    def max_tokens(self, request: Request) -> int:
        """Return the most a request of that tenant can hold; InvalidParameter if it is not
        known."""
        return self._max_blocks[self._number_of(request)] * self._cache.block_size

    def max_running(self, request: Request) -> int:
        """Return how many requests of that tenant may run at once."""
        one = self.limits[self._number_of(request)]
        return min(one.max_running or len(self._batch.sequences), len(self._batch.sequences))

    def shown(self, request: Request) -> str:
        """Return what its tenant is called."""
        return self.limits[self._number_of(request)].shown

    def check_queue(self, request: Request, retry_after_s: Callable[[], float | None]) -> None:
        """Raise where its tenant has too many waiting: InvalidParameter where that is no matter
        of time, else TenantLimit, with what retry_after_s says."""
        number = self._number_of(request)
        one = self.limits[number]
        if one.max_queued is None:
            return
        max_running = one.max_running or len(self._batch.sequences)
        if request.sampling.num_sequences > one.max_queued + max_running:
            param = "n" if request.sampling.best_of is None else "best_of"
            raise InvalidParameter(
                f"{param} is {request.sampling.num_sequences}; of tenant {one.shown} "
                f"{max_running} requests may run and {one.max_queued} wait: at most "
                f"{max_running + one.max_queued} are allowed",
                param=param,
            )
        could_run = min(len(self._batch.free_slots), max(max_running - self.running[number], 0))
        max_queued = queue_factor(request) * one.max_queued
        if self.waiting[number] >= max_queued + could_run:
            raise TenantLimit(
                f"{self.waiting[number]} requests of tenant {one.shown} are waiting, at most "
                f"{max_queued} may beside those that can start; try again later",
                retry_after_s=retry_after_s(),
            )

    def enqueued(self, sequence: SequenceState) -> None:
        """`sequence` is in the queue."""
        self.waiting[self._number_of(sequence.request)] += 1

    def dequeued(self, sequence: SequenceState) -> None:
        """`sequence` left the queue, to run or for good."""
        self.waiting[self._number_of(sequence.request)] -= 1

    def started(self, sequence: SequenceState) -> None:
        """`sequence` has a slot, with its blocks."""
        number = self._number_of(sequence.request)
        self._of_slot[sequence.slot] = number
        self.running[number] += 1
        self.changed()

    def stopped(self, slots: Sequence[int]) -> None:
        """Note that the requests in `slots` leave them; their blocks are given back."""
        for slot in slots:
            self.running[self._of_slot[slot]] -= 1
            self._of_slot[slot] = _NOBODY
        self.changed()

    def changed(self) -> None:
        """Forget sums: blocks or goals of running requests have changed."""
        self._last_charges = self._last_commitments = None

    # ---- admission

    def is_full(self, sequence: SequenceState) -> bool:
        """Return whether as many of its tenant's requests run as may."""
        number = self._number_of(sequence.request)
        most = self.limits[number].max_running
        return most is not None and self.running[number] + sequence.num_slots > most

    def passes_ceiling(self, sequence: SequenceState, num_blocks: int) -> bool:
        """Return whether its tenant may have `num_blocks` more."""
        if not self.has_ceilings:
            return True
        number = self._number_of(sequence.request)
        ceiling = float(self._ceilings[number])
        if ceiling == math.inf:
            return True
        return float(self._committed()[number]) + num_blocks <= ceiling + _SLACK

    def reserved_for_others(self, sequence: SequenceState) -> int:
        """Free blocks that are not for `sequence`: other tenants' floors."""
        if not self.has_floors:
            return 0
        lacking = self._floors - self._committed()
        return self._kept(lacking, self._number_of(sequence.request))

    def has_floor_left(self, sequence: SequenceState) -> bool:
        """Return whether blocks are held back for its tenant."""
        return self.has_floors and float(self._held_back()[self._number_of(sequence.request)]) >= 1

    def fits_floor(self, sequence: SequenceState, num_blocks: int) -> bool:
        """Return whether `num_blocks` of those held back for its tenant are free for it now."""
        if not self.has_floors:
            return False
        number = self._number_of(sequence.request)
        if num_blocks > float(self._held_back()[number]) + _SLACK:
            return False
        return num_blocks <= self._cache.num_free - self._kept(
            self._floors - self._charges(), number
        )

    def any_floor_left(self) -> bool:
        """Return whether a tenant with waiting requests has blocks held back for it."""
        if not self.has_floors:
            return False
        held = self._held_back()
        return any(count and held[number] >= 1 for number, count in enumerate(self.waiting))

    # ---- running requests

    def can_grow(self, slots: Index, needs: Int32s) -> bool:
        """Return whether slots[i] may take needs[i] more blocks, all of them, beside all floors."""
        left = self._cache.num_free - int(np.add.reduce(needs))
        if not self.has_floors or left >= self._sum_floors:
            return left >= 0
        taken = np.bincount(self._of_slot[slots], needs, minlength=len(self.limits))
        held = np.maximum(self._floors - self._charges() - taken, 0)
        return left + _SLACK >= float(held.sum())

    def reserved_from_slot(self, slot: int) -> int:
        """Free blocks that are not for the request in `slot`: other tenants' floors."""
        if not self.has_floors:
            return 0
        return self._kept(self._floors - self._charges(), int(self._of_slot[slot]))

    def may_lose(self, victim: int, slot: int) -> bool:
        """Return whether slot `victim` may be preempted for the request in `slot`: not where it is
        of another tenant that has no more than its floor."""
        return self._may_lose(victim, int(self._of_slot[slot]))

    def may_lose_for(self, victim: int, sequence: SequenceState) -> bool:
        """Return may_lose for `sequence`, which waits."""
        return self._may_lose(victim, self._number_of(sequence.request))

    def _may_lose(self, victim: int, number: int) -> bool:
        owner = self._of_slot[victim]
        if not self.has_floors or owner == number:
            return True
        return float(self._charges()[owner]) > float(self._floors[owner]) + _SLACK

    def above_ceilings(self) -> list[tuple[int, Index]]:
        """Tenants that have more than their ceiling, by number, and their slots."""
        if not self.has_ceilings:
            return []
        slots = self._slots()
        owners = self._of_slot[slots]
        short = self._cache.blocks_short(slots, self._batch.goal[slots])
        tables = self._cache.tables
        wanted = tables.counts[slots] - tables.firsts[slots] + short
        # As if nothing were shared: if even that is within the ceilings, all is well.
        most = np.bincount(owners, wanted, minlength=len(self.limits))
        return [
            (number, slots[owners == number])
            for number in (most > self._ceilings).nonzero()[0].tolist()
            if self.is_above_ceiling(number)
        ]

    def is_above_ceiling(self, number: int) -> bool:
        """Return whether tenant `number` has more than its ceiling."""
        return float(self._committed()[number]) > float(self._ceilings[number]) + _SLACK

    # ---- reports

    def reported_blocks(self, now_ms: float) -> tuple[int, ...]:
        """Return blocks of each tenant's running requests, shared ones divided; at most so old."""
        if len(self.limits) > 1 and now_ms >= self._reported_ms + REPORT_EVERY_MS:
            self._reported_ms = now_ms
            self._reported_blocks = tuple(round(charge) for charge in self._charges().tolist())
        return self._reported_blocks

    def problems(self, num_waiting: int) -> list[str]:
        """Return contradictions between these counts and the running batch, in words."""
        found = []
        running = [0] * len(self.limits)
        for slot, sequence in enumerate(self._batch.sequences):
            number = _NOBODY if sequence is None else self._number_of(sequence.request)
            if self._of_slot[slot] != number:
                found.append(f"slot {slot} is of tenant {number}, not {self._of_slot[slot]}")
            if sequence is not None:
                running[number] += 1
        if running != self.running:
            found.append(f"tenants have {running} requests running, not {self.running}")
        if min(self.waiting) < 0 or sum(self.waiting) != num_waiting:
            found.append(f"tenants have {self.waiting} requests waiting, {num_waiting} in all")
        return found

    # ---- sums

    def _number_of(self, request: Request) -> int:
        if not self._knows_names:
            return 0
        number = self._numbers.get(request.tenant)
        if number is None:
            raise InvalidParameter(
                f"tenant {request.tenant!r} is not one of the {len(self.limits)} of this engine; "
                "name one of its file",
                param="tenant",
            )
        return number

    def _slots(self) -> Index:
        return np.flatnonzero(self._of_slot != _NOBODY)

    def _charges(self) -> Float64s:
        """Return blocks by tenant, shared ones divided among those that name them."""
        if self._last_charges is not None:
            return self._last_charges
        slots, tables = self._slots(), self._cache.tables
        counts, firsts = tables.counts[slots], tables.firsts[slots]
        rows = tables.blocks[slots, : int(counts.max(initial=0))]
        columns = np.arange(rows.shape[1])
        blocks = rows[(columns < counts[:, None]) & (columns >= firsts[:, None])]
        shares = 1.0 / self._cache.pool.references[blocks]
        owners = np.repeat(self._of_slot[slots], counts - firsts)
        charges = np.bincount(owners, shares, minlength=len(self.limits)).astype(np.float64)
        self._last_charges = charges
        return charges

    def _committed(self) -> Float64s:
        """Charges, and what running requests still lack for the tokens they know."""
        if self._last_commitments is None:
            slots = self._slots()
            short = self._cache.blocks_short(slots, self._batch.goal[slots])
            lacking = np.bincount(self._of_slot[slots], short, minlength=len(self.limits))
            self._last_commitments = self._charges() + lacking
        return self._last_commitments

    def _held_back(self) -> Float64s:
        return np.maximum(self._floors - self._committed(), 0)

    def _kept(self, lacking: Float64s, number: int) -> int:
        held = np.maximum(lacking, 0)
        return math.ceil(float(held.sum() - held[number]) - _SLACK)

    def _check_floors(self) -> tuple[int, ...]:
        """Return the most blocks one request of each tenant can have."""
        total = self._cache.num_blocks
        if self._sum_floors > total:
            raise SettingError(
                f"tenants' floors are {self._sum_floors} KV blocks in all "
                f"({self._named_floors()}) and the cache has {total}; lower them, or give it more "
                "memory"
            )
        most = []
        for one in self.limits:
            left = total - (self._sum_floors - one.floor_blocks)
            if left < 1:
                raise SettingError(
                    f"tenants' floors ({self._named_floors()}) leave tenant {one.shown} none of "
                    f"the {total} KV blocks; lower them, or give it more memory"
                )
            most.append(left if one.ceiling_blocks is None else min(left, one.ceiling_blocks))
        return tuple(most)

    def _named_floors(self) -> str:
        floors = [f"{one.shown} {one.floor_blocks}" for one in self.limits if one.floor_blocks]
        return ", ".join(floors[:20]) + (", ..." if len(floors) > 20 else "")

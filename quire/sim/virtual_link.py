"""VirtualLink: blocks on their way to a simulated engine, for requests that wait for them.

A Gate and a TierEnd of the engine's scheduler, as the client of a KV store and the exchange with
another engine are. A subclass decides what a request waits for, and when that arrives. Bytes and
threads are not simulated. Always holds: a request begins at the first step after its blocks have
arrived; a copy between a tier's place and the pool takes no time of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.base.block_copies import CopiesEnded, Tier
from quire.base.records import StepOutputs, StepPlan
from quire.base.timeline import WaitReason
from quire.cache.store_map import StoreMap
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState


@dataclass(slots=True, eq=False)
class Asked:
    """A request that has not begun. ready_ms: when its blocks have arrived; keys: of these."""

    ready_ms: float
    keys: tuple[bytes, ...] = ()
    places: list[int] = field(default_factory=list)
    is_open: bool = False


class VirtualLink:
    """Of one engine. block_ms: a block's time on the link. wake: see TierEnd."""

    until_event = True
    reason = WaitReason.KV_LOAD

    def __init__(
        self,
        scheduler: Scheduler,
        tier: StoreMap,
        *,
        block_size: int,
        block_ms: float,
        now_ms: Callable[[], float],
    ) -> None:
        assert scheduler.hand_overs is not None, "the scheduler has a StoreMap"
        self._scheduler, self._hand_overs = scheduler, scheduler.hand_overs
        self._tier, self._block_size, self._block_ms = tier, block_size, block_ms
        self._now_ms = now_ms
        self.wake: Callable[[], None] = lambda: None
        self._asked: dict[str, Asked] = {}
        self._copies: list[CopiesEnded] = []
        self._free_ms = 0.0  # when the link is free for the next blocks
        self.fetched_blocks_total = 0
        scheduler.add_gate(self)

    # ---- Gate

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether blocks of `sequence` are on their way."""
        request_id = sequence.request.request_id
        if request_id not in self._asked:
            self._asked[request_id] = self._begin(sequence, now_ms)
        return not self._asked[request_id].is_open

    # ---- TierEnd

    def ended(self) -> CopiesEnded | None:
        """Return copies that plans have made, and what arrived."""
        now_ms, has_news = self._now_ms(), False
        for asked in self._asked.values():
            if not asked.is_open and asked.ready_ms <= now_ms:
                asked.is_open = has_news = True
                for place in asked.places:
                    self._tier.land(place, arrived=True)
                    self._tier.hold((place,))
        if not self._copies and not has_news:
            return None
        parts, self._copies = self._copies, []
        return _joined(parts)

    def clear(self) -> None:
        """See TierEnd: a simulation flushes nothing."""

    # ---- what the replay reports

    def next_ms(self) -> float:
        """Return when a request that waits will have its blocks; inf for never."""
        waits = (asked.ready_ms for asked in self._asked.values() if not asked.is_open)
        return min(waits, default=math.inf)

    def note_plan(self, plan: StepPlan) -> None:
        """Make the copies of a plan, which take no time of a step."""
        for admission in plan.admissions:
            asked = self._asked.pop(admission.request_id, None)
            if asked is not None:
                for place in asked.places:
                    self._tier.end_fetch(place)
        if (copies := plan.tier_copies) is not None:
            self._copies.append(
                CopiesEnded(
                    to_tiers=copies.to_tiers,
                    to_blocks=copies.to_blocks,
                    arrived=np.ones(len(copies), np.bool_),
                )
            )

    def note_outputs(self, outputs: StepOutputs) -> None:
        """Note requests that have ended."""
        for event in outputs.events:
            if event.finish_reason is not None:
                self._asked.pop(event.request_id, None)

    # ---- subclasses

    def _begin(self, sequence: SequenceState, now_ms: float) -> Asked:
        """Return what a request waits for that is about to begin."""
        raise NotImplementedError

    def _await(self, asked: Asked, keys: Sequence[bytes]) -> None:
        """Take places for the blocks `keys`, as many as there are."""
        for key in keys:
            place = None if self._tier.is_awaited(key) else self._tier.await_block(key)
            if place is None:
                break
            asked.places.append(place)
        self.fetched_blocks_total += len(asked.places)


def _joined(parts: Sequence[CopiesEnded]) -> CopiesEnded:
    """Return all copies in one record; those into the pool have been read."""
    none = np.zeros(0, np.int32)
    return CopiesEnded(
        to_tiers=np.concatenate([none, *(part.to_tiers for part in parts)]),
        to_blocks=np.concatenate([none, *(part.to_blocks for part in parts)]),
        arrived=np.concatenate([none.astype(np.bool_), *(part.arrived for part in parts)]),
        fetched=sum(int((part.to_tiers == Tier.POOL).sum()) for part in parts),
    )

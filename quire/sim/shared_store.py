"""A KV store shared by simulated engines: its entries in virtual time, and an engine's use of them.

The decisions are those of `quire/engine/kv_store/store_client.py`: what is looked up when a request
is about to begin, fetched if that is predicted to be cheaper than computing it, and put as it is
computed. Bytes and threads are not simulated: a fetch takes a latency and its blocks' time on the
engine's link, one after another; a put likewise. Claims are not simulated, so that engines which
get one new prefix at the same time all compute it. Always holds: an engine finds at a time what was
put before it, provided that no engine's clock is far ahead (fleet.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.base.block_copies import CopiesEnded, Tier
from quire.base.errors import SettingError
from quire.base.records import StepOutputs, StepPlan
from quire.base.timeline import WaitReason
from quire.cache.store_map import StoreMap
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """A store in numbers.

    gb_per_s: of one engine's link, in each direction. latency_ms: of a lookup and a fetch together.
    num_bytes: how much it holds. buffer_bytes: host memory of each engine for blocks on their way.
    """

    gb_per_s: float
    latency_ms: float
    num_bytes: int
    buffer_bytes: int

    def __post_init__(self) -> None:
        sizes = min(self.num_bytes, self.buffer_bytes)
        if not (self.gb_per_s > 0 and self.latency_ms >= 0 and sizes > 0):
            raise SettingError(
                f"the store has {self.gb_per_s} GB/s, {self.latency_ms} ms, {self.num_bytes} bytes "
                f"and buffers of {self.buffer_bytes}; all but the latency must be above 0"
            )

    def block_ms(self, block_bytes: int) -> float:
        """Return the time of one block on a link."""
        return block_bytes / (self.gb_per_s * 1e6)


class VirtualStore:
    """Entries of all engines, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._since_ms: OrderedDict[bytes, float] = OrderedDict()
        self.num_evicted = 0

    def __len__(self) -> int:
        """Blocks that are stored."""
        return len(self._since_ms)

    def run(self, keys: Sequence[bytes], now_ms: float) -> int:
        """Return how many of the keys, from the first on, are stored at a time; mark them used."""
        num = 0
        for key in keys:
            if self._since_ms.get(key, math.inf) > now_ms:
                break
            num += 1
        for key in reversed(keys[:num]):
            self._since_ms.move_to_end(key)
        return num

    def put(self, key: bytes, at_ms: float) -> None:
        """Store a block from a time on."""
        if key not in self._since_ms:
            self._since_ms[key] = at_ms
        while len(self._since_ms) > self._num_blocks:
            self._since_ms.popitem(last=False)
            self.num_evicted += 1


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that has not begun. ready_ms: when its blocks have arrived; keys: of these."""

    ready_ms: float
    keys: tuple[bytes, ...] = ()
    places: list[int] = field(default_factory=list)
    is_open: bool = False


class StoreLink:
    """A Gate and a TierEnd of one engine. wake: see TierEnd."""

    until_event = True
    reason = WaitReason.KV_LOAD

    def __init__(
        self,
        scheduler: Scheduler,
        tier: StoreMap,
        store: VirtualStore,
        spec: StoreSpec,
        *,
        block_size: int,
        block_bytes: int,
        now_ms: Callable[[], float],
    ) -> None:
        assert scheduler.hand_overs is not None, "the scheduler has a StoreMap"
        self._scheduler, self._hand_overs = scheduler, scheduler.hand_overs
        self._tier, self._store, self._spec = tier, store, spec
        self._block_size, self._block_ms = block_size, spec.block_ms(block_bytes)
        self._now_ms = now_ms
        self.wake: Callable[[], None] = lambda: None
        self._asked: dict[str, _Asked] = {}
        self._published: dict[str, tuple[bytes, ...]] = {}
        self._ending: list[tuple[bytes, ...]] = []
        self._copies: list[CopiesEnded] = []
        self._fetched_ms = self._put_ms = 0.0  # when the link is free, each way
        self.fetched_blocks_total = self.put_blocks_total = 0
        tier.on_landed = self._landed
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
        if self._ending and not self._hand_overs.num_to_save:
            for keys in self._ending:
                self._tier.want_no_more(keys)
            self._ending.clear()
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
        """Note requests that have ended: what they computed is put, and nothing after that."""
        for event in outputs.events:
            if event.finish_reason is None:
                continue
            self._asked.pop(event.request_id, None)
            keys = self._published.pop(event.request_id, None)
            if keys is not None:
                self._hand_overs.end(event.request_id)
                self._ending.append(keys)

    def _begin(self, sequence: SequenceState, now_ms: float) -> _Asked:
        request = sequence.request
        chain = self._hand_overs.chain(request, sequence.token_ids)
        keys = self._hand_overs.lacking(chain)
        run = self._store.run(keys, now_ms)
        first, size = len(chain.digests) - len(keys), self._block_size
        num_prompt = len(request.prompt_ids) // size - first
        missing = keys[run : max(num_prompt, 0)]
        if missing and request.request_id not in self._published:
            self._published[request.request_id] = missing
            self._tier.want(missing)
            self._hand_overs.begin(
                request.request_id, self._hand_overs.chain(request, request.prompt_ids)
            )
        begins_ms = max(now_ms, self._fetched_ms) + self._spec.latency_ms
        arrives_ms = begins_ms + run * self._block_ms
        compute_ms = self._scheduler.speed.span_ms(first * size, (first + run) * size)
        asked = _Asked(ready_ms=now_ms)
        if run and arrives_ms - now_ms < compute_ms:
            for key in keys[:run]:
                place = None if self._tier.is_awaited(key) else self._tier.await_block(key)
                if place is None:
                    break
                asked.places.append(place)
            self._fetched_ms = asked.ready_ms = begins_ms + len(asked.places) * self._block_ms
            self.fetched_blocks_total += len(asked.places)
        asked.is_open = not asked.places
        return asked

    def _landed(self, key: bytes, place: int) -> None:
        if self._tier.wants(key):
            self._put_ms = max(self._now_ms(), self._put_ms) + self._block_ms
            self._store.put(key, self._put_ms)
            self.put_blocks_total += 1


def _joined(parts: Sequence[CopiesEnded]) -> CopiesEnded:
    """Return all copies in one record; those into the pool have been read."""
    none = np.zeros(0, np.int32)
    return CopiesEnded(
        to_tiers=np.concatenate([none, *(part.to_tiers for part in parts)]),
        to_blocks=np.concatenate([none, *(part.to_blocks for part in parts)]),
        arrived=np.concatenate([none.astype(np.bool_), *(part.arrived for part in parts)]),
        fetched=sum(int((part.to_tiers == Tier.POOL).sum()) for part in parts),
    )

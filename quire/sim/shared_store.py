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
from dataclasses import dataclass

from quire.base.block_copies import CopiesEnded
from quire.base.errors import SettingError
from quire.base.records import StepOutputs
from quire.cache.store_map import StoreMap
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState
from quire.sim.virtual_link import Asked, VirtualLink


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


class StoreLink(VirtualLink):
    """An engine's use of the store."""

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
        super().__init__(
            scheduler,
            tier,
            block_size=block_size,
            block_ms=spec.block_ms(block_bytes),
            now_ms=now_ms,
        )
        self._store, self._spec = store, spec
        self._published: dict[str, tuple[bytes, ...]] = {}
        self._ending: list[tuple[bytes, ...]] = []
        self._put_ms = 0.0  # when the link is free for the next blocks to be put
        self.put_blocks_total = 0
        tier.listeners.append(self._landed)

    def ended(self) -> CopiesEnded | None:
        """See VirtualLink."""
        if self._ending and not self._hand_overs.num_to_save:
            for keys in self._ending:
                self._tier.want_no_more(keys)
            self._ending.clear()
        return super().ended()

    def note_outputs(self, outputs: StepOutputs) -> None:
        """Note requests that have ended: what they computed is put, and nothing after that."""
        super().note_outputs(outputs)
        for event in outputs.events:
            if event.finish_reason is None:
                continue
            keys = self._published.pop(event.request_id, None)
            if keys is not None:
                self._hand_overs.end(event.request_id)
                self._ending.append(keys)

    def _begin(self, sequence: SequenceState, now_ms: float) -> Asked:
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
        begins_ms = max(now_ms, self._free_ms) + self._spec.latency_ms
        arrives_ms = begins_ms + run * self._block_ms
        compute_ms = self._scheduler.speed.span_ms(first * size, (first + run) * size)
        asked = Asked(ready_ms=now_ms)
        if run and arrives_ms - now_ms < compute_ms:
            self._await(asked, keys[:run])
            self._free_ms = asked.ready_ms = begins_ms + len(asked.places) * self._block_ms
        asked.is_open = not asked.places
        return asked

    def _landed(self, key: bytes, place: int) -> None:
        if self._tier.wants(key):
            self._put_ms = max(self._now_ms(), self._put_ms) + self._block_ms
            self._store.put(key, self._put_ms)
            self.put_blocks_total += 1

"""TierTransfers: which blocks of the pool are copied to a tier, and which are on their way back.

One mechanism for three purposes. Blocks of preempted requests, those the pool evicts or soon will,
and, while the device is idle, all others are saved under the digests of their chains; where the
tier continues a request's chain after the pool's match, that run is loaded into fresh blocks. So
swapping, a cache that outlives the process, and one larger than memory need no state of their own.
Knows digests, blocks and places; what is worth moving is decided elsewhere. A block is saved at the
beginning of the plan that names the copy, before anything can be written into it, so it need not be
kept. Blocks being loaded, and those before them, hold references until the request that waits for
them has its own. Always holds: a loaded block is found only after it has arrived whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import BlockCopies, CopiesEnded, Tier, between, joined
from quire.cache.pool import BlockPool
from quire.cache.prefix_index import PrefixIndex
from quire.cache.tier_map import TierMap

Int32s = NDArray[np.int32]
Insert = Callable[[list[bytes], Int32s], None]

NO_STEP = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch:
    """A run of blocks on its way into the pool. before: those the pool had of the same chain.

    is_wanted: a request still waits for it; if not, what arrives is found like any free block.
    """

    before: Int32s
    blocks: Int32s
    places: Int32s
    keys: tuple[bytes, ...]
    num_left: int
    arrived: NDArray[np.bool_]
    is_wanted: bool = True

    @property
    def has_ended(self) -> bool:
        """Whether all of it has arrived or failed."""
        return self.num_left == 0

    @property
    def held(self) -> Int32s:
        """Blocks it holds a reference on, those used last first."""
        return np.concatenate((self.before, self.blocks))[::-1]


class TierTransfers:
    """Copies between `pool` and the places of `tier`.

    insert: makes blocks findable. saves_evicted: whether evicted blocks are worth saving; set where
    transfer costs are known.
    """

    def __init__(
        self,
        tier: TierMap,
        pool: BlockPool,
        index: PrefixIndex,
        insert: Insert,
    ) -> None:
        self.tier = tier
        self.saves_evicted = tier.keeps_evicted
        self.is_broken = False
        self.unsaved_total = 0  # evicted while too many were on their way
        self._pool, self._index, self._insert = pool, index, insert
        self._limits = tier.saving_limits
        self._num_saving = [0] * len(self._limits)  # by medium, as the limits
        self._saves: list[tuple[bytes, int, int]] = []  # digest, block, place; for the next plan
        self._fetches: list[Fetch] = []
        self._to_plan: list[BlockCopies] = []
        self._fetch_of: dict[int, tuple[Fetch, int]] = {}  # by pool block
        # By medium: what is on its way to a slow one keeps nothing from the other.
        self._swapped: list[deque[tuple[bytes, int]]] = [deque() for _ in self._limits]
        # Newly findable ones, to be saved while there is time; the oldest are dropped.
        self._idle: deque[tuple[bytes, int]] = deque(maxlen=2 * pool.num_blocks)

    @property
    def has_work(self) -> bool:
        """Whether copies are under way, or would be made while the device is idle."""
        has_saves = any(self._num_saving) or any(self._swapped)
        return bool(has_saves or self._fetch_of or self._idle)

    @property
    def num_to_save(self) -> int:
        """Blocks that the next plans save."""
        return sum(map(len, self._swapped))

    @property
    def num_fetching(self) -> int:
        """Blocks on their way into the pool."""
        return len(self._fetch_of)

    def findable(self, keys: Sequence[bytes], blocks: Int32s) -> None:
        """Note that `blocks` became findable: they are saved when there is time."""
        if not self.is_broken and self.saves_evicted:
            self._idle.extend(zip(keys, blocks.tolist(), strict=True))

    def evicted(self, keys: Sequence[bytes], blocks: Int32s) -> None:
        """Save blocks that the pool allocates anew before the next plan."""
        if self.is_broken:
            return
        for key, block in zip(keys, blocks.tolist(), strict=True):
            if not (self.saves_evicted or self.tier.wants(key)):
                continue
            if not self.tier.knows(key) and not self._save(key, block):
                self.unsaved_total += 1

    def swap_out(self, blocks: Int32s) -> None:
        """Save those findable of `blocks`, soon; their owner gives them back."""
        if self.tier.keeps_evicted:
            self.save_soon(blocks)

    def save_soon(self, blocks: Int32s) -> None:
        """Save those findable of `blocks` with the next plans."""
        if self.is_broken:
            return
        for block in blocks.tolist():
            key = self._index.key_of(block)
            if key is not None:
                self._swapped[self.tier.medium(key)].append((key, block))

    def run(self, keys: Sequence[bytes]) -> Int32s:
        """Return places of the longest run of these digests."""
        return np.array(self.tier.run(keys), np.int32)

    def swap_in(
        self, before: Int32s, blocks: Int32s, places: Int32s, keys: Sequence[bytes]
    ) -> Fetch:
        """Load `places` into `blocks`; before: the chain's blocks that the pool has.

        The caller took a reference on all of them for it, and began the fetch in the map.
        """
        fetch = Fetch(
            before=before,
            blocks=blocks,
            places=places,
            keys=tuple(keys),
            num_left=len(blocks),
            arrived=np.zeros(len(blocks), np.bool_),
        )
        for at, block in enumerate(blocks.tolist()):
            self._fetch_of[block] = (fetch, at)
        self._fetches.append(fetch)
        self._to_plan.append(between(self.tier.kind, places, Tier.POOL, blocks, [*keys]))
        return fetch

    def take_copies(self, *, idle: bool) -> BlockCopies | None:
        """Return what the plan being made shall copy, saves first. idle: it computes nothing."""
        for medium, swapped in enumerate(self._swapped):
            self._save_some(swapped, medium, share=2)
        if self._idle and idle:
            self._save_some(self._idle, 0, share=2)
        elif self._idle and self._pool.num_free - self._pool.num_free_findable < self._limits[0]:
            # Blocks will be evicted soon, perhaps more at once than can be saved then.
            self._save_some(self._idle, 0, share=4)
        if not self._saves and not self._to_plan:
            return None
        parts, self._to_plan = self._to_plan, []
        if self._saves:
            keys, blocks, places = zip(*self._saves, strict=True)
            pool_blocks, tier_places = np.array(blocks, np.int32), np.array(places, np.int32)
            saves = between(Tier.POOL, pool_blocks, self.tier.kind, tier_places, [*keys])
            parts, self._saves = [saves, *parts], []
        return joined(parts)

    def ended(self, copies: CopiesEnded) -> list[Fetch]:
        """Note that copies have ended; return the fetches that are complete now."""
        complete = []
        if copies.broken:
            self._break()
        for tier, block, arrived in zip(
            copies.to_tiers.tolist(),
            copies.to_blocks.tolist(),
            copies.arrived.tolist(),
            strict=True,
        ):
            if tier != Tier.POOL:
                self._num_saving[self.tier.medium_of(block)] -= 1
                self.tier.land(block, arrived=arrived)
                continue
            fetch, at = self._fetch_of.pop(block)
            fetch.arrived[at] = arrived
            fetch.num_left -= 1
            place = int(fetch.places[at])
            self.tier.end_fetch(place)
            if not arrived and fetch.keys:
                self.tier.forget(place)
            if fetch.has_ended:
                self._land(fetch)
                complete.append(fetch)
        return complete

    def release(self, fetch: Fetch) -> None:
        """Release a fetch: its request has its own references, or waits no longer."""
        if not fetch.is_wanted:
            return
        fetch.is_wanted = False
        if fetch.has_ended:
            self._give_back(fetch)

    def forget_all(self) -> None:
        """Make nothing saved before findable, nor what is on its way."""
        self.tier.forget_all()
        for swapped in self._swapped:
            swapped.clear()
        self._idle.clear()
        for fetch in self._fetches:
            fetch.keys = ()

    def holds(self) -> list[tuple[int, Int32s]]:
        """Return (no step, blocks) that fetches hold a reference on.

        A block may occur more than once.
        """
        return [(NO_STEP, fetch.held) for fetch in self._fetches]

    def problems(self) -> list[str]:
        """Return contradictions in words."""
        return [] if self.is_broken else self.tier.problems()

    def _save_some(self, wanted: deque[tuple[bytes, int]], medium: int, *, share: int) -> None:
        """Save blocks still in the pool and not in the tier, until as many are under way to a
        medium as its limit over `share`."""
        most = self._limits[medium] // share or 1
        while wanted and self._num_saving[medium] < most:
            key, block = wanted.popleft()
            if self._index.key_of(block) == key and not self.tier.knows(key):
                self._save(key, block)

    def _save(self, key: bytes, block: int) -> bool:
        """Save a block with the next plan; return False where too many are under way."""
        medium = self.tier.medium(key)
        is_full = self._num_saving[medium] >= self._limits[medium]
        place = None if is_full else self.tier.await_block(key)
        if place is None:
            return False
        self._num_saving[medium] += 1
        self._saves.append((key, block, place))
        return True

    def _land(self, fetch: Fetch) -> None:
        if fetch.keys and fetch.arrived.any():  # no keys: all was forgotten meanwhile
            keys = [fetch.keys[at] for at in fetch.arrived.nonzero()[0].tolist()]
            self._insert(keys, fetch.blocks[fetch.arrived])
        if not fetch.is_wanted:
            self._give_back(fetch)
            return
        # What cannot be found is of no use to the request that waits, nor what comes after it.
        missing = (~self._pool.findable[fetch.blocks]).nonzero()[0]
        if len(missing):
            first = int(missing[0])
            useless, fetch.blocks = fetch.blocks[first:], fetch.blocks[:first]
            self._pool.release(useless[::-1])

    def _give_back(self, fetch: Fetch) -> None:
        self._fetches.remove(fetch)
        self._pool.release(fetch.held)

    def _break(self) -> None:
        """Take the tier out of use; what is under way still ends."""
        self.is_broken = True
        self.forget_all()

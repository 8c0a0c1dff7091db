"""TierMover: copies blocks between the pool and a tier, in a thread of its own, beside the steps.

A block that leaves is copied when the plan that names it begins, because the plan may write into
it: within memory, or by an asynchronous device, on which copies are queued and not waited for. It
goes to the tier later. One that comes is read beside the pool, checked, and copied into it. Fetches
go first: requests wait for them. What has ended is kept until it is asked for. Knows no scheduler
and no medium. Always holds: a copy handed in ends exactly once, but for fetches at the end of all;
nothing unchecked reaches the pool; a medium that fails is not asked again, which is reported once;
a lost device is not reported here, but by the engine, which ends.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import BlockCopies, CopiesEnded, Tier
from quire.base.errors import DeviceLost
from quire.base.report import Report
from quire.execute.executor import Executor
from quire.runner.block_transport import BlockTransport, nothing
from quire.transfer.store import BlockStore

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]

# Memory for blocks that have left the pool and are not in the tier yet, and how many at most: of
# the host's where a tier is slow, of the device's where only a bus is between.
BUFFER_BYTES = {Tier.DISK: 64 << 20, Tier.HOST: 256 << 20}
MAX_BUFFERS = {Tier.DISK: 32, Tier.HOST: 128}


def num_buffers(block_bytes: int, tier: Tier) -> int:
    """Return blocks that may be on their way to the tier at once."""
    return max(1, min(MAX_BUFFERS[tier], BUFFER_BYTES[tier] // block_bytes))


@dataclass(frozen=True, slots=True)
class _Save:
    """queued: waits until the device has reached the copy, there: until raw is filled.

    epoch: how often all was forgotten before.
    """

    place: int
    digest: bytes
    raw: Bytes
    queued: Callable[[], None]
    there: Callable[[], None]
    epoch: int


@dataclass(frozen=True, slots=True)
class _Fetch:
    """queued: waits until earlier queued work that reads the block is done."""

    place: int
    digest: bytes
    block: int
    queued: Callable[[], None]


@dataclass(slots=True)
class _Ended:
    """What has ended since it was asked last."""

    tiers: list[int]
    blocks: list[int]
    arrived: list[bool]
    num_bad: int = 0
    fetched: int = 0
    fetch_ms: float = 0.0
    saved: int = 0
    save_ms: float = 0.0


class BlockMover(Protocol):
    """What copies the blocks of plans beside their steps. wake: called when no copy is left."""

    wake: Callable[[], None]

    def begin(self, copies: BlockCopies) -> None:
        """See TierMover."""

    def wait_for(self, blocks: Int32s) -> None:
        """See TierMover."""

    def ended(self) -> CopiesEnded | None:
        """See TierMover."""

    def clear(self) -> None:
        """See TierMover."""

    def close(self) -> None:
        """See TierMover."""


class TierMover:
    """Between the pool of `executor` and `store`, which it closes.

    now_ms: a clock, for how long copies take. wake: called in the thread, when none is left.
    on_saved: called there with digest and place of each block that is saved, before `ended` does.
    """

    def __init__(
        self,
        executor: Executor,
        store: BlockStore,
        *,
        now_ms: Callable[[], float],
        report: Report,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.wake = wake
        self.on_saved: Callable[[bytes, int], None] = lambda digest, place: None
        self._now_ms, self._report = now_ms, report
        count = num_buffers(executor.block_bytes, store.tier)
        self._way = BlockTransport(executor, most=count)
        self._max_fetched = count  # in one run
        self._is_memory = store.room(0) is not None
        # Where the tier is not memory itself: one for what comes, the others for what leaves.
        self._buffers = [] if self._is_memory else self._way.buffers(count + 1)
        self._incoming = None if self._is_memory else self._buffers.pop()
        self._fetches: deque[_Fetch] = deque()
        # Saves in order, and fetches of places that one of them saves.
        self._behind: deque[_Save | _Fetch] = deque()
        self._pending: set[int] = set()  # pool blocks that have not arrived
        self._being_read: Counter[int] = Counter()  # places
        self._must_clear, self._epoch = False, 0
        self._closing = False
        self._is_broken = self._broken_told = False
        self._ended = _Ended([], [], [])
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="quire-tier", daemon=True)
        self._thread.start()

    def begin(self, copies: BlockCopies) -> None:
        """Hand copies in, before the plan that names them computes anything."""
        digests = copies.digests.tobytes()
        listed = [
            (source, target, digests[16 * at : 16 * at + 16])
            for at, (source, target) in enumerate(
                zip(copies.from_blocks.tolist(), copies.to_blocks.tolist(), strict=True)
            )
        ]
        leaves = (copies.from_tiers == Tier.POOL).tolist()
        saves = [one for one, is_save in zip(listed, leaves, strict=True) if is_save]
        while saves:
            saves = saves[self._begin_saves(saves) :]
        if not all(leaves):
            queued = self._wait_of(self._way.queued)
            self._begin_fetches(
                [
                    _Fetch(place=place, digest=digest, block=block, queued=queued)
                    for (place, block, digest), is_save in zip(listed, leaves, strict=True)
                    if not is_save
                ]
            )

    def wait_for(self, blocks: NDArray[np.int32]) -> None:
        """Wait until nothing is on its way into these pool blocks.

        The scheduler waits for arrivals, so this waits only in a replay that is faster than its
        recording.
        """
        if self._pending:
            with self._changed:
                self._changed.wait_for(lambda: self._pending.isdisjoint(blocks.tolist()))

    def ended(self) -> CopiesEnded | None:
        """Return what has ended since this was asked last; None for nothing."""
        if not self._ended.tiers and self._is_broken == self._broken_told:
            return None
        with self._changed:
            now, self._ended = self._ended, _Ended([], [], [])
            broken, self._broken_told = self._is_broken, self._is_broken
        return CopiesEnded(
            to_tiers=np.array(now.tiers, np.int32),
            to_blocks=np.array(now.blocks, np.int32),
            arrived=np.array(now.arrived, np.bool_),
            num_bad=now.num_bad,
            fetched=now.fetched,
            fetch_ms=now.fetch_ms,
            saved=now.saved,
            save_ms=now.save_ms,
            broken=broken,
        )

    def clear(self) -> None:
        """Forget all saved blocks; none of them is loaded again."""
        with self._changed:
            self._must_clear, self._epoch = True, self._epoch + 1
            self._changed.notify_all()

    def close(self) -> None:
        """Finish saves, drop fetches, end the thread, close the store."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.store.close()

    def _begin_saves(self, saves: list[tuple[int, int, bytes]]) -> int:
        """Have (block, place, digest) copied, as many of the first as there is room for; their
        number."""
        raws = self._rooms([place for _, place, _ in saves])
        saves = saves[: len(raws)]
        blocks = [block for block, _, _ in saves]
        there = self._wait_of(lambda: self._way.take_out(blocks, raws))
        queued = self._wait_of(self._way.queued)
        with self._changed:
            for (_, place, digest), raw in zip(saves, raws, strict=True):
                self._behind.append(_Save(place, digest, raw, queued, there, self._epoch))
            self._changed.notify_all()
        return len(raws)

    def _rooms(self, places: list[int]) -> list[Bytes]:
        """Where blocks go to: their places, or as many buffers as there are, at least one."""
        rooms = [room for room in map(self.store.room, places) if room is not None]
        with self._changed:
            if rooms:  # a place is only read where plans are replayed faster than they were made
                self._changed.wait_for(lambda: not any(map(self._being_read.get, places)))
                return rooms
            self._changed.wait_for(lambda: self._buffers)
            return [self._buffers.pop() for _ in places[: len(self._buffers)]]

    def _begin_fetches(self, fetches: list[_Fetch]) -> None:
        with self._changed:
            saving = {one.place for one in self._behind if isinstance(one, _Save)}
            for fetch in fetches:
                queue = self._behind if fetch.place in saving else self._fetches
                queue.append(fetch)
                self._pending.add(fetch.block)
                self._being_read[fetch.place] += 1
            self._changed.notify_all()

    def _wait_of(self, tell: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Return what to wait for after queueing on the device; nothing where that fails."""
        wait = nothing

        def say() -> None:
            nonlocal wait
            wait = tell()

        self._ask(say)
        return wait

    def _work(self) -> None:
        expected = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._fetches or self._behind or self._must_clear or self._closing
                )
                must_clear, self._must_clear = self._must_clear, False
                if self._closing:
                    self._fetches.clear()
                job = self._next()
                soon = [fetch.place for fetch in self._fetches] if not expected else []
                expected = max(expected - 1, 0) if not soon else len(soon)
                is_over = job is None and self._closing
            if must_clear:
                self._ask(self.store.clear)
            if soon:
                self._ask(lambda: self.store.expect(soon))  # noqa: B023  called at once
            if isinstance(job, _Save):
                self._save(job)
            elif job is not None:
                self._fetch(job)
            if is_over:
                return

    def _next(self) -> _Save | list[_Fetch] | None:
        """Return a save, or fetches: one, or several queued together where places are memory."""
        if self._fetches:
            most = self._max_fetched if self._is_memory else 1
            queued = self._fetches[0].queued
            run = [*takewhile(lambda one: one.queued is queued, self._fetches)][:most]
            for _ in run:
                self._fetches.popleft()
            return run
        job = self._behind.popleft() if self._behind else None
        return [job] if isinstance(job, _Fetch) else job

    def _save(self, save: _Save) -> None:
        def put() -> None:
            save.there()
            self.store.save(save.place, save.digest, save.raw)

        is_told = self._ask(save.queued)
        began_ms = self._now_ms()
        arrived = is_told and self._ask(put)
        took_ms = self._now_ms() - began_ms
        with self._changed:
            if not self._is_memory:
                self._buffers.append(save.raw)
            self._note(self.store.tier, save.place, arrived=arrived)
            if arrived and save.epoch == self._epoch:
                self.on_saved(save.digest, save.place)
            self._ended.saved += arrived
            self._ended.save_ms += took_ms if arrived else 0.0
            none_left = not self._fetches and not self._behind
            self._changed.notify_all()
        if none_left:
            self.wake()

    def _fetch(self, run: list[_Fetch]) -> None:
        began_ms = self._now_ms()
        blocks: list[int] = []
        raws: list[Bytes] = []
        num_bad = 0
        for fetch in run:
            raw = self._read(fetch)
            num_bad += raw is None and not self._is_broken
            if raw is not None:
                blocks.append(fetch.block)
                raws.append(raw)
        took_ms = self._now_ms() - began_ms
        arrived = bool(blocks) and self._ask(run[0].queued)
        began_ms = self._now_ms()
        arrived = arrived and self._ask(lambda: self._way.bring_in(blocks, raws))
        took_ms += self._now_ms() - began_ms
        there = set(blocks) if arrived else set[int]()
        with self._changed:
            for fetch in run:
                self._note(Tier.POOL, fetch.block, arrived=fetch.block in there)
                self._pending.discard(fetch.block)
                self._being_read[fetch.place] -= 1
            self._ended.num_bad += num_bad
            self._ended.fetched += len(there)
            self._ended.fetch_ms += took_ms if there else 0.0
            none_left = not self._fetches
            self._changed.notify_all()
        if none_left:
            self.wake()

    def _read(self, fetch: _Fetch) -> Bytes | None:
        """Return what lies there, if it is whole."""
        raw = self.store.room(fetch.place) if self._incoming is None else self._incoming
        assert raw is not None, "a place is memory, or there are buffers"
        is_whole = False

        def read() -> None:
            nonlocal is_whole
            is_whole = self.store.fetch(fetch.place, fetch.digest, raw)

        self._ask(read)
        return raw if is_whole else None

    def _note(self, tier: Tier, block: int, *, arrived: bool) -> None:
        self._ended.tiers.append(tier)
        self._ended.blocks.append(block)
        self._ended.arrived.append(arrived)

    def _ask(self, call: Callable[[], None]) -> bool:
        """Return whether store or device did as they were asked; not asked where one failed
        before."""
        if self._is_broken:
            return False
        try:
            call()
        except DeviceLost:  # the engine ends because of this, and logs the cause
            self._is_broken = True
            self.wake()
            return False
        except Exception as error:  # noqa: BLE001  of a disk or a device; it ends the tier only
            self._is_broken = True
            self._report(
                "the KV tier failed and is out of use; what it held is computed again",
                error=str(error),
            )
            self.wake()
            return False
        return True

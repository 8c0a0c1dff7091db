"""TierMover: copies blocks between the pool and a tier, in a thread of its own, beside the steps.

A block that leaves is copied within memory when the plan that names it begins, because the plan may
write into it, and to the tier later; one that comes is read beside the pool, checked, and copied
into it. Fetches go first: somebody waits for them. What has ended is kept until it is asked for.
Knows no scheduler and no medium. Always holds: a copy handed in ends exactly once, but for fetches
at the end of all; nothing unchecked reaches the pool; a medium that fails is not asked again, which
is reported once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import BlockCopies, CopiesEnded, Tier
from quire.base.report import Report
from quire.execute.executor import Executor
from quire.transfer.store import BlockStore

Bytes = NDArray[np.uint8]

# Memory for blocks that have left the pool and are not in the tier yet, and how many at most.
BUFFER_BYTES = 64 << 20
MOST_BUFFERS = 32


def num_buffers(block_bytes: int) -> int:
    """Blocks that may be on their way to the tier at once."""
    return max(1, min(MOST_BUFFERS, BUFFER_BYTES // block_bytes))


@dataclass(frozen=True, slots=True)
class _Save:
    place: int
    digest: bytes
    raw: Bytes


@dataclass(frozen=True, slots=True)
class _Fetch:
    place: int
    digest: bytes
    block: int


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


class TierMover:
    """Between the pool of `executor` and `store`, which it closes.

    now_ms: a clock, for how long copies take. wake: called in the thread, when none is left.
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
        self._executor, self._now_ms, self._report = executor, now_ms, report
        size = executor.block_bytes
        self._buffers: list[Bytes] = [np.empty(size, np.uint8) for _ in range(num_buffers(size))]
        self._incoming = np.empty(size, np.uint8)
        self._fetches: deque[_Fetch] = deque()
        # Saves in order, and fetches of places whose save is among them.
        self._behind: deque[_Save | _Fetch] = deque()
        self._pending: set[int] = set()  # pool blocks that have not arrived
        self._must_clear = False
        self._closing = False
        self._is_broken = self._broken_told = False
        self._ended = _Ended([], [], [])
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="quire-tier", daemon=True)
        self._thread.start()

    def begin(self, copies: BlockCopies) -> None:
        """Hand copies in, before the plan that names them computes anything."""
        digests = copies.digests.tobytes()
        fetches = []
        for at, (source, block, place) in enumerate(
            zip(
                copies.from_tiers.tolist(),
                copies.from_blocks.tolist(),
                copies.to_blocks.tolist(),
                strict=True,
            )
        ):
            digest = digests[16 * at : 16 * at + 16]
            if source == Tier.POOL:
                self._begin_save(block, place, digest)
            else:
                fetches.append(_Fetch(place=block, digest=digest, block=place))
        if fetches:
            self._begin_fetches(fetches)

    def wait_for(self, blocks: NDArray[np.int32]) -> None:
        """Until nothing is on its way into these pool blocks. Who plans waits for arrivals, so this
        waits only where plans are replayed faster than they were made."""
        if self._pending:
            with self._changed:
                self._changed.wait_for(lambda: self._pending.isdisjoint(blocks.tolist()))

    def ended(self) -> CopiesEnded | None:
        """What has ended since this was asked last; None for nothing."""
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
        """Nothing saved until now is ever given out again."""
        with self._changed:
            self._must_clear = True
            self._changed.notify_all()

    def close(self) -> None:
        """Finish saves, drop fetches, end the thread, close the store."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.store.close()

    def _begin_save(self, block: int, place: int, digest: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._buffers)
            raw = self._buffers.pop()
        self._executor.export_block(block, raw)
        with self._changed:
            self._behind.append(_Save(place=place, digest=digest, raw=raw))
            self._changed.notify_all()

    def _begin_fetches(self, fetches: list[_Fetch]) -> None:
        with self._changed:
            saving = {one.place for one in self._behind if isinstance(one, _Save)}
            for fetch in fetches:
                queue = self._behind if fetch.place in saving else self._fetches
                queue.append(fetch)
                self._pending.add(fetch.block)
            self._changed.notify_all()

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

    def _next(self) -> _Save | _Fetch | None:
        if self._fetches:
            return self._fetches.popleft()
        return self._behind.popleft() if self._behind else None

    def _save(self, save: _Save) -> None:
        began_ms = self._now_ms()
        arrived = self._ask(lambda: self.store.save(save.place, save.digest, save.raw))
        took_ms = self._now_ms() - began_ms
        with self._changed:
            self._buffers.append(save.raw)
            self._note(Tier.DISK, save.place, arrived=arrived)
            self._ended.saved += arrived
            self._ended.save_ms += took_ms if arrived else 0.0
            none_left = not self._fetches and not self._behind
            self._changed.notify_all()
        if none_left:
            self.wake()

    def _fetch(self, fetch: _Fetch) -> None:
        began_ms, raw = self._now_ms(), self._incoming
        is_whole = False

        def read() -> None:
            nonlocal is_whole
            is_whole = self.store.fetch(fetch.place, fetch.digest, raw)

        answered = self._ask(read)
        if is_whole:
            self._executor.import_block(fetch.block, raw)
        took_ms = self._now_ms() - began_ms
        with self._changed:
            self._note(Tier.POOL, fetch.block, arrived=is_whole)
            self._ended.num_bad += answered and not is_whole
            self._ended.fetched += is_whole
            self._ended.fetch_ms += took_ms if is_whole else 0.0
            self._pending.discard(fetch.block)
            none_left = not self._fetches
            self._changed.notify_all()
        if none_left:
            self.wake()

    def _note(self, tier: Tier, block: int, *, arrived: bool) -> None:
        self._ended.tiers.append(tier)
        self._ended.blocks.append(block)
        self._ended.arrived.append(arrived)

    def _ask(self, call: Callable[[], None]) -> bool:
        """Whether the store did as it was asked; not asked where it has failed before."""
        if self._is_broken:
            return False
        try:
            call()
        except OSError as error:
            self._is_broken = True
            self._report(
                "the KV tier failed and is out of use; what it held is computed again",
                error=str(error),
            )
            self.wake()
            return False
        return True

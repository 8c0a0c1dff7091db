"""Fetches: blocks on their way from the levels into places of the host memory.

Knows the map of places and jobs; no request and no cost. Always holds: a block is on its way once,
whatever number of requests wait for it; a place is awaited until its job has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.cache.store_map import StoreMap
from quire.engine.kv_store.job_threads import JobThreads
from quire.engine.kv_store.jobs import StoreFetch
from quire.kv_store.level import Fetched
from quire.transfer.host import HostStore


class Fetches:
    """The jobs of one engine that are under way."""

    def __init__(
        self, tier: StoreMap, store: HostStore, threads: JobThreads, now_ms: Callable[[], float]
    ) -> None:
        self._tier, self._store = tier, store
        self._threads, self._now_ms = threads, now_ms
        self._jobs: set[StoreFetch] = set()
        self._job_of: dict[bytes, StoreFetch] = {}  # by the digest of a block on its way

    def __len__(self) -> int:
        """How many jobs there are."""
        return len(self._jobs)

    @property
    def num_places(self) -> int:
        """Places that cannot be used for anything else now."""
        return self._tier.num_kept + sum(len(job.keys) for job in self._jobs)

    def live(self, jobs: set[StoreFetch]) -> set[StoreFetch]:
        """Return those that have not ended."""
        return jobs & self._jobs

    def num_left(self, jobs: set[StoreFetch]) -> int:
        """Return how many blocks of these jobs have not come."""
        return sum(job.num_left for job in self.live(jobs))

    def begin(self, keys: Sequence[bytes], levels: Sequence[int]) -> tuple[set[StoreFetch], int]:
        """Fetch blocks from these levels, as far as there is room.

        Return the jobs that bring them, and how many keys are here or on their way.
        """
        jobs: set[StoreFetch] = set()
        own_keys: list[bytes] = []
        places: list[int] = []
        own_levels: list[int] = []
        count = 0
        for key, level in zip(keys, levels, strict=True):
            if (job := self._job_of.get(key)) is not None:
                jobs.add(job)  # for another request that begins alike
            elif not self._tier.run((key,)):
                place = None if self._tier.is_awaited(key) else self._tier.await_block(key)
                if place is None:
                    break
                own_keys.append(key)
                places.append(place)
                own_levels.append(level)
            count += 1
        if own_keys:
            job = StoreFetch(own_keys, places, own_levels, self._now_ms())
            self._jobs.add(job)
            self._job_of |= dict.fromkeys(own_keys, job)
            jobs.add(job)
            self._threads.fetch(job, self._store.room)
        return jobs, count

    def end(self, job: StoreFetch, holders: Iterable[list[int]]) -> None:
        """Enter what a job brought into the map, kept for each of the holders."""
        self._jobs.discard(job)
        holders = [*holders]
        for key, place, outcome in zip(job.keys, job.places, job.outcomes, strict=True):
            if self._job_of.get(key) is job:
                del self._job_of[key]
            arrived = outcome is Fetched.WHOLE
            if arrived:
                self._store.save(place, key, self._store.room(place))
            self._tier.land(place, arrived=arrived)
            if arrived and self._tier.run((key,)) == [place]:
                for held in holders:
                    self._tier.hold((place,))
                    held.append(place)

    def cancel_all(self) -> None:
        """Read nothing that was not begun."""
        for job in self._jobs:
            job.is_cancelled = True

    def forget_all(self) -> None:
        """Cancel all: the map has forgotten all places, on their way or not."""
        self.cancel_all()
        self._job_of.clear()

    def cancel_hung(self, last_ms: float) -> int:
        """Cancel jobs with a slice that has been read since before; return how many."""
        hung = [job for job in self._jobs if not job.is_cancelled and job.hangs(last_ms)]
        for job in hung:
            job.is_cancelled = True
        return len(hung)

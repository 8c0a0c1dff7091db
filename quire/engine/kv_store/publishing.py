"""Publishing: blocks of prompts that the store lacks, on their way there.

They are saved to host memory as the scheduler computes them, and put into each level by a thread.
Knows the map of places, digests and levels; not why a prompt is published. Always holds: a place is
kept while a thread reads it; a prompt is published until each of its blocks was put
or refused, or its request has ended and nothing more of it can come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.base.records import Request
from quire.cache.store_map import StoreMap
from quire.engine.kv_store.job_threads import JobThreads
from quire.engine.kv_store.jobs import PutEnded
from quire.scheduler.prefill.hand_over import HandOvers
from quire.transfer.host import HostStore

# Digests of blocks that are known to be stored, so that they are not put again.
MAX_STORED = 1 << 16


@dataclass(slots=True, eq=False)
class _Published:
    """A prompt with blocks that go to the store. pending: not saved yet; putting: on their way."""

    keys: tuple[bytes, ...]
    pending: set[bytes]
    putting: set[bytes] = field(default_factory=set)
    has_ended: bool = False


class Publishing:
    """The published prompts of one engine, by request; used in its thread.

    on_end: called with a request of which nothing is published any more.
    """

    def __init__(
        self,
        *,
        hand_overs: HandOvers,
        tier: StoreMap,
        store: HostStore,
        threads: JobThreads,
        on_end: Callable[[str], None],
    ) -> None:
        self._hand_overs, self._tier, self._store = hand_overs, tier, store
        self._threads, self._on_end = threads, on_end
        self._published: dict[str, _Published] = {}
        self._putting: dict[bytes, int] = {}  # places
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        tier.listeners.append(self._landed)

    def __len__(self) -> int:
        """How many prompts are published."""
        return len(self._published)

    @property
    def request_ids(self) -> list[str]:
        """The requests of these prompts."""
        return [*self._published]

    @property
    def num_putting(self) -> int:
        """Blocks that are on their way to the store."""
        return len(self._putting)

    def publish(self, request: Request, keys: Iterable[bytes]) -> bool:
        """Have blocks of a prompt put as they are computed, but for those known to be stored.

        Return whether anything of the request is published.
        """
        keys = [key for key in keys if key not in self._stored and key not in self._putting]
        published = self._published.get(request.request_id)
        if not keys or not self._can_put():
            return published is not None
        if published is None:
            published = _Published((), set())
            self._published[request.request_id] = published
            self._hand_overs.begin(
                request.request_id, self._hand_overs.chain(request, request.prompt_ids)
            )
        known = set(published.keys)
        new = [key for key in keys if key not in known]
        published.keys = (*published.keys, *new)
        published.pending.update(new)
        self._tier.want(new)
        for key in new:
            for place in self._tier.run((key,)):
                self._landed(key, place)
        return True

    def has(self, request_id: str) -> bool:
        """Return whether anything of a request is published."""
        return request_id in self._published

    def forget_stored(self, keys: Iterable[bytes]) -> None:
        """Note that the store lacks blocks."""
        for key in keys:
            self._stored.pop(key, None)

    def forget_all(self) -> None:
        """Note that nothing is known of what the store has."""
        self._stored.clear()

    def finish(self, request_id: str) -> bool:
        """Note that a request has ended: after what it computed nothing is published.

        Return False where nothing of it is.
        """
        published = self._published.get(request_id)
        if published is None:
            return False
        if not published.has_ended:
            published.has_ended = True
            self._hand_overs.end(request_id)
        return True

    def note_put(self, put: PutEnded) -> None:
        """Take in that a block was put, or not."""
        self._tier.end_fetch(self._putting.pop(put.key))
        if put.is_stored:
            self._stored[put.key] = None
            if len(self._stored) > MAX_STORED:
                self._stored.popitem(last=False)
        for published in self._published.values():
            published.putting.discard(put.key)

    def end_complete(self) -> None:
        """End what has no block left to save or to put."""
        for request_id, published in list(self._published.items()):
            if published.pending and published.has_ended and not self._hand_overs.num_to_save:
                published.pending = {key for key in published.pending if self._tier.is_awaited(key)}
            if not published.pending and not published.putting:
                del self._published[request_id]
                self._tier.want_no_more(published.keys)
                if not published.has_ended:
                    self._hand_overs.end(request_id)
                self._on_end(request_id)

    def _can_put(self) -> bool:
        """Return whether blocks may go to a store, and are not stuck on their way there."""
        return self._threads.can_put() and 2 * len(self._putting) <= self._tier.num_blocks

    def _landed(self, key: bytes, place: int) -> None:
        """Put a block that is in host memory now, if a prompt that has it is published."""
        is_pending = False
        for published in self._published.values():
            if key in published.pending:
                published.pending.discard(key)
                published.putting.add(key)
                is_pending = True
        if is_pending and key not in self._putting:
            self._tier.hold((place,))
            self._putting[key] = place
            self._threads.put(key, self._store.room(place))

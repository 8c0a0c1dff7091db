"""LeaseBook: which blocks are kept for which transfer, and for how long.

The engine's thread opens a lease when it takes a request, notes each block that has reached the
store, and releases what a lease held once it has ended; threads of connections wait for blocks and
read them. A block that a thread has saved is there for connections at once, before the engine, in
the middle of a step, has noted it. Knows digests, places and times; no sockets and no map of
places. Always holds: a lease that no connection uses ends at its time limit; `valid` turns False
before any of its places can be used again, so that bytes summed while it was True were the block's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

# More transfers than that at once are refused; each is small, its blocks are not.
MAX_LEASES = 1024


class Lease:
    """The blocks of one transfer. The book's lock guards all fields.

    places: of the blocks that are there, by digest; saved: of those that the engine has not noted.
    lost: digests of blocks that will not come. num_there: blocks that the other engine has. users:
    connections that read it. ends_ms: when it ends unless a connection uses it.
    """

    __slots__ = (
        *("ends_ms", "failure", "is_complete", "keys", "lost", "num_there", "places", "saved"),
        *("users", "valid"),
    )

    def __init__(self, keys: Sequence[bytes], ends_ms: float) -> None:
        self.keys = frozenset(keys)
        self.places: dict[bytes, int] = {}
        self.saved: dict[bytes, int] = {}
        self.lost: set[bytes] = set()
        self.num_there = 0
        self.is_complete = False  # the request has ended: all blocks were computed
        self.valid = True
        self.failure = ""
        self.users = 0
        self.ends_ms = ends_ms

    @property
    def pending(self) -> set[bytes]:
        """Digests of blocks that may still come."""
        return set(self.keys) - self.places.keys() - self.lost


class LeaseBook:
    """The leases of one engine. keep_ms: how long one without a connection is kept.

    overlapped_blocks_total: blocks that other engines had before their prompt was computed.
    """

    def __init__(self, now_ms: Callable[[], float], keep_ms: float) -> None:
        self._now_ms = now_ms
        self._keep_ms = keep_ms
        self.overlapped_blocks_total = 0
        self._changed = threading.Condition()
        self._open: dict[bytes, Lease] = {}
        self._ended: list[Lease] = []

    def __len__(self) -> int:
        return len(self._open)

    # ---- the engine's thread

    def open(self, transfer_id: bytes, keys: Sequence[bytes]) -> Lease | None:
        """Open a lease for blocks that are to come; None where too many are open."""
        with self._changed:
            if len(self._open) >= MAX_LEASES and transfer_id not in self._open:
                return None
            self._end(transfer_id)
            lease = Lease(keys, self._now_ms() + self._keep_ms)
            self._open[transfer_id] = lease
            self._changed.notify_all()
            return lease

    def landed(self, key: bytes, place: int) -> list[Lease]:
        """Note that a block is in `place`; return the leases that hold it from now on."""
        with self._changed:
            holding = [
                lease
                for lease in self._open.values()
                if key in lease.keys and key not in lease.places and key not in lease.lost
            ]
            for lease in holding:
                if lease.saved.pop(key, place) != place:
                    lease.valid = False  # what connections read may be another block soon
                lease.places[key] = place
            if holding:
                self._changed.notify_all()
            return holding

    def lost(self, lease: Lease, keys: set[bytes]) -> None:
        """Note that blocks will not come."""
        with self._changed:
            lease.lost |= keys
            self._changed.notify_all()

    def completed(self, transfer_id: bytes) -> None:
        """Note that the request of a lease has ended: the time limit counts from now."""
        with self._changed:
            if (lease := self._open.get(transfer_id)) is not None:
                if not lease.is_complete:
                    self.overlapped_blocks_total += lease.num_there
                lease.is_complete = True
                lease.ends_ms = self._now_ms() + self._keep_ms
                self._changed.notify_all()

    def fail(self, transfer_id: bytes, why: str) -> None:
        """Note that the engine did not take the request of a lease."""
        with self._changed:
            if (lease := self._open.get(transfer_id)) is not None:
                lease.failure = why
                lease.lost |= lease.pending
                lease.is_complete = True
                self._changed.notify_all()

    def give_up(self, transfer_id: bytes) -> None:
        """End a lease that no connection uses."""
        with self._changed:
            lease = self._open.get(transfer_id)
            if lease is not None and not lease.users:
                self._end(transfer_id)

    def complete(self) -> list[Lease]:
        """Return the leases of ended requests with blocks that have not come."""
        with self._changed:
            return [one for one in self._open.values() if one.is_complete and one.pending]

    def take_ended(self) -> list[Lease]:
        """Return leases that have ended, each once: what they held can be given up."""
        with self._changed:
            now_ms = self._now_ms()
            for transfer_id, lease in list(self._open.items()):
                if not lease.users and lease.ends_ms <= now_ms:
                    self._end(transfer_id)
            ended, self._ended = self._ended, []
            return ended

    def end_all(self) -> None:
        """End every lease: the store forgets what it holds."""
        with self._changed:
            for transfer_id in list(self._open):
                self._end(transfer_id)
            self._changed.notify_all()

    # ---- the thread that saves blocks

    def saved(self, key: bytes, place: int) -> None:
        """Note that a block is whole in `place`, and stays there until `landed` is called."""
        with self._changed:
            for lease in self._open.values():
                if key in lease.keys and key not in lease.places and key not in lease.lost:
                    lease.saved[key] = place
            self._changed.notify_all()

    # ---- threads of connections

    def claim(self, transfer_id: bytes, wait_s: float) -> Lease | None:
        """Return the lease, which `let_go` gives back; None where there is none after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: transfer_id in self._open, wait_s)
            lease = self._open.get(transfer_id)
            if lease is not None:
                lease.users += 1
            return lease

    def place(self, lease: Lease, key: bytes, wait_s: float) -> int | None:
        """Wait for a block; return its place, None where it may still come.

        Raises KeyError where it will not: it is not of this lease, was lost, or the lease ended.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not lease.valid
                    or any(key in some for some in (lease.places, lease.saved, lease.lost))
                ),
                wait_s,
            )
            if not lease.valid or key in lease.lost or key not in lease.keys:
                raise KeyError(key)
            return lease.places.get(key, lease.saved.get(key))

    def note_there(self, lease: Lease, num_blocks: int) -> None:
        """Note how many blocks of a lease the other engine has."""
        with self._changed:
            lease.num_there = max(lease.num_there, num_blocks)

    def is_valid(self, lease: Lease) -> bool:
        """Return whether all places of the lease still hold its blocks."""
        with self._changed:
            return lease.valid

    def let_go(self, transfer_id: bytes, lease: Lease, *, is_over: bool) -> None:
        """Give back a claimed lease. is_over: the other side has what it needs, or is gone."""
        with self._changed:
            lease.users -= 1
            if is_over and self._open.get(transfer_id) is lease and not lease.users:
                self._end(transfer_id)

    def _end(self, transfer_id: bytes) -> None:
        lease = self._open.pop(transfer_id, None)
        if lease is not None:
            lease.valid = False
            self._ended.append(lease)

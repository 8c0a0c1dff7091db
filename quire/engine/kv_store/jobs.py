"""Jobs of the engine's thread for the threads that talk to stores: lookups, fetches and puts.

A Lookup finds how far the levels hold a chain, and claims what they lack, unless another engine is
computing it. A FetchJob reads blocks into places of the host memory, in slices that several threads
share. Knows levels and keys; no scheduler. Always holds: each part of a job ends exactly once; a
thread that hangs in a store holds up only what waits for it there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from quire.base.report import Report
from quire.kv_store.level import Bytes, Fetched, Level, SharedLevel
from quire.kv_store.shared_store import KEY_BYTES, MAX_CLAIM_BYTES

SLICE_BLOCKS = 4
ENGINE_ID_BYTES = 8
_OWNER_BYTES = 16  # the engine, and a number of the claim
# How many keys are asked for at once: a chain often has none, or all.
_FIRST_ASKED, _MAX_ASKED = 4, 256
_CLOSE_S = 1.0


class Workers:
    """Daemon threads that make calls, in the order in which they came."""

    def __init__(self, count: int, name: str, report: Report) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._report = report
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call."""
        self._calls.put(call)

    def close(self) -> bool:
        """Let queued calls finish; return False where a thread hangs, which is left behind."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  of one job; the others go on
                self._report(
                    "a job of the KV store failed", error=f"{type(error).__name__}: {error}"
                )


@dataclass(slots=True, eq=False)
class Lookup:
    """How far `keys` are stored. before: the keys of the same chain before these.

    record: of the claim to make for what is missing; None: none is made. levels: for each leading
    key the number of the level that has it. num_elsewhere: how many keys after these another engine
    is computing. claimed: the key under which the record was claimed.
    """

    request_id: str
    keys: tuple[bytes, ...]
    before: tuple[bytes, ...]
    owner: bytes
    may_claim: bool
    began_ms: float
    ended_ms: float = 0.0
    levels: list[int] = field(default_factory=list)
    num_elsewhere: int = 0
    claimed: bytes | None = None
    is_abandoned: bool = False

    @property
    def record(self) -> bytes:
        """The claim of what is missing."""
        most = MAX_CLAIM_BYTES - len(self.owner)
        return self.owner + b"".join(self.keys[len(self.levels) :])[:most]

    def run(self, levels: Sequence[Level], shared: SharedLevel) -> None:
        """Ask the levels; in a thread."""
        if self.is_abandoned:
            return
        self.levels = _run(self.keys, levels)
        missing = self.keys[len(self.levels) :]
        if not missing or not shared.breaker.may_allow:
            return
        known = (*self.before, *self.keys[: len(self.levels) + 1])
        for _ in range(2):  # another engine may make the claim in between
            for record in shared.claims(known):
                self.num_elsewhere = max(self.num_elsewhere, self._num_claimed(record, missing))
            if self.num_elsewhere or not self.may_claim:
                return
            if shared.claim(missing[0], self.record):
                self.claimed = missing[0]
                return

    def _num_claimed(self, record: bytes, missing: Sequence[bytes]) -> int:
        """Return how many of the missing keys, from the first on, a claim of others lists."""
        if record[:ENGINE_ID_BYTES] == self.owner[:ENGINE_ID_BYTES]:
            return 0
        listed = {record[at : at + KEY_BYTES] for at in range(_OWNER_BYTES, len(record), KEY_BYTES)}
        return next((at for at, key in enumerate(missing) if key not in listed), len(missing))


@dataclass(slots=True, eq=False)
class FetchJob:
    """Blocks `keys` into `places`. levels: the number of the level that has each.

    outcomes: filled by threads, slice by slice. is_cancelled: nothing that was not begun is read.
    """

    keys: list[bytes]
    places: list[int]
    levels: list[int]
    began_ms: float
    is_cancelled: bool = False
    outcomes: list[Fetched] = field(init=False)
    read_ms: float = field(init=False)  # when the last slice was read
    _num_left: int = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.outcomes = [Fetched.MISSING] * len(self.keys)
        self._num_left, self.read_ms = len(self.keys), self.began_ms

    def slices(self) -> list[tuple[int, int]]:
        """Return (first, end) of each slice; all blocks of one lie in one level."""
        found, first = [], 0
        for _, run in groupby(self.levels):
            end = first + len(list(run))
            found += [(at, min(at + SLICE_BLOCKS, end)) for at in range(first, end, SLICE_BLOCKS)]
            first = end
        return found

    def read(
        self, first: int, end: int, levels: Sequence[Level], room: Callable[[int], Bytes]
    ) -> None:
        """Read one slice; in a thread. After a block that is missing none is of use."""
        if self.is_cancelled:
            return
        outs = [room(place) for place in self.places[first:end]]
        found = levels[self.levels[first]].fetch(self.keys[first:end], outs)
        self.outcomes[first:end] = found
        if any(one is not Fetched.WHOLE for one in found):
            self.is_cancelled = True

    def note_read(self, count: int, now_ms: float) -> bool:
        """Note that a slice of so many blocks was read, or not; return whether all were."""
        with self._lock:
            self._num_left -= count
            self.read_ms = now_ms
            return not self._num_left


def _run(keys: Sequence[bytes], levels: Sequence[Level]) -> list[int]:
    """Return the first level that has each key, up to a key that none has."""
    found: list[int] = []
    count = _FIRST_ASKED
    while len(found) < len(keys):
        asked = keys[len(found) : len(found) + count]
        places = _places(asked, levels)
        run = next((at for at, place in enumerate(places) if place is None), len(places))
        found += [place for place in places[:run] if place is not None]
        if run < len(asked):
            break
        count = min(4 * count, _MAX_ASKED)
    return found


def _places(keys: Sequence[bytes], levels: Sequence[Level]) -> list[int | None]:
    found: list[int | None] = [None] * len(keys)
    for number, level in enumerate(levels):
        lacking = [at for at, place in enumerate(found) if place is None]
        if not lacking:
            break
        for at, is_there in zip(lacking, level.has([keys[at] for at in lacking]), strict=True):
            if is_there:
                found[at] = number
    return found

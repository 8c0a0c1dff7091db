"""Jobs of the engine's thread for the threads that talk to stores: lookups, fetches and puts.

A Lookup finds how far the levels hold a chain, and claims what they lack, unless another engine is
computing it. A StoreFetch reads blocks into places of the host memory, in slices that several
threads share. Knows levels and keys; no scheduler and no thread. Always holds: each part of a job
ends exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from quire.kv_store.level import Bytes, Fetched, Level, SharedLevel
from quire.kv_store.shared_store import KEY_BYTES, MAX_CLAIM_BYTES

SLICE_BLOCKS = 4
ENGINE_ID_BYTES = 8
_OWNER_BYTES = 16  # the engine, and a number of the claim
# How many keys are asked for at once: a chain often has none, or all.
_FIRST_ASKED, _MAX_ASKED = 4, 256


@dataclass(slots=True, eq=False)
class Lookup:
    """How far `keys` are stored. before: the keys of the same chain before these.

    levels: for each leading key the number of the level that has it. num_elsewhere: how many keys
    after these another engine is computing. claimed: the key under which a claim of what is missing
    was made, with `record`; None: none was.
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
    record: bytes = b""
    is_abandoned: bool = False

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
            self.record = self.owner + b"".join(missing)[: MAX_CLAIM_BYTES - len(self.owner)]
            if shared.claim(missing[0], self.record):
                # What another engine has put since, before it ended its claim, is not missing.
                self.levels += _run(missing, levels)
                if len(self.levels) == len(self.keys):
                    shared.release(missing[0], self.record)
                else:
                    self.claimed = missing[0]
                return

    def _num_claimed(self, record: bytes, missing: Sequence[bytes]) -> int:
        """Return how many of the missing keys, from the first on, a claim of others lists."""
        if record[:ENGINE_ID_BYTES] == self.owner[:ENGINE_ID_BYTES]:
            return 0
        listed = {record[at : at + KEY_BYTES] for at in range(_OWNER_BYTES, len(record), KEY_BYTES)}
        return next((at for at, key in enumerate(missing) if key not in listed), len(missing))


@dataclass(slots=True, eq=False)
class StoreFetch:
    """Blocks `keys` into `places`. levels: the number of the level that has each.

    outcomes: filled by threads, slice by slice; None: not read. is_cancelled: nothing that was not
    begun is read. num_left: blocks of slices that have not ended. read_ms: when the last one has.
    spans: of each level that brought blocks, from when to when it was read.
    """

    keys: list[bytes]
    places: list[int]
    levels: list[int]
    began_ms: float
    is_cancelled: bool = False
    outcomes: list[Fetched | None] = field(init=False)
    num_left: int = field(init=False)
    read_ms: float = field(init=False)
    spans: dict[int, tuple[float, float]] = field(init=False, default_factory=dict)
    _reading_ms: dict[int, float] = field(init=False, default_factory=dict)  # since when, by slice
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.keys)
        self.num_left, self.read_ms = len(self.keys), self.began_ms

    def slices(self) -> list[tuple[int, int]]:
        """Return (first, end) of each slice; all blocks of one lie in one level."""
        found, first = [], 0
        for _, run in groupby(self.levels):
            end = first + len(list(run))
            found += [(at, min(at + SLICE_BLOCKS, end)) for at in range(first, end, SLICE_BLOCKS)]
            first = end
        return found

    def read(
        self,
        first: int,
        end: int,
        levels: Sequence[Level],
        room: Callable[[int], Bytes],
        now_ms: float,
    ) -> None:
        """Read one slice; in a thread. After a block that is missing none is of use."""
        with self._lock:
            self._reading_ms[first] = now_ms
        if self.is_cancelled:
            return
        outs = [room(place) for place in self.places[first:end]]
        found = levels[self.levels[first]].fetch(self.keys[first:end], outs)
        self.outcomes[first:end] = found
        if any(one is not Fetched.WHOLE for one in found):
            self.is_cancelled = True

    def end_slice(self, first: int, end: int, now_ms: float) -> bool:
        """Note that a slice was read, or not; return whether it was the last."""
        with self._lock:
            began_ms = self._reading_ms.pop(first, now_ms)
            if Fetched.WHOLE in self.outcomes[first:end]:
                level = self.levels[first]
                first_ms, last_ms = self.spans.get(level, (began_ms, now_ms))
                self.spans[level] = min(first_ms, began_ms), max(last_ms, now_ms)
            self.num_left -= end - first
            self.read_ms = now_ms
            return not self.num_left

    def took(self) -> Iterator[tuple[int, int, float]]:
        """Return each level that brought blocks, how many, and in how long."""
        for level, (first_ms, last_ms) in self.spans.items():
            pairs = zip(self.levels, self.outcomes, strict=True)
            num_whole = sum(one == level and got is Fetched.WHOLE for one, got in pairs)
            yield level, num_whole, last_ms - first_ms

    def hangs(self, last_ms: float) -> bool:
        """Return whether a slice has been read since before last_ms."""
        with self._lock:
            return any(since_ms < last_ms for since_ms in self._reading_ms.values())


@dataclass(frozen=True, slots=True)
class PutEnded:
    """A block that was put into the levels. is_stored: it is in the shared store now."""

    key: bytes
    is_stored: bool


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

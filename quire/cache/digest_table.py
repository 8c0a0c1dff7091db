"""From digests to numbers, many at a time: what the native table does, and its plain twin.

Knows digests (uint64 [n, 2], made by quire.cache.chain) and numbers from 0 on; not what the
numbers stand for. The native table (native/src/digest_table.cc) is what serves: a dictionary of
16-byte keys costs half a microsecond an access once it outgrows the processor's caches.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.chain import Uint64s, keys_of
from quire.cache.table import Int32s

NONE = -1


class Table(Protocol):
    """What quire._native.DigestTable and PlainDigestTable do alike; empty at first."""

    def __len__(self) -> int: ...

    def find(self, digests: Uint64s) -> Int32s:
        """Return the number of each digest, -1 where it has none."""
        ...

    def longest_run(self, digests: Uint64s) -> Int32s:
        """Return the numbers of the first digests, up to the first that has none."""
        ...

    def longest_runs(self, chains: list[Uint64s]) -> list[Int32s]:
        """Return the longest run of each of `chains`."""
        ...

    def put(self, digests: Uint64s, numbers: Int32s) -> NDArray[np.int64]:
        """Give digests[i] numbers[i] (>= 0); returns the i that are new here.

        One that is known keeps its number, one that occurs twice the first of them.
        """
        ...

    def take(self, digests: Uint64s) -> Int32s:
        """Drop the digests; returns the number each had, -1 where it had none (any more)."""
        ...

    def take_pairs(self, digests: Uint64s, numbers: Int32s) -> int:
        """Drop digests[i] where its number is numbers[i]; returns how many."""
        ...

    def clear(self) -> None:
        """Drop all."""
        ...


class PlainDigestTable:
    """The plain twin: a dictionary."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, digests: Uint64s) -> Int32s:
        """See Table."""
        return np.array([self._numbers.get(key, NONE) for key in keys_of(digests)], np.int32)

    def longest_run(self, digests: Uint64s) -> Int32s:
        """See Table."""
        found = self.find(digests)
        unknown = np.flatnonzero(found == NONE)
        return found[: unknown[0]] if len(unknown) else found

    def longest_runs(self, chains: list[Uint64s]) -> list[Int32s]:
        """See Table."""
        return [self.longest_run(digests) for digests in chains]

    def put(self, digests: Uint64s, numbers: Int32s) -> NDArray[np.int64]:
        """See Table."""
        new = []
        for at, (key, number) in enumerate(zip(keys_of(digests), numbers.tolist(), strict=True)):
            if key not in self._numbers:
                self._numbers[key] = number
                new.append(at)
        return np.array(new, np.int64)

    def take(self, digests: Uint64s) -> Int32s:
        """See Table."""
        return np.array([self._numbers.pop(key, NONE) for key in keys_of(digests)], np.int32)

    def take_pairs(self, digests: Uint64s, numbers: Int32s) -> int:
        """See Table."""
        count = 0
        for key, number in zip(keys_of(digests), numbers.tolist(), strict=True):
            if self._numbers.get(key) == number:
                del self._numbers[key]
                count += 1
        return count

    def clear(self) -> None:
        """See Table."""
        self._numbers.clear()

"""SharedHistory: which replica has which beginnings of prompts, for several processes at once.

A PrefixHistory in memory that processes map: a table for each replica, in sets of places ordered by
last use. Knows no file and no process. Always holds: a race between two processes loses or doubles
an entry and never waits; an entry is a hint, so that an answer does not depend on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from quire.routing.prefix_history import BLOCK_BYTES, MAX_BLOCKS

KEY_BYTES = 16
_WAYS = 8


def keyed_block_names(key: bytes, scope: str, prompt: bytes) -> list[int]:
    """Return the names of the full blocks of a prompt, equal in all processes with the key."""
    chain = blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=8, key=key)
    names = []
    for at in range(0, min(len(prompt) - BLOCK_BYTES + 1, MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        chain.update(prompt[at : at + BLOCK_BYTES])
        names.append(int.from_bytes(chain.digest(), "little") or 1)
    return names


class SharedHistory:
    """places: words of 64 bits, as many for each replica, from 0 on; zero: empty."""

    def __init__(self, places: memoryview, num_replicas: int) -> None:
        each = len(places) // num_replicas
        if each % _WAYS or not each:
            raise ValueError(f"{each} places a replica are no sets of {_WAYS}")
        self._tables = [places[at * each : (at + 1) * each] for at in range(num_replicas)]
        self._num_sets = each // _WAYS

    def matched_blocks(self, names: Sequence[int], mask: int) -> dict[int, int]:
        """Return how many blocks each replica of `mask` has, by its number; none is left out."""
        return {
            number: self._matched(names, table)
            for number, table in enumerate(self._tables)
            if mask >> number & 1
        }

    def note(self, names: Sequence[int], number: int) -> None:
        """Note that a prompt with these blocks was sent to replica `number`."""
        table = self._tables[number]
        for name in names:
            at = name % self._num_sets * _WAYS
            held = table[at : at + _WAYS].tolist()
            if held[0] != name:
                others = [one for one in held if one != name][: _WAYS - 1]
                table[at : at + 1 + len(others)] = memoryview(array("Q", (name, *others)))

    def forget(self, number: int) -> None:
        """Note that replica `number` has an empty cache now, or is gone."""
        table = self._tables[number]
        table[:] = memoryview(array("Q", bytes(8 * len(table))))

    def _matched(self, names: Sequence[int], table: memoryview) -> int:
        for count, name in enumerate(names):
            at = name % self._num_sets * _WAYS
            if name not in table[at : at + _WAYS].tolist():
                return count
        return len(names)

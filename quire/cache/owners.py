"""Owners: who computed what the cache holds, a small number for each pair of tenant and salt.

Where chains of digests begin (a seed for each salt) is known here too. Knows no blocks. Always
holds: number 0 is of all that have no number of their own because there are too many; others keep
theirs while something is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.cache.digest import Uint64s

MAX_OWNERS = 1024
EVERYBODY_ELSE = 0


class Owner(NamedTuple):
    """One tenant's use of one salt."""

    number: int
    tenant: str
    salt: str
    seed: Uint64s  # [2]


class Owners:
    """seed_of: the digest before the first block, for a salt."""

    def __init__(self, seed_of: Callable[[str], Uint64s], limit: int = MAX_OWNERS) -> None:
        self._seed_of = seed_of
        self._limit = limit
        self._by_name: dict[tuple[str, str], Owner] = {}
        self._free = list(range(limit, EVERYBODY_ELSE, -1))
        self._since_cleared = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def owner(self, tenant: str, salt: str) -> Owner | None:
        """Who that is, None for somebody without a number (yet); see `add`."""
        return self._by_name.get((tenant, salt))

    def add(self, tenant: str, salt: str, used: Callable[[], NDArray[np.int32]]) -> Owner:
        """Somebody new. used: the numbers something is of, asked for where all are given out."""
        if not self._free and self._since_cleared <= 0:
            self._clear(used())
        number = self._free.pop() if self._free else EVERYBODY_ELSE
        owner = Owner(number, tenant, salt, self._seed_of(salt))
        if number == EVERYBODY_ELSE:
            self._since_cleared -= 1
        else:
            self._by_name[tenant, salt] = owner
        return owner

    def number_now(self, owner: Owner) -> int:
        """The number of somebody told of earlier, who may have lost it since."""
        now = self._by_name.get((owner.tenant, owner.salt))
        return EVERYBODY_ELSE if now is None else now.number

    def of_tenant(self, tenant: str) -> list[Owner]:
        """All of one tenant, the latest first."""
        return [owner for owner in reversed(self._by_name.values()) if owner.tenant == tenant]

    def by_number(self) -> dict[int, Owner]:
        """All that have a number."""
        return {owner.number: owner for owner in self._by_name.values()}

    def _clear(self, used: NDArray[np.int32]) -> None:
        """Take back the numbers nothing is of; not again until as many came in vain."""
        kept = set(used.tolist())
        gone = [name for name, owner in self._by_name.items() if owner.number not in kept]
        for name in gone:
            self._free.append(self._by_name.pop(name).number)
        self._since_cleared = self._limit

"""Owners: a small number for each pair of tenant and salt that has blocks in the cache.

Also knows where chains of digests begin (a seed for each salt). Knows no blocks. Always holds:
number 0 stands for all owners without a number of their own because there are too many; others keep
theirs while a block is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Uint64s = NDArray[np.uint64]

MAX_OWNERS = 1024
OTHER_OWNERS = 0


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
        self._free = list(range(limit, OTHER_OWNERS, -1))
        self._since_cleared = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def owner(self, tenant: str, salt: str) -> Owner | None:
        """Return the owner of that name, None for one without a number (yet); see `add`."""
        return self._by_name.get((tenant, salt))

    def add(self, tenant: str, salt: str, used: Callable[[], NDArray[np.int32]]) -> Owner:
        """Add a new owner.

        used: returns the numbers in use; called where all are given out.
        """
        if not self._free and self._since_cleared <= 0:
            self._clear(used())
        number = self._free.pop() if self._free else OTHER_OWNERS
        owner = Owner(number, tenant, salt, self._seed_of(salt))
        if number == OTHER_OWNERS:
            self._since_cleared -= 1
        else:
            self._by_name[tenant, salt] = owner
        return owner

    def number_now(self, owner: Owner) -> int:
        """Return the current number of an owner, which may have lost it."""
        now = self._by_name.get((owner.tenant, owner.salt))
        return OTHER_OWNERS if now is None else now.number

    def of_tenant(self, tenant: str) -> list[Owner]:
        """Return all owners of one tenant, the latest first."""
        return [owner for owner in reversed(self._by_name.values()) if owner.tenant == tenant]

    def by_number(self) -> dict[int, Owner]:
        """Return all owners that have a number."""
        return {owner.number: owner for owner in self._by_name.values()}

    def _clear(self, used: NDArray[np.int32]) -> None:
        """Take back unused numbers; not again until as many owners were added in vain."""
        kept = set(used.tolist())
        gone = [name for name, owner in self._by_name.items() if owner.number not in kept]
        for name in gone:
            self._free.append(self._by_name.pop(name).number)
        self._since_cleared = self._limit

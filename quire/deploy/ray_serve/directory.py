"""ReplicaDirectory: the addresses of an application's replicas, held by leases that expire.

Replicas renew their lease with `hold`; routers read `addresses`. It runs as a deployment of its
own, so its memory is lost with its process; holders then renew within `RENEW_EVERY_S`. Knows no
health: the router checks replicas. Always holds: an address without a renewal for `LEASE_S` is not
listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEASE_S = 15.0
RENEW_EVERY_S = LEASE_S / 3


class ReplicaDirectory:
    """Leases by address. now_s: the clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._until_s: dict[str, float] = {}

    async def hold(self, address: str) -> None:
        """Take or renew the lease of an address."""
        self._until_s[address] = self._now_s() + LEASE_S

    async def give_up(self, address: str) -> None:
        """End the lease of an address."""
        self._until_s.pop(address, None)

    async def addresses(self) -> list[str]:
        """Return the addresses with a lease."""
        now_s = self._now_s()
        self._until_s = {one: until for one, until in self._until_s.items() if until > now_s}
        return sorted(self._until_s)

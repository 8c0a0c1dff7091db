"""ReplicaDirectory: the addresses of an application's replicas, held by leases that expire.

Replicas renew their lease with `hold`; routers read `addresses`. It runs as a deployment of its
own, so its memory is lost with its process; holders then renew within `RENEW_EVERY_S`, or soon
after it answers again. Knows no health: the router checks replicas. Always holds: an address
without a renewal for `LEASE_S` is not listed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from quire.base.log import Log

LEASE_S = 15.0
RENEW_EVERY_S = LEASE_S / 3
# A directory that returns empty has the lease again after a renewal that began before and gets no
# answer, a pause and another one: sooner than routers miss it (ABSENT_S).
HOLD_TIMEOUT_S = 1.0
_RETRY_EVERY_S = 1.0


class Directory(Protocol):
    """The directory of replicas, seen from one of them."""

    async def hold(self, address: str) -> None:
        """Take or renew the lease of an address."""

    async def give_up(self, address: str) -> None:
        """End the lease of an address."""


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


async def hold_lease(directory: Directory, address: str, log: Log) -> None:
    """Hold the lease of a replica until cancelled. A renewal waits for an answer no longer than
    HOLD_TIMEOUT_S."""
    is_down, loop = False, asyncio.get_running_loop()
    while True:
        next_s = loop.time() + RENEW_EVERY_S
        try:
            async with asyncio.timeout(HOLD_TIMEOUT_S):
                await directory.hold(address)
            is_down = False
        except Exception as error:  # noqa: BLE001  Ray's errors have no common class
            if not is_down:
                reason = str(error) or type(error).__name__
                log.warning("the lease could not be renewed", reason=reason)
            is_down = True
            next_s = loop.time() + _RETRY_EVERY_S
        await asyncio.sleep(max(next_s - loop.time(), 0.0))

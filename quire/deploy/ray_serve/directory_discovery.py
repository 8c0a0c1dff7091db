"""DirectoryDiscovery: the replicas that a ReplicaDirectory lists, as a Discovery of the router.

Knows the directory as a function that returns addresses. Always holds: a directory that is down, or
was restarted empty, takes no replica away (LeaseList).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from quire.base.log import Log
from quire.base.server_url import ServerUrl
from quire.deploy.ray_serve.directory import RENEW_EVERY_S
from quire.router.discovery import replica_url
from quire.router.lease_list import LeaseDiscovery, LeaseList

READ_EVERY_S = 0.5
ABSENT_S = RENEW_EVERY_S + 1.0
# So long a reading waits for a directory that is starting.
_ANSWER_S = 5.0


class DirectoryDiscovery(LeaseDiscovery):
    """read_addresses: asks the directory. now_s: the clock."""

    read_every_s = READ_EVERY_S

    def __init__(
        self,
        read_addresses: Callable[[], Awaitable[Sequence[str]]],
        log: Log,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(LeaseList(ABSENT_S, now_s), "the directory", log)
        self._read_addresses = read_addresses

    async def read_leases(self) -> dict[str, ServerUrl]:
        """Ask the directory."""
        async with asyncio.timeout(_ANSWER_S):
            return {one: replica_url(one) for one in await self._read_addresses()}

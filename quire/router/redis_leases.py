"""RedisLeases: replicas that hold a lease in Redis, as a Discovery; and how a lease is held.

A lease is a key that expires, `PREFIX` + `replica:` + the address. Redis alone decides when: a
duration is sent, and routers and holders measure theirs by clocks that are never set. Knows no
health: the prober checks replicas. Always holds: a replica leaves the list only after its lease was
absent for longer than holders need to renew theirs, as seen by a Redis that answers; so a Redis
that is down, or was restarted empty, takes no replica away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.base.errors import InvalidParameter
from quire.base.log import Log
from quire.base.server_url import ServerUrl
from quire.router.discovery import replica_url
from quire.router.lease_list import LeaseDiscovery, LeaseList
from quire.router.redis_link import RedisDown, RedisLink

LEASE_S = 15.0
_READ_EVERY_S = 1.0
_RENEW_EVERY_S = LEASE_S / 3
ABSENT_S = _RENEW_EVERY_S + 1.0
# A Redis that returns has the lease again after a renewal that began before and gets no answer, a
# pause and another one: sooner than routers miss it.
PUT_TIMEOUT_S = 1.0
_RETRY_EVERY_S = 1.0


class RedisLeases(LeaseDiscovery):
    """The addresses with a lease."""

    read_every_s = _READ_EVERY_S

    def __init__(self, link: RedisLink, prefix: str, log: Log, now: Callable[[], float]) -> None:
        super().__init__(LeaseList(ABSENT_S, now), "Redis", log)
        self._link = link
        self._prefix = f"{prefix}replica:"
        self._refused: set[str] = set()

    async def read_leases(self) -> dict[str, ServerUrl]:
        """Return the addresses of the keys. One that is no address is logged and left out."""
        found: dict[str, ServerUrl] = {}
        for key in sorted(await self._link.keys(self._prefix)):
            text = key.removeprefix(self._prefix)
            try:
                url = replica_url(text)
            except InvalidParameter as error:
                if text not in self._refused and len(self._refused) < 1000:
                    self._refused.add(text)
                    self._log.warning("lease ignored", key=key[:200], reason=str(error))
                continue
            found.setdefault(url.full, url)
        return found


async def hold_lease(link: RedisLink, prefix: str, url: str, log: Log) -> None:
    """Hold the lease of a replica until cancelled, then give it up. link: waits for an answer no
    longer than PUT_TIMEOUT_S."""
    key, is_down, loop = f"{prefix}replica:{url}", False, asyncio.get_running_loop()
    try:
        while True:
            next_s = loop.time() + _RENEW_EVERY_S
            try:
                await link.put(key, "1", LEASE_S)
                is_down = False
            except RedisDown as error:
                if not is_down:
                    log.warning("the lease could not be renewed", reason=str(error))
                is_down = True
                next_s = loop.time() + _RETRY_EVERY_S
            await asyncio.sleep(max(next_s - loop.time(), 0.0))
    finally:
        try:
            await link.remove(key)
            log.event("gave the lease up", address=url)
        except RedisDown:
            log.warning("the lease could not be given up; it expires by itself", lease_s=LEASE_S)

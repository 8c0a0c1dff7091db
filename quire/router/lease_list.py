"""LeaseList: addresses that hold leases, as read repeatedly; LeaseDiscovery: a Discovery over one.

Always holds: an address leaves the list only after its lease was absent for `absent_s` in a row, as
read from a source that answers; so a source that is down, or was restarted empty, takes none away.
No error of a source ends `watch`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from quire.base.log import Log
from quire.base.server_url import ServerUrl


class LeaseList:
    """absent_s: longer than holders need to renew their leases. now_s: the clock."""

    def __init__(self, absent_s: float, now_s: Callable[[], float]) -> None:
        self._absent_s = absent_s
        self._now_s = now_s
        self._urls: dict[str, ServerUrl] = {}
        self._absent_since_s: dict[str, float] = {}
        self._is_down = False

    def addresses(self) -> tuple[ServerUrl, ...]:
        """Return the addresses of the last reading."""
        return tuple(self._urls.values())

    def went_down(self) -> bool:
        """Note that the source does not answer; return whether it answered before."""
        was_down, self._is_down = self._is_down, True
        return not was_down

    def came_back(self) -> bool:
        """Note that the source answers; return whether it did not before."""
        was_down, self._is_down = self._is_down, False
        if was_down:
            self._absent_since_s.clear()
        return was_down

    def update(self, found: Mapping[str, ServerUrl]) -> bool:
        """Take over a reading; return whether the list has changed."""
        now_s, read = self._now_s(), dict(found)
        absent = self._urls.keys() - read.keys()
        since_s = self._absent_since_s = {
            name: self._absent_since_s.get(name, now_s) for name in absent
        }
        read |= {
            name: self._urls[name] for name in absent if now_s - since_s[name] < self._absent_s
        }
        has_changed = read.keys() != self._urls.keys()
        self._urls = read
        return has_changed


class LeaseDiscovery(ABC):
    """Replicas that hold a lease, as a Discovery. leases: as they were read last. source: of them,
    for the log."""

    read_every_s: float

    def __init__(self, leases: LeaseList, source: str, log: Log) -> None:
        self._list = leases
        self._source = source
        self._log = log

    def poll(self) -> tuple[ServerUrl, ...]:
        """Return the addresses of the last reading."""
        return self._list.addresses()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Read the leases repeatedly until cancelled."""
        while True:
            if await self.read():
                changed()
            await asyncio.sleep(self.read_every_s)

    async def read(self) -> bool:
        """Read the leases once; return whether the list has changed."""
        try:
            found = await self.read_leases()
        except Exception as error:  # noqa: BLE001  errors of sources have no common class
            if self._list.went_down():
                self._log.warning(
                    f"replicas stay as they are while {self._source} does not answer",
                    reason=str(error) or type(error).__name__,
                    kept=len(self.poll()),
                )
            return False
        if self._list.came_back():
            self._log.event(f"{self._source} answers again", replicas=len(found))
        return self._list.update(found)

    @abstractmethod
    async def read_leases(self) -> Mapping[str, ServerUrl]:
        """Return the addresses that hold a lease now, by name. Raises any error."""

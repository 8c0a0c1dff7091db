"""RoleBalance: servers that compute prompts or answers, whichever of the two lacks servers.

Such a server (of role both) is in one of the two fleets at a time. It changes over when the other
fleet is short of servers by its open tokens (quire/routing/role_shortage.py). It drains first:
neither fleet sends it requests until those of the first have ended. Knows fleets and addresses, no
engine. Always holds: each fleet keeps a server that is available; a server is never in both fleets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quire.base.server_url import ServerUrl
from quire.router.discovery import Discovery
from quire.router.fleet import Fleet
from quire.router.replica import Replica
from quire.routing.role_shortage import RoleShortage, Side


class MovableServers:
    """The side of each movable server; None while it drains."""

    def __init__(self, urls: Sequence[ServerUrl], first: Side) -> None:
        self._sides: dict[ServerUrl, Side | None] = {}
        for url in urls:
            self._sides[url] = first if not self._sides else Side.DECODE

    def of(self, side: Side) -> tuple[ServerUrl, ...]:
        """Return the servers of a side."""
        return tuple(url for url, own in self._sides.items() if own is side)

    def place(self, url: ServerUrl, side: Side | None) -> None:
        """Put a server on a side, or on none."""
        self._sides[url] = side


class SideDiscovery:
    """A Discovery of the servers of one side: fixed ones, and those movable that are there now."""

    def __init__(self, fixed: Discovery | None, movable: MovableServers, side: Side) -> None:
        self._fixed, self._movable, self._side = fixed, movable, side

    def poll(self) -> tuple[ServerUrl, ...]:
        """See Discovery."""
        fixed = () if self._fixed is None else self._fixed.poll()
        return (*fixed, *(one for one in self._movable.of(self._side) if one not in fixed))

    async def read(self) -> bool:
        """See Discovery."""
        return False if self._fixed is None else await self._fixed.read()

    async def watch(self, changed: Callable[[], None]) -> None:
        """See Discovery."""
        if self._fixed is not None:
            await self._fixed.watch(changed)


class RoleBalance:
    """Moves `movable` between two fleets that follow a SideDiscovery each.

    hold_s: how long a fleet has to be short before a server changes over.
    """

    def __init__(
        self, decode: Fleet, prefill: Fleet, movable: MovableServers, *, hold_s: float
    ) -> None:
        self._fleets = {Side.DECODE: decode, Side.PREFILL: prefill}
        self._movable, self._hold_s, self._log = movable, hold_s, decode.log
        self._shortage = RoleShortage(hold_s)
        self._draining: tuple[Replica, Side] | None = None
        self.num_changes = 0

    async def run(self) -> None:
        """Look at both fleets until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.look(loop.time())
            await asyncio.sleep(self._hold_s / 10)

    def look(self, now_s: float) -> None:
        """Measure both fleets; begin a change, or end one."""
        replicas = {side: [*fleet.replicas.values()] for side, fleet in self._fleets.items()}
        self._shortage.measure(replicas, now_s)
        if self._draining is not None:
            self._end_change(*self._draining)
            return
        able = {
            side: [one for one in all_ if one.is_available(now_s)]
            for side, all_ in replicas.items()
        }
        short = self._shortage.short(able, now_s)
        if short is not None:
            self._begin_change(short, able[short.other])

    def _begin_change(self, side: Side, able: Sequence[Replica]) -> None:
        """Take a server from the other side, of which `able` take requests."""
        giving, movable = self._fleets[side.other], self._movable.of(side.other)
        candidates = [one for one in able if one.url in movable]
        if len(able) < 2 or not candidates:
            return
        chosen = min(candidates, key=lambda one: one.backlog_tokens)
        self._movable.place(chosen.url, None)
        giving.follow()
        self._draining = (chosen, side)
        self._shortage.begun()
        self._log.event(
            "a server changes its role",
            replica=chosen.name,
            role=side.value,
            open=len(chosen.loads),
        )
        self._end_change(chosen, side)

    def _end_change(self, replica: Replica, side: Side) -> None:
        """Put a server on its new side once its last request has ended."""
        if replica.loads:
            return
        self._movable.place(replica.url, side)
        self._fleets[side].follow()
        self._fleets[side].probe_now.set()
        self._draining = None
        self._shortage.changed()
        self.num_changes += 1
        self._log.event("a server has changed its role", replica=replica.name, role=side.value)

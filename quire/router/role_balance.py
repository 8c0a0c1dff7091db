"""RoleBalance: servers that compute prompts or answers, whichever of the two lacks servers.

Such a server (of role both) is in one of the two fleets at a time. It changes over when the other
fleet has needed longer for its open tokens for a while, by a factor, and then not again for a time:
small differences and short bursts move nothing. It drains first: neither fleet sends it requests
until those of the first have ended. Knows fleets and addresses, no engine. Always holds: each fleet
keeps a server that is available; a server is never in both fleets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum

from quire.base.server_url import ServerUrl
from quire.router.discovery import Discovery
from quire.router.fleet import Fleet
from quire.router.replica import Replica

# A fleet is short of servers if it needs so many times as long as the other, and this at least.
FACTOR, SHORT_S = 2.0, 1.0
# After a change so many times the holding time passes before the next.
REST = 4.0
_KEEP = 0.8  # what a measurement leaves of the rate before it


class Side(StrEnum):
    """What a server is used for."""

    PREFILL = "prefill"
    DECODE = "decode"


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


class _Load:
    """How long a fleet needs for what is open, from the rate of a busy server."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._done: dict[Replica, int] = {}
        self._rate = 0.0  # tokens a second and busy server

    def able(self, now_s: float) -> list[Replica]:
        """Return the servers that take requests."""
        return [one for one in self.fleet.replicas.values() if one.is_available(now_s)]

    def measure(self, past_s: float) -> None:
        """Take in what was computed in the last seconds."""
        replicas = list(self.fleet.replicas.values())
        done = [one.computed_tokens - self._done.get(one, one.computed_tokens) for one in replicas]
        busy = [count for count, one in zip(done, replicas, strict=True) if count or one.loads]
        if busy and past_s > 0:
            rate = sum(busy) / len(busy) / past_s
            self._rate = _KEEP * self._rate + (1.0 - _KEEP) * rate if self._rate else rate
        self._done = {one: one.computed_tokens for one in replicas}

    def seconds(self, now_s: float) -> float:
        """Return how long the open tokens take at that rate."""
        able = self.able(now_s)
        backlog = sum(one.backlog_tokens for one in able)
        return backlog / (self._rate * len(able)) if backlog and self._rate else 0.0


class RoleBalance:
    """Moves `movable` between two fleets that follow a SideDiscovery each.

    hold_s: how long a fleet has to be short before a server changes over.
    """

    def __init__(
        self, decode: Fleet, prefill: Fleet, movable: MovableServers, *, hold_s: float
    ) -> None:
        self._loads = {Side.DECODE: _Load(decode), Side.PREFILL: _Load(prefill)}
        self._movable, self._hold_s, self._log = movable, hold_s, decode.log
        self._draining: tuple[Replica, Side] | None = None
        self._short: tuple[Side, float] | None = None  # since when
        self._rest_until_s = 0.0
        self._looked_s = 0.0
        self.num_changes = 0

    async def run(self) -> None:
        """Look at both fleets until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.look(loop.time())
            await asyncio.sleep(self._hold_s / 10)

    def look(self, now_s: float) -> None:
        """Measure both fleets; begin a change, or end one."""
        for load in self._loads.values():
            load.measure(now_s - self._looked_s if self._looked_s else 0.0)
        self._looked_s = now_s
        if self._draining is not None:
            self._end_change(*self._draining)
            return
        short = self._shorter(now_s)
        if short is None:
            self._short = None
        elif self._short is None or self._short[0] is not short:
            self._short = (short, now_s)
        elif now_s - self._short[1] >= self._hold_s and now_s >= self._rest_until_s:
            self._begin_change(short, now_s)

    def _shorter(self, now_s: float) -> Side | None:
        """Return the side that is short of servers; None where neither is."""
        needed = {side: load.seconds(now_s) for side, load in self._loads.items()}
        for side, other in ((Side.PREFILL, Side.DECODE), (Side.DECODE, Side.PREFILL)):
            if needed[side] > max(FACTOR * needed[other], SHORT_S):
                return side
        return None

    def _begin_change(self, side: Side, now_s: float) -> None:
        other = Side.DECODE if side is Side.PREFILL else Side.PREFILL
        giving = self._loads[other]
        able = giving.able(now_s)
        movable = self._movable.of(other)
        candidates = [one for one in able if one.url in movable]
        if len(able) < 2 or not candidates:
            return
        chosen = min(candidates, key=lambda one: one.backlog_tokens)
        self._movable.place(chosen.url, None)
        giving.fleet.follow()
        self._draining, self._short = (chosen, side), None
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
        self._loads[side].fleet.follow()
        self._loads[side].fleet.probe_now.set()
        self._draining = None
        self._rest_until_s = self._looked_s + REST * self._hold_s
        self.num_changes += 1
        self._log.event("a server has changed its role", replica=replica.name, role=side.value)

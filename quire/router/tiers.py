"""Tiers: how many requests of each `service_tier` are open at a time, adapted to targets.

Tiers rank: priority, default, flex. Requests of the first are sent at once; of the others, a
limited number is open for each available replica, and the rest waits in turn. A controller looks at
the first tokens and the tokens that follow, of streams above flex: where too many miss their
targets, the limit of the lowest tier that can give way is cut; where they are kept, limits rise
again, the higher tier's first. Is given times. Always holds: a limit stays between its bounds;
a place that is free goes to the request that has waited for longest, which alone is woken; nothing
of this is done for a token.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.router.faults import ClientGone, Refusal
from quire.router.fleet import Fleet
from quire.router.route_file import TiersTable
from quire.router.routed_request import RoutedRequest

TIERS = ("priority", "default", "flex")
LIMITED = TIERS[1:]
# Fields of requests by tier, for replicas that schedule by priority (the smallest first).
_PRIORITIES = {"priority": -1, "default": 0, "flex": 1}
_NAMES = {"auto": "default", "standard_only": "default", "scale": "priority"}
_CHECK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """window: streams after which the controller decides. late_share: of them may miss a target.
    cut: factor of a limit that is cut. raise_by: of a limit that rises. floors: of the limits, as a
    share of the largest."""

    window: int
    late_share: float
    cut: float
    raise_by: int
    floors: dict[str, float]


PRESETS = {
    # Flex requests stop where interactive ones are late.
    "latency-first": Preset(
        window=20, late_share=0.05, cut=0.5, raise_by=1, floors={"default": 0.25, "flex": 0.0}
    ),
    # Batches stay full; only a lasting miss shrinks them.
    "throughput-first": Preset(
        window=80, late_share=0.25, cut=0.8, raise_by=4, floors={"default": 0.5, "flex": 0.25}
    ),
}


class Tiers:
    """limits: of open requests for each replica, by tier, as they are now."""

    def __init__(self, table: TiersTable) -> None:
        self._table = table
        self._preset = PRESETS[table.preset or "latency-first"]
        self._most = {"default": table.max_default, "flex": table.max_flex}
        self.limits = dict(self._most)
        self._open: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {one: deque() for one in LIMITED}
        self._fleet: Fleet | None = None
        self._num_measured = self._num_late = 0

    def follow(self, fleet: Fleet) -> None:
        """Open requests for the available replicas of a fleet."""
        self._fleet = fleet
        fleet.on_available = self._give

    def limit(self, tier: str) -> int:
        """Return how many requests of a tier may be open for each replica now."""
        return self.limits[tier]

    def num_waiting(self, tier: str) -> int:
        """Return how many requests of a tier wait."""
        return len(self._waiting[tier])

    def num_open(self, tier: str) -> int:
        """Return how many requests of a tier are open."""
        return self._open[tier]

    def read(self, request: RoutedRequest) -> str:
        """Return the tier of a request, and take the field out: replicas have one tier."""
        given = request.fields.get("service_tier")
        tier = "default"
        if given is not None:
            tier = _NAMES.get(given, given) if isinstance(given, str) else ""
        if tier not in TIERS:
            raise Refusal(
                400,
                "invalid_value",
                f"service_tier is {str(given)[:50]!r}; auto, {', '.join(TIERS)} are allowed",
                param="service_tier",
            )
        if given is not None:
            request.change("service_tier", None)
        if tier != "default" and request.route.generates and "priority" not in request.fields:
            request.change("priority", _PRIORITIES[tier])
        return tier

    async def enter(self, tier: str, is_gone: Callable[[], bool]) -> None:
        """Wait until a request of a tier may be sent, and count it. Raises Refusal, ClientGone."""
        if tier in LIMITED and (self._waiting[tier] or not self._has_room(tier)):
            await self._wait(tier, is_gone)
        else:
            self._open[tier] += 1

    def leave(self, tier: str) -> None:
        """Count a request no more."""
        self._open[tier] -= 1
        self._give()

    def ended(self, tier: str, ttft_s: float, tpot_s: float) -> None:
        """Note a stream's time to the first token since it was sent, and the mean time of the
        others (0: none)."""
        table = self._table
        if tier == "flex" or not (table.ttft_ms or table.tpot_ms):
            return
        is_late = bool(table.ttft_ms) and ttft_s * 1000 > table.ttft_ms
        is_slow = bool(table.tpot_ms) and tpot_s * 1000 > table.tpot_ms
        self._num_measured += 1
        self._num_late += is_late or is_slow
        if self._num_measured < self._preset.window:
            return
        if self._num_late > self._preset.late_share * self._num_measured:
            self._cut()
        else:
            self._raise()
        self._num_measured = self._num_late = 0
        self._give()

    def _cut(self) -> None:
        """Cut the limit of the lowest tier that is above its floor."""
        for tier in reversed(LIMITED):
            floor = self._floor(tier)
            if self.limits[tier] > floor:
                self.limits[tier] = max(int(self.limits[tier] * self._preset.cut), floor)
                return

    def _raise(self) -> None:
        for tier in LIMITED:
            if self.limits[tier] < self._most[tier]:
                raised = self.limits[tier] + self._preset.raise_by
                self.limits[tier] = min(raised, self._most[tier])
                return

    def _floor(self, tier: str) -> int:
        share = self._preset.floors[tier]
        return max(int(share * self._most[tier]), 1) if share else 0

    def _has_room(self, tier: str) -> bool:
        limit = self.limits[tier]
        if not limit and not any(self._open[one] for one in TIERS if one != tier):
            limit = 1  # nothing is late where nothing else is open
        assert self._fleet is not None
        return self._open[tier] < limit * max(self._fleet.num_available, 1)

    def _give(self) -> None:
        """Give places that are free to those that wait, in turn, and wake no others."""
        for tier, waiting in self._waiting.items():
            while waiting and self._has_room(tier):
                self._open[tier] += 1
                waiting.popleft().set_result(None)

    async def _wait(self, tier: str, is_gone: Callable[[], bool]) -> None:
        """Wait for a place that is given."""
        table, waiting, loop = self._table, self._waiting[tier], asyncio.get_running_loop()
        if len(waiting) >= table.max_waiting:
            raise Refusal(
                503,
                "overloaded",
                f"{len(waiting)} requests of tier {tier} wait and at most {table.max_waiting} may "
                "(max-waiting of [tiers]); try again later",
            )
        place: asyncio.Future[None] = loop.create_future()
        waiting.append(place)
        until_s = loop.time() + table.max_wait_seconds
        try:
            while not place.done():
                if is_gone():
                    raise ClientGone
                left_s = until_s - loop.time()
                if left_s <= 0:
                    raise self._no_place(tier)
                if waiting[0] is place:  # by its time alone a breaker lets requests pass again
                    self._give()
                await asyncio.wait({place}, timeout=min(left_s, _CHECK_S))
        except BaseException:
            if place.done():
                self.leave(tier)
            else:
                waiting.remove(place)
            raise

    def _no_place(self, tier: str) -> Refusal:
        return Refusal(
            503,
            "overloaded",
            f"no place for tier {tier} within {self._table.max_wait_seconds:g} s: "
            f"{self._open[tier]} of its requests are open and {self.limits[tier]} may be for each "
            "replica ([tiers]); try again later",
        )

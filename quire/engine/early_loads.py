"""EarlyLoads: blocks that have arrived are loaded into the pool while others are on their way.

Without it a prompt's blocks would all be copied into the pool after the last one has come, when
nothing covers that any more. Knows requests that wait, their chains, and loads; no job and no
connection; everything is called in the engine's thread. Always holds: a request is waited for only
by loads that have begun, which end in time; what was loaded early is found like any free block, so
that nothing is kept from running requests, and a block that gives way is loaded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.base.records import Request
from quire.cache.chain import Chain
from quire.cache.tier_transfers import Fetch
from quire.scheduler.prefill.hand_over import HandOvers


@dataclass(slots=True)
class _Early:
    """A request that waits. loads: all that bring its blocks; own: those begun for it."""

    request: Request
    chain: Chain
    keys: frozenset[bytes]
    loads: list[Fetch] = field(default_factory=list)
    own: list[Fetch] = field(default_factory=list)


class EarlyLoads:
    """Of the requests that wait for one source of blocks."""

    def __init__(self, hand_overs: HandOvers) -> None:
        self._hand_overs = hand_overs
        self._waiting: dict[str, _Early] = {}

    def begin(self, request: Request) -> None:
        """Note that a request waits for blocks, until `end`; no effect if it does."""
        if request.request_id in self._waiting:
            return
        chain = self._hand_overs.chain(request, request.known_ids)
        self._waiting[request.request_id] = _Early(request, chain, frozenset(chain.keys))

    def load(self, request_id: str) -> int:
        """Load what has arrived for a request, as far as running requests leave room.

        Return the number of blocks.
        """
        early = self._waiting.get(request_id)
        if early is None:
            return 0
        own = self._hand_overs.load(early.chain, early.request.known_ids)
        if own is not None:
            early.own.append(own)
        early.loads = [load for load in early.loads if not load.has_ended]
        for load in self._hand_overs.loads:
            if load not in early.loads and not early.keys.isdisjoint(load.keys):
                early.loads.append(load)
        return 0 if own is None else len(own.keys)

    def are_under_way(self, request_id: str) -> bool:
        """Return whether blocks of a request are being copied into the pool."""
        early = self._waiting.get(request_id)
        return early is not None and any(not load.has_ended for load in early.loads)

    def take_count(self, request_id: str) -> int:
        """Return how many blocks were loaded for a request since this was called last."""
        early = self._waiting.get(request_id)
        if early is None:
            return 0
        ended = [load for load in early.own if load.has_ended]
        early.own = [load for load in early.own if not load.has_ended]
        return sum(int(load.arrived.sum()) for load in ended)

    def end(self, request_id: str) -> None:
        """Note that a request has begun, or has ended; its loads end by themselves."""
        self._waiting.pop(request_id, None)

"""RoleShortage: whether the servers that compute prompts, or those that write answers, are too few.

A side needs as long for its open tokens as these divided by the measured rate of a busy server and
by its servers. It is short if it has needed longer than the other for a while, by a factor: small
differences and short bursts move nothing. Knows no HTTP and no engine, and reads no clock: time is
an argument. Always holds: after a change none follows for a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from quire.routing.policy import Replica

# A side is short of servers if it needs so many times as long as the other, and this at least.
FACTOR, SHORT_S = 2.0, 1.0
# After a change so many times the holding time passes before the next.
REST = 4.0
_KEEP = 0.8  # what a measurement leaves of the rate before it


class Side(StrEnum):
    """The role that a server is used for."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Side:
        """Return the opposite role."""
        return Side.DECODE if self is Side.PREFILL else Side.PREFILL


class CountingReplica(Replica, Protocol):
    """A Replica that counts what it has done."""

    @property
    def computed_tokens(self) -> int:
        """Computed tokens of all its requests that were counted so far."""


class _Rate:
    """The tokens a second of a busy server of one side."""

    def __init__(self) -> None:
        self._done: dict[CountingReplica, int] = {}
        self._rate = 0.0

    def measure(self, replicas: Sequence[CountingReplica], past_s: float) -> None:
        """Take in what was computed in the last seconds."""
        done = [one.computed_tokens - self._done.get(one, one.computed_tokens) for one in replicas]
        busy = [count for count, one in zip(done, replicas, strict=True) if count or one.loads]
        if busy and past_s > 0:
            rate = sum(busy) / len(busy) / past_s
            self._rate = _KEEP * self._rate + (1.0 - _KEEP) * rate if self._rate else rate
        self._done = {one: one.computed_tokens for one in replicas}

    def seconds(self, able: Sequence[CountingReplica]) -> float:
        """Return how long the open tokens of these take at that rate."""
        backlog = sum(one.backlog_tokens for one in able)
        return backlog / (self._rate * len(able)) if backlog and self._rate else 0.0


class RoleShortage:
    """hold_s: how long a side has to be short before a server changes over."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._rates = {side: _Rate() for side in (Side.DECODE, Side.PREFILL)}
        self._short: tuple[Side, float] | None = None  # since when
        self._rest_until_s = 0.0
        self._looked_s = 0.0

    def measure(self, replicas: Mapping[Side, Sequence[CountingReplica]], now_s: float) -> None:
        """Take in what the servers of both sides have done."""
        past_s = now_s - self._looked_s if self._looked_s else 0.0
        for side, rate in self._rates.items():
            rate.measure(replicas[side], past_s)
        self._looked_s = now_s

    def short(self, able: Mapping[Side, Sequence[CountingReplica]], now_s: float) -> Side | None:
        """Return the side that gets a server now, if one does. able: servers that take requests."""
        side = self._shorter(able)
        if side is None:
            self._short = None
        elif self._short is None or self._short[0] is not side:
            self._short = (side, now_s)
        elif now_s - self._short[1] >= self._hold_s and now_s >= self._rest_until_s:
            return side
        return None

    def begun(self) -> None:
        """Note that a server is on its way to the other side."""
        self._short = None

    def changed(self) -> None:
        """Note that it is there."""
        self._rest_until_s = self._looked_s + REST * self._hold_s

    def _shorter(self, able: Mapping[Side, Sequence[CountingReplica]]) -> Side | None:
        """Return the side that is short of servers; None where neither is."""
        needed = {side: rate.seconds(able[side]) for side, rate in self._rates.items()}
        for side in (Side.PREFILL, Side.DECODE):
            if needed[side] > max(FACTOR * needed[side.other], SHORT_S):
                return side
        return None

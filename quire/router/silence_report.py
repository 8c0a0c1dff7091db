"""SilenceReport: lines of the log about silent replicas, with what the decision was based on.

One where a replica is given up, and one, for each silence, where it is not although its own limit
is exceeded, since no other replica could take over. The sign is what was missing: `beats` of the
process, `answers` to probes, `progress` (steps and output) or messages of the `engine`. Decides
nothing and reads no clock.
"""

from __future__ import annotations

from quire.base.log import Log
from quire.router.beats import FleetBeats
from quire.router.fleet import Fleet
from quire.router.replica import Replica

GIVEN_UP, KEPT = "silent replica given up", "silent replica kept"


class SilenceReport:
    """Of the replicas of one fleet."""

    def __init__(self, fleet: Fleet, beats: FleetBeats, log: Log) -> None:
        self._fleet = fleet
        self._beats = beats
        self._log = log
        self._kept: set[Replica] = set()

    def given_up(
        self, replica: Replica, sign: str, silent_s: float, limit_s: float | None, now_s: float
    ) -> None:
        """Report that a replica is given up. limit_s: None where the replica has set it."""
        self._kept.discard(replica)
        self._write(GIVEN_UP, replica, sign, silent_s, limit_s, now_s)

    def kept(
        self, replica: Replica, sign: str, silent_s: float, limit_s: float, now_s: float
    ) -> None:
        """Report that a replica is silent for too long, and is waited for. Once for a silence."""
        if replica not in self._kept:
            self._kept.add(replica)
            self._write(KEPT, replica, sign, silent_s, limit_s, now_s)

    def ended(self, replica: Replica) -> None:
        """Note that a replica is not silent."""
        self._kept.discard(replica)

    def _write(
        self,
        what: str,
        replica: Replica,
        sign: str,
        silent_s: float,
        limit_s: float | None,
        now_s: float,
    ) -> None:
        others = [one for one in self._fleet.replicas.values() if one is not replica]
        self._log.event(
            what,
            replica=replica.name,
            sign=sign,
            silent_ms=round(1000 * silent_s),
            limit_ms=-1 if limit_s is None else round(1000 * limit_s),
            no_beat_ms=self._no_beat_ms(replica, now_s),
            no_progress_ms=round(1000 * (now_s - replica.progress_s)),
            others="; ".join(self._seen(one, now_s) for one in others),
        )

    def _no_beat_ms(self, replica: Replica, now_s: float) -> int:
        """Return the time since the newest beat; -1 where none come."""
        quiet_s = self._beats.quiet_s(replica, now_s)
        return -1 if quiet_s is None else round(1000 * quiet_s)

    def _seen(self, other: Replica, now_s: float) -> str:
        """Return whether another replica can take streams, and its newest signs of life."""
        state = "fenced" if other.is_fenced and other.state == "ready" else other.state
        if other.is_up and not other.breaker.allows(now_s):
            state += ", its circuit breaker open"
        no_beat_ms = self._no_beat_ms(other, now_s)
        beat = "no beats" if no_beat_ms < 0 else f"beat {no_beat_ms} ms ago"
        progress_ms = round(1000 * (now_s - other.progress_s))
        return f"{other.name} {state}, {beat}, progress {progress_ms} ms ago"

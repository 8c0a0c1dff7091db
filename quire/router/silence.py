"""SilenceLimit: how many times the usual a replica may be silent before it counts as stopped.

Where replicas are overloaded, silence means little: a replica that is given up hands its requests
to the others, which are silent next. So three signs of an overload lengthen the limits. A replica
that was given up and is back at once doubles those of all, and a minute without such a false alarm
halves them (as retransmission timers back off). Each other replica that was given up just before,
or failed with many requests that the others take over, makes them `together` times as long, and
every moment in which no other replica works that could take over four times. Reads no clock. Always
holds: a factor is between 1 and MAX_FACTOR.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.base.log import Log
from quire.router.replica import Replica

MAX_FACTOR = 8.0
# A replica that answers again after less than this was slow; a stopped one stays away longer. As
# long as it may be silent at least, and half as long again.
BACK_WITHIN_S = 1.5
CALM_S = 60.0
# So long after one replica the silence of another may have the same cause.
TOGETHER_S, TOGETHER_FACTOR = 5.0, 4.0
ALONE_FACTOR = 4.0


class SilenceLimit:
    """factor: of the limits of all replicas now. together: of one's limits, for each other one that
    failed lately."""

    def __init__(self, log: Log, *, together: float = TOGETHER_FACTOR) -> None:
        self.factor = 1.0
        self._together = together
        self._log = log
        self._changed_s = 0.0
        self._given_up_s: dict[Replica, float] = {}
        self._lately_s: dict[Replica, float] = {}  # as long as it counts for the others

    def factor_of(self, replica: Replica, now_s: float, *, others_work: bool) -> float:
        """Return the factor of one replica's limits. others_work: another one could take over."""
        num_others = sum(
            now_s - at_s < TOGETHER_S for one, at_s in self._lately_s.items() if one is not replica
        )
        factor = self.factor * self._together**num_others
        return min(factor if others_work else ALONE_FACTOR * factor, MAX_FACTOR)

    def given_up(self, replica: Replica, now_s: float) -> None:
        """Note that a replica counts as stopped."""
        self._given_up_s[replica] = self._lately_s[replica] = now_s

    def failed(self, replica: Replica, now_s: float) -> None:
        """Note that a replica has failed with many open requests."""
        self._lately_s[replica] = now_s

    def works(self, replica: Replica, now_s: float) -> None:
        """Note that a replica answers and computes."""
        given_up_s = self._given_up_s.pop(replica, None)
        was_slow = given_up_s is not None and now_s - given_up_s < BACK_WITHIN_S
        if was_slow and self.factor < MAX_FACTOR:
            self.factor *= 2.0
            self._changed_s = now_s
            self._log.warning(
                "a replica was slow and not stopped; silent ones are given up later",
                replica=replica.name,
                times=self.factor,
            )

    def tick(self, now_s: float) -> None:
        """Note the time."""
        if self.factor > 1.0 and now_s - self._changed_s >= CALM_S:
            self.factor /= 2.0
            self._changed_s = now_s

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget replicas that are not among these."""
        for known in (self._given_up_s, self._lately_s):
            for replica in known.keys() - set(replicas):
                del known[replica]

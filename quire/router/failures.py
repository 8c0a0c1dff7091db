"""Failures: which replicas failed with a request, and where it may still be tried.

A request that makes replicas fail does so at the same token on each, since every replica computes
the same, and ends the other requests of that replica too. So after two replicas failed with a
request no third one is tried. A stream with output, which its client cannot send again, continues
on one of the two once that was checked again; it ends after four failures without many tokens in
between. A request without output ends after two. Refusals, and connections that were never made, do
not count. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.router.faults import ReplicaFault
from quire.router.replica import Replica

MAX_REPLICAS = 2
MAX_IN_A_ROW = 2
MAX_OF_STREAM = 4
MAX_OF_ALL = 8
# Delivered since the last failure: what failed then was not caused by the token that came next.
PROGRESS_TOKENS = 32


class Failures:
    """reasons: of the failures in a row. at: replicas with any fault since the last progress."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.at: set[Replica] = set()
        self._suspected: set[Replica] = set()
        self._num_delivered = 0
        self._num_all = 0

    def note(self, replica: Replica, fault: ReplicaFault, num_delivered: int) -> None:
        """Note a fault after so many delivered tokens."""
        if num_delivered - self._num_delivered >= PROGRESS_TOKENS:
            self.reasons.clear()
            self.at.clear()
        self._num_delivered = num_delivered
        self.at.add(replica)
        if fault.is_suspect:
            self.reasons.append(f"{replica.name}: {fault}")
            self._suspected.add(replica)
            self._num_all += 1

    @property
    def are_final(self) -> bool:
        """Whether the request is tried no more."""
        limit = MAX_OF_STREAM if self._num_delivered else MAX_IN_A_ROW
        return len(self.reasons) >= limit or self._num_all >= MAX_OF_ALL

    @property
    def summary(self) -> str:
        """What failed, for the client."""
        return f"replicas failed with it {self._num_all} times ({'; '.join(self.reasons)})"

    def barred(self, replicas: Collection[Replica]) -> set[Replica]:
        """Return those of `replicas` that must not get the request: third ones."""
        if len(self._suspected) < MAX_REPLICAS:
            return set()
        return set(replicas) - self._suspected

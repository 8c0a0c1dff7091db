"""Failures: which replicas failed with a request, and where it may still be tried.

A request that makes replicas fail does so at the same token each time, since every replica computes
the same. So failures count together while no further tokens were delivered: after two replicas
failed at one place no third one is tried, and tokens beyond that place clear the request, because a
replica has passed it. A replica that is killed takes many requests along; for one of them that is
weak evidence (Replica.is_shared), and such a request goes on at one of the two once that was
checked again. So does a stream that has output, which its client cannot send again. Both end after
four failures at one place; a request without output ends after two that are evidence. Where a
replica was given up for its silence, with many requests open, it may only have been slow: that
counts half. The first stop of an API process does not count, a second one of the same replica does.
Refusals, and connections that were never made, do not count. A replica that answers with another
fingerprint than the stream has does not count, either, but gets it no more. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.router.faults import OtherFingerprint, ProcessStopped, ReplicaFault
from quire.router.replica import Replica

MAX_REPLICAS = 2
MAX_BLAMED = 2
MAX_IN_A_ROW = 4
MAX_OF_ALL = 16
# A replica that fails may have computed some tokens that were not delivered, so the next one gets a
# little further before it fails at the same place.
PROGRESS_TOKENS = 8


class Failures:
    """reasons: of the failures in a row. at: replicas with any fault since the last progress."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.at: set[Replica] = set()
        self._suspected: set[Replica] = set()
        self._stopped: set[Replica] = set()  # of which an API process has stopped with it
        self._unequal: set[Replica] = set()  # with another fingerprint
        self._num_blamed = 0
        self._in_a_row = 0.0
        self._num_delivered = 0
        self._num_all = 0

    def note(self, replica: Replica, fault: ReplicaFault, num_delivered: int) -> None:
        """Note a fault after so many delivered tokens. The first stop of an API process does not
        count: the replica has others."""
        if num_delivered - self._num_delivered >= PROGRESS_TOKENS:
            self.reasons.clear()
            self.at.clear()
            self._suspected.clear()
            self._stopped.clear()
            self._num_blamed = 0
            self._in_a_row = 0.0
        self._num_delivered = num_delivered
        is_stop = isinstance(fault, ProcessStopped)
        if is_stop and replica not in self._stopped:
            self._stopped.add(replica)
            return
        self.at.add(replica)
        if isinstance(fault, OtherFingerprint):
            self._unequal.add(replica)
        if fault.is_suspect or is_stop:
            self.reasons.append(f"{replica.name}: {fault}")
            self._suspected.add(replica)
            self._num_blamed += not fault.is_shared
            self._in_a_row += 0.5 if fault.is_silence and fault.is_shared else 1.0
            self._num_all += 1

    @property
    def are_final(self) -> bool:
        """Whether the request is tried no more."""
        if not self._num_delivered and self.blame_request:
            return True
        return self._in_a_row >= MAX_IN_A_ROW or self._num_all >= MAX_OF_ALL

    @property
    def blame_request(self) -> bool:
        """Whether the request is probably their cause, and would make further replicas fail."""
        return self._num_blamed >= MAX_BLAMED

    @property
    def are_at_two(self) -> bool:
        """Whether only the replicas that failed with the request may get it."""
        return len(self._suspected) >= MAX_REPLICAS

    @property
    def summary(self) -> str:
        """What failed, for the client."""
        return f"replicas failed with it {self._num_all} times ({'; '.join(self.reasons)})"

    def barred(self, replicas: Collection[Replica]) -> set[Replica]:
        """Return those of `replicas` that must not get the request: third ones, unequal ones."""
        third = set(replicas) - self._suspected if self.are_at_two else set[Replica]()
        return third | self._unequal

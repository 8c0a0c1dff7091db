"""Ranks as threads of one process: plain implementations of Communicator and RowLink, for tests.

Always holds: what a rank receives is its own copy.
"""

from __future__ import annotations

import queue
import threading

import numpy as np

from quire.base.errors import DeviceLost
from quire.comm.communicator import Bytes


class InProcessGroup:
    """The shared state of `degree` ranks. timeout_s: the longest wait for another rank."""

    def __init__(self, degree: int, *, timeout_s: float = 30.0) -> None:
        self.degree = degree
        self.barrier = threading.Barrier(degree, timeout=timeout_s)
        self.parts: list[Bytes] = [np.empty(0, np.uint8)] * degree
        self.message = b""

    def ranks(self) -> list[InProcessRank]:
        """Return a Communicator for each rank, in order."""
        return [InProcessRank(self, rank) for rank in range(self.degree)]


class InProcessRank:
    """A Communicator (see communicator.py)."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.degree = group.degree

    def all_gather(self, own: Bytes) -> Bytes:
        """See Communicator."""
        self._group.parts[self.rank] = own.copy()
        self.barrier()
        gathered = np.stack(self._group.parts)
        self.barrier()  # no next part is written before all ranks have read this one
        return gathered

    def barrier(self) -> None:
        """See Communicator."""
        try:
            self._group.barrier.wait()
        except threading.BrokenBarrierError:
            raise DeviceLost("another rank is gone, or did not come in time") from None

    def broadcast(self, message: bytes | None) -> bytes:
        """See Communicator."""
        if message is not None:
            self._group.message = message
        self.barrier()
        received = self._group.message
        self.barrier()
        return received

    def abort(self) -> None:
        """See Communicator."""
        self._group.barrier.abort()

    def close(self) -> None:
        """See Communicator."""


class InProcessLink:
    """A RowLink (see communicator.py). timeout_s: the longest wait for rows."""

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self._rows: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._timeout_s = timeout_s

    def send_rows(self, rows: Bytes) -> None:
        """See RowLink."""
        self._rows.put(rows.copy())

    def receive_rows(self, rows: Bytes) -> None:
        """See RowLink."""
        try:
            came = self._rows.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DeviceLost("the stage before sends nothing") from None
        if came.shape != rows.shape:
            raise ValueError(f"rows of shape {came.shape} have come; {rows.shape} are meant")
        rows[:] = came

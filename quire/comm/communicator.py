"""Communicator: what the ranks of one model need of a transport.

Bytes only: knows no program, no process and no dtype. Always holds: calls are collective (all
ranks make the same calls with equal sizes, in the same order), none changes a byte, and none waits
for ever for a rank that is gone: it raises DeviceLost.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Communicator(Protocol):
    """One rank's end. Calls come from one thread at a time, except abort."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def degree(self) -> int:
        """How many ranks there are."""

    def all_gather(self, own: Bytes) -> Bytes:
        """Return the bytes of all ranks [degree, bytes], in the order of ranks."""

    def barrier(self) -> None:
        """Wait until all ranks have come here."""

    def broadcast(self, message: bytes | None) -> bytes:
        """Return rank 0's message; the others give None and wait for it without limit."""

    def abort(self) -> None:
        """Let the waits of all ranks end with DeviceLost, now and later. From any thread."""

    def close(self) -> None:
        """Leave; further calls are errors."""


class RowLink(Protocol):
    """From one rank to another, in one direction: rows [R, bytes] of a step, in order."""

    def send_rows(self, rows: Bytes) -> None:
        """Hand on rows."""

    def receive_rows(self, rows: Bytes) -> None:
        """Fill rows with those that come next."""

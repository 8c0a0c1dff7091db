"""Loads of the experts of a pipeline's stages, as rank 0 reads them.

Each stage's executor counts how many rows have chosen each expert of its own mixtures. Rank 0 asks
one rank of each stage before its own, and a thread of that rank, a LoadServer, answers with its
counts, whatever the rank computes. Knows links and counts; no program and no process. Always holds:
a rank has one ask at a time; a rank that does not answer raises DeviceLost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from quire.base.errors import DeviceLost
from quire.comm.links import Link, LinkMemory, LinkSizes
from quire.comm.shared_memory import SharedMemoryRank

# Counts are sent as rows of one count each, so that any number of them goes through the slots.
_COUNTS = LinkSizes(slot_bytes=1 << 14, slots=4)
_COUNT_BYTES = 8
_ASKS = LinkSizes(slot_bytes=64, slots=4)
_READ, _END = b"read", b"end"

Loads = list[list[int]]


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """One end of the links between rank 0 and a rank of an earlier stage."""

    asks: Link
    counts: Link


def load_link_bytes(stages: int) -> int:
    """Return the bytes of the links of all stages before the last."""
    return (stages - 1) * (_COUNTS.total + _ASKS.total)


def load_ends(
    group: SharedMemoryRank, *, first_byte: int, leads: Sequence[int]
) -> dict[int, LoadEnd]:
    """Return this rank's ends by stage: at rank 0 those of all stages before the last, at a rank
    that answers that of its own. leads: the rank that answers, by stage."""
    memory = LinkMemory(
        group,
        first_byte=first_byte,
        rows=_COUNTS,
        messages=_ASKS,
        num_rows=len(leads),
        num_messages=len(leads),
    )
    asks = group.rank == 0
    return {
        stage: LoadEnd(
            memory.messages(stage, group, peer=lead if asks else 0, sends=asks),
            memory.rows(stage, group, peer=lead if asks else 0, sends=not asks),
        )
        for stage, lead in enumerate(leads)
        if asks or group.rank == lead
    }


class StageLoads:
    """What rank 0 reads. ends: by stage. experts: of each mixture, by stage; stages without
    mixtures are not asked."""

    def __init__(self, ends: Mapping[int, LoadEnd], experts: Sequence[Sequence[int]]) -> None:
        self._asked = [
            (ends[stage], tuple(widths)) for stage, widths in enumerate(experts) if widths
        ]
        self._number = 0
        self._lock = threading.Lock()

    def read(self) -> Loads:
        """Return the rows that chose each expert so far, for each mixture before the last stage.

        Raises DeviceLost.
        """
        loads: Loads = []
        with self._lock:
            self._number += 1
            for end, _ in self._asked:
                end.asks.send(_READ)
            for end, widths in self._asked:
                counts = np.empty((sum(widths), _COUNT_BYTES), np.uint8)
                end.counts.native.begin(self._number)
                end.counts.receive_rows(counts)
                edges = np.cumsum(widths)[:-1]
                loads += [part.tolist() for part in np.split(counts.view(np.int64)[:, 0], edges)]
        return loads

    def followed_by(self, own: Loads, lost: Callable[[str], DeviceLost]) -> Loads:
        """Return the counts of all stages; `own` are those of the last. lost: ends the group and
        returns the error to raise. Raises DeviceLost."""
        try:
            return self.read() + own
        except DeviceLost as error:
            raise lost(str(error)) from error

    def end(self) -> None:
        """Let the threads at the other ends end; nothing is asked any more."""
        with suppress(DeviceLost):  # they have ended then
            for end, _ in self._asked:
                end.asks.send(_END)


class LoadServer:
    """The thread of a rank that answers. read: returns its counts."""

    def __init__(self, group: SharedMemoryRank, end: LoadEnd, read: Callable[[], Loads]) -> None:
        self._group, self._end, self._read = group, end, read
        self._thread = threading.Thread(target=self._serve, name="quire-loads", daemon=True)

    def start(self) -> None:
        """Answer from now on; the group is connected."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread: rank 0 has ended it, or the group is over."""
        if self._thread.ident is not None:
            self._thread.join()

    def _serve(self) -> None:
        number = 0
        try:
            while self._end.asks.receive() != _END:
                number += 1
                counts = np.array([count for loads in self._read() for count in loads], np.int64)
                self._end.counts.native.begin(number)
                self._end.counts.send_rows(counts[:, None].view(np.uint8))
        except DeviceLost:
            self._group.abort()  # the other thread finds it too
        except BaseException as error:  # rank 0 must not wait for an answer
            self._group.abort(f"{type(error).__name__}: {error}")
            raise

"""ProcessBeats: which of the API processes of a server have stopped, as one of the others sees it.

A stopped process (SIGSTOP, a debugger, a frozen cgroup) keeps its connections and answers nothing,
while the others serve the same port. A thread of each writes the time into its slot of a shared
file ten times a second, and reads the other slots. It is not the thread that writes beats to
routers (admin/beats.py): a write to a file may wait for a disk, and those beats must not. Knows no
HTTP. Always holds: a process that was itself late a moment ago finds none to have stopped.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from quire.base.clock import Clock
from quire.routing.beat_gaps import BeatGaps

FILE = "beats"
BEAT_S = 0.1
# Time without a beat after which a process without a history of gaps counts as stopped.
MAX_SILENT_S = 2.0
# A process with a late beat of its own judges no other until several in a row were in time.
_LATE_S, _MIN_IN_TIME = 0.3, 3
# Number and time of the newest beat.
_SLOT = struct.Struct("=qd")


def forget_process(folder: Path, slot: int) -> None:
    """Clear the slot of a process that has ended: the others do not count it as stopped."""
    with suppress(FileNotFoundError), open(folder / FILE, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes(_SLOT.size), slot * _SLOT.size)


class ProcessBeats:
    """slot: of this process, less than num_slots. number: of this process, at least 1. stopped:
    numbers of processes that have stopped."""

    def __init__(self, folder: Path, *, slot: int, num_slots: int, number: int) -> None:
        self.stopped: tuple[int, ...] = ()
        self._slot, self._num_slots, self._number = slot, num_slots, number
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._others: dict[int, BeatGaps] = {}
        self._last_s = 0.0
        self._num_in_time = 0

    def start(self) -> None:
        """Write beats from now on, as long as this process lives."""
        threading.Thread(target=self._run, name="quire-process-beats", daemon=True).start()

    def beat(self, now_s: float) -> None:
        """Write a beat, and look for those of the others."""
        os.pwrite(self._file, _SLOT.pack(self._number, now_s), self._slot * _SLOT.size)
        is_late = now_s - self._last_s > _LATE_S
        self._num_in_time = 0 if is_late else self._num_in_time + 1
        self._last_s = now_s
        self._read()
        if self._num_in_time >= _MIN_IN_TIME:
            self.stopped = tuple(
                number
                for number, gaps in sorted(self._others.items())
                if now_s - gaps.last_s > gaps.limit_s(MAX_SILENT_S)
            )

    def _read(self) -> None:
        found = dict[int, BeatGaps]()
        raw = os.pread(self._file, self._num_slots * _SLOT.size, 0)
        for number, at_s in _SLOT.iter_unpack(raw[: len(raw) // _SLOT.size * _SLOT.size]):
            if number not in (0, self._number):
                gaps = found[number] = self._others.get(number) or BeatGaps()
                if at_s > gaps.last_s:
                    gaps.note(at_s)
        self._others = found

    def _run(self) -> None:
        clock = Clock()
        while True:
            with suppress(OSError):  # a full disk; the next beat may be written
                self.beat(clock.now_ms() / 1000.0)
            time.sleep(BEAT_S)

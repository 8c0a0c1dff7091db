"""StoppedClients: which client processes of an engine are stopped, by the states of the processes.

A stopped process (SIGSTOP) keeps its sockets and reads nothing. What an engine computes for it is
read late or never, since routers send its requests elsewhere, and waits on the socket without a
bound. A traced process counts as running: strace stops it for a moment at each system call, and
each look may find it so while it serves all its clients. Reads /proc: without that no process
counts as stopped. Always holds: a process counts as stopped once LOOKS_TO_STOP looks in a row found
it so, and no longer once LOOKS_TO_GO_ON in a row found it running, or gone: first it finds that its
clients have left, so that what they wanted is not computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Time between looks, each some microseconds, and how many have to agree.
LOOK_S, LOOKS_TO_STOP, LOOKS_TO_GO_ON = 0.1, 2, 5
_STOPPED = b"T"  # by a signal; "t" is a process that its tracer has stopped
_STAT_BYTES = 256


class StoppedClients:
    """now_s: the time. processes: the directory of their states."""

    def __init__(self, now_s: Callable[[], float], processes: Path = Path("/proc")) -> None:
        self._now_s = now_s
        self._processes = processes
        self._states: dict[int, int] = {}  # descriptors by client
        self._stopped: dict[int, bool] = {}
        self._num_looks: dict[int, int] = {}  # in a row that found it otherwise
        self._look_s = 0.0

    def add(self, client: int, process_id: int) -> None:
        """Look at the process of a client from now on."""
        self.remove(client)
        with suppress(OSError):  # it has ended, or there is no /proc
            path = self._processes / str(process_id) / "stat"
            self._states[client] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stopped[client], self._num_looks[client] = False, 0

    def remove(self, client: int) -> None:
        """Look at the process of a client no more."""
        state = self._states.pop(client, None)
        self._stopped.pop(client, None)
        self._num_looks.pop(client, None)
        if state is not None:
            os.close(state)

    def changes(self) -> list[tuple[int, bool]]:
        """Return the clients that have stopped or gone on since the last call, and whether they
        are stopped. To be called as often as is convenient."""
        now_s = self._now_s()
        if now_s < self._look_s:
            return []
        self._look_s = now_s + LOOK_S
        found = []
        for client, state in self._states.items():
            is_stopped, was_stopped = _is_stopped(state), self._stopped[client]
            num_looks = self._num_looks[client] + 1 if is_stopped != was_stopped else 0
            if num_looks == (LOOKS_TO_GO_ON if was_stopped else LOOKS_TO_STOP):
                self._stopped[client], num_looks = is_stopped, 0
                found.append((client, is_stopped))
            self._num_looks[client] = num_looks
        return found

    def close(self) -> None:
        """Look at no process any more."""
        for client in list(self._states):
            self.remove(client)


def _is_stopped(state: int) -> bool:
    """Return whether a process is stopped; an ended one is not."""
    try:
        stat = os.pread(state, _STAT_BYTES, 0)
    except OSError:
        return False
    # "pid (name) state ...": the name may have any characters.
    return stat.rpartition(b")")[2][1:2] == _STOPPED

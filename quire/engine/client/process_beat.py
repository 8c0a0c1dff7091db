"""ProcessBeat: the memory in which an engine process writes the time, read by its client.

While the engine has work, a native thread of the process writes it ten times a second, whatever its
interpreter does, so an old time means that the process is stopped (SIGSTOP, a debugger, a frozen
cgroup) or gone. It says nothing of progress. Reading takes no message and no Python of the engine,
so a reader that was late itself sees the newest time. Imports the standard library only.
"""

from __future__ import annotations

import mmap
import os

PERIOD_S = 0.1


class ProcessBeat:
    """Of one process. file: the descriptor that it inherits; closed by `started`."""

    def __init__(self) -> None:
        self.file = os.memfd_create("quire-beat", os.MFD_CLOEXEC)
        os.truncate(self.file, mmap.PAGESIZE)
        memory = mmap.mmap(self.file, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._times_ms = memoryview(memory).cast("q")  # an item is read by one load

    def started(self) -> None:
        """Close the descriptor: the process has its own."""
        os.close(self.file)

    @property
    def time_ms(self) -> int:
        """The newest time, by `Clock`; 0 while the engine has no work."""
        return self._times_ms[0]

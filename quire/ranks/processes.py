"""RankProcesses: the processes of ranks 1 and up, from their start to their end.

Each gets its start on its standard input, which then stays open: its end says that rank 0 is gone.
A pipe comes back, with what the rank says once its weights are loaded, or why it failed. A thread
per process waits for its end; one that was not asked for ends the group, so that no rank waits for
it, and calls `on_lost`. Knows no executor. Always holds: no process outlives `end`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.base.child_process import command_of, environment_of_ours
from quire.base.errors import SettingError, WorkerError
from quire.base.log import Log
from quire.comm.shared_memory import SharedMemoryRank
from quire.ranks.other_ranks import GROUP_LOST, names_reason
from quire.ranks.start import RankReady, RankStart, start_line

# How long a process may take to end by itself, and how long one that names a reason is waited for
# where an exchange has found one already.
_END_S, _REASON_S = 2.0, 0.2
# A rank that loads for so much longer than rank 0 is named in the log.
_LATE_S = 30.0
# A line names each tensor of a stage.
_MAX_LINE_BYTES = 64 << 20
_LOADING = " while it loaded: look at the system's log for a process ended for its memory"


@dataclass(slots=True)
class _RankProcess:
    """A process, the pipe it answers through, and what it has written there."""

    rank: int
    popen: subprocess.Popen[bytes]
    answers: int
    failure: str = ""
    watcher: threading.Thread | None = None


@dataclass(slots=True)
class RankProcesses:
    """Started by `start`; `on_lost` is called in a thread, once, when a process ends unasked."""

    group: SharedMemoryRank
    on_lost: Callable[[], None] = lambda: None
    _processes: list[_RankProcess] = field(default_factory=list)
    _is_ending: bool = False
    _first_end: str = ""
    _cause: str = ""  # of the loss, as the first process says that names one
    _has_cause: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # one watcher is the first

    def start(self, start: RankStart, segment: int) -> None:
        """Start one process; does not wait for it. Raises SettingError where it cannot start."""
        answers, child_end = os.pipe()
        try:
            popen = subprocess.Popen(
                [*command_of("quire.ranks.main"), str(segment), str(child_end)],
                stdin=subprocess.PIPE,
                bufsize=0,
                env=environment_of_ours(),
                pass_fds=[fd for fd in (segment, child_end, start.pool_file) if fd >= 0],
            )
        except OSError as error:
            os.close(answers)
            raise SettingError(f"rank {start.rank} cannot be started: {error}") from error
        finally:
            os.close(child_end)
        self._processes.append(_RankProcess(start.rank, popen, answers))
        assert popen.stdin is not None, "Popen was asked for a pipe"
        with contextlib.suppress(OSError):  # it has already exited; ready() says how
            _write_all(popen.stdin.fileno(), start_line(start))

    def ready(self) -> list[tuple[int, RankReady]]:
        """Wait until all ranks have loaded their weights, and watch them from now on.

        Returns what each says of itself. Raises WorkerError where one has ended instead.
        """
        found = []
        for process in self._processes:
            _note_late(process)
            line = _line_of(process.answers)
            answer = json.loads(line) if line.endswith(b"\n") else {}
            if "ready" not in answer:
                process.failure = answer.get("failure", "")
                process.popen.wait()
                where = "" if process.failure else _LOADING
                raise WorkerError(_end_text(process) + where)
            found.append((process.rank, RankReady(**answer["ready"])))
        for process in self._processes:
            process.watcher = threading.Thread(
                target=self._watch, args=(process,), name="quire-rank-watch", daemon=True
            )
            process.watcher.start()
        return found

    def notify(self, on_lost: Callable[[], None]) -> None:
        """See OtherRanks."""
        self.on_lost = on_lost

    def reason(self, found: str) -> str:
        """Return why the group is lost: as a process that has ended says, else what was found."""
        is_clear = names_reason(found) and found != self._first_end
        self._has_cause.wait(_REASON_S if is_clear else _END_S)
        return self._cause or (found if is_clear else self._first_end or found)

    @property
    def process_ids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return [process.popen.pid for process in self._processes]

    @property
    def lost(self) -> str:
        """Return why a process has ended that should not have; empty while all run."""
        return self._first_end

    def end(self) -> None:
        """End all processes: they are asked to stop, and killed where they do not."""
        self._is_ending = True
        for process in self._processes:
            if process.popen.stdin is not None:
                with contextlib.suppress(OSError):
                    process.popen.stdin.close()
        is_aborted = self.group.native.is_aborted
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(0.1 if is_aborted else _END_S)
            if process.popen.poll() is None:
                process.popen.kill()  # also ends a process that is suspended
                process.popen.wait()
            if process.watcher is not None:
                process.watcher.join()
            os.close(process.answers)
        self._processes.clear()

    def _watch(self, process: _RankProcess) -> None:
        process.popen.wait()
        if self._is_ending:
            return
        with contextlib.suppress(ValueError, OSError):
            process.failure = json.loads(_line_of(process.answers)).get("failure", "")
        text = _end_text(process)
        with self._lock:
            if process.failure or process.popen.returncode != GROUP_LOST:
                self._cause = self._cause or text
                self._has_cause.set()
            if self._first_end:
                return
            self._first_end = text
        try:
            self.group.abort()
        finally:
            self.on_lost()


def _end_text(process: _RankProcess) -> str:
    code, failure = process.popen.returncode, process.failure
    rank = f"rank {process.rank} (process {process.popen.pid})"
    if code == GROUP_LOST and failure:  # of another rank, or of its device
        return f"{failure}, as {rank} found"
    how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"{rank} {how}" + (f": {failure}" if failure else "")


def _note_late(process: _RankProcess) -> None:
    """Wait until a rank answers or ends, and say in the log that it is late."""
    answers = select.poll()
    answers.register(process.answers, select.POLLIN)
    waited_s = 0.0
    while not answers.poll(1000 * _LATE_S):
        waited_s += _LATE_S
        Log("engine").warning(
            "a rank has not loaded its weights yet",
            rank=process.rank,
            process=process.popen.pid,
            seconds_after_rank_0=round(waited_s),
        )


def _line_of(descriptor: int) -> bytes:
    """Read up to the end of a line, or to the end of the pipe."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        line += part
    return line


def _write_all(descriptor: int, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(descriptor, view) :]

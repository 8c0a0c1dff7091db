"""Watch a process that may fail, hang or break its device: always return a status, in time.

Knows no section. Always holds: nothing the process started outlives the call, unless the system
cannot end it, which is reported and not waited for. If the watching process gets SIGTERM, it ends
the watched one too, which has a session of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

LOOK_S = 1.0  # between reads of its reports
END_S = 15.0  # for the system to end it; a driver call may not be interruptible


def supervised(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: IO[str],
    max_s: float,
    look: Callable[[], None],
) -> str:
    """Return "ok", or how it failed. look: called regularly while it runs. For the main
    thread only.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    ends = time.monotonic() + max_s
    try:
        while (left := ends - time.monotonic()) > 0:
            try:
                return _status(process.wait(timeout=min(LOOK_S, left)))
            except subprocess.TimeoutExpired:
                look()
        return f"failed: not done after {max_s:.0f} s{_ended(process)}"
    finally:
        _end_group(process.pid)
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _status(code: int) -> str:
    if code >= 0:
        return "ok" if code == 0 else f"failed: exit code {code}"
    return f"failed: ended by {signal.Signals(-code).name}"


def _ended(process: subprocess.Popen[bytes]) -> str:
    """End it; return an error message if that fails."""
    _end_group(process.pid)
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        return ", and the system does not end it: what follows may find the device taken"
    return ""


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(leader, signal.SIGKILL)

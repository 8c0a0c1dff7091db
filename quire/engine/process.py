"""The engine process: `main` with `--endpoint FOLDER`.

Started by launch.py with the config as the first line of standard input. Ends when told so, when
it fails (exit code 1, after telling the client), and at once when its parent is gone: standard
input ends with the parent, whatever ended it. Signals for a clean end go to the parent, which
drains; this process ignores them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from quire.base.log import Log
from quire.engine.channel import EngineSide
from quire.engine.host import run_engine
from quire.engine.launch import config_from_json
from quire.engine.messages import FromEngine, Ready

_PARENT_GONE = 3


def main() -> int:
    """Run one engine; the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="The engine process of quire; started by it."
    )
    parser.add_argument("--endpoint", type=Path, required=True, help="folder of the sockets")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return _PARENT_GONE
    threading.Thread(
        target=_leave_with_parent,
        args=(arguments.endpoint,),
        name="quire-parent-watch",
        daemon=True,
    ).start()
    channel, log = EngineSide(arguments.endpoint), Log("engine")

    def emit(message: FromEngine) -> None:
        if isinstance(message, Ready):
            log.event("ready", model=message.card.name, fingerprint=message.card.fingerprint)
        channel.emit(message)

    try:
        done = run_engine(config_from_json(line.decode()), channel, emit, report=log.error)
    finally:
        channel.close()
    return 0 if done else 1


def _leave_with_parent(folder: Path) -> None:
    # The descriptor, not the buffered file: a thread that blocks in the latter holds its lock
    # while the interpreter shuts down.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # its owner can no longer do it
    os._exit(_PARENT_GONE)

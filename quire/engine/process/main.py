"""The engine process: `main` with `--endpoint FOLDER`.

Started by launch.py with the config as the first line of standard input; loads the model once there
is a second line, which a spare process waits for. Ends on Stop, on a failure (exit code 1, after
sending the reason and writing it to `--failure-fd`), and when its parent is gone: standard input
ends with the parent, whatever ended it, and is watched once the modules are imported. Signals for a
clean end go to the parent, which drains; this process ignores them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from quire.base.heap import freeze_heap
from quire.base.log import USUAL_LEVEL, Log
from quire.base.log_process import LogSettings, start_logging
from quire.engine.assembly.executor_choice import import_executor
from quire.engine.client.launch import MAX_FAILURE_BYTES, config_from_json
from quire.engine.process.channel import EngineSide, from_engine_wire
from quire.engine.process.engine_host import run_engine
from quire.engine.process.messages import Failed, FromEngine, Ready

PARENT_GONE = 3


def main() -> int:
    """Run one engine; the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="The engine process of quire; started by it."
    )
    parser.add_argument("--endpoint", type=Path, required=True, help="folder of the sockets")
    parser.add_argument("--starter", type=int, required=True, help="number of the process")
    parser.add_argument("--failure-fd", type=int, required=True, help="pipe for a failure's reason")
    parser.add_argument("--log-level", default=USUAL_LEVEL)
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    logging = LogSettings(level=arguments.log_level, form=arguments.log_format)
    start_logging("engine", logging)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    config = config_from_json(line.decode()) if line else None
    if config is not None:
        import_executor(config.executor)
        line = sys.stdin.buffer.readline()
    if config is None or not line:
        shutil.rmtree(arguments.endpoint, ignore_errors=True)
        return PARENT_GONE
    threading.Thread(
        target=_leave_with_parent,
        args=(arguments.endpoint,),
        name="quire-parent-watch",
        daemon=True,
    ).start()
    channel = EngineSide(arguments.endpoint, starter_id=arguments.starter)
    log = Log("engine")

    def emit(message: FromEngine) -> None:
        if isinstance(message, Ready):
            freeze_heap()  # later collections would hold up steps and signs of life
            log.event("ready", model=message.card.name, fingerprint=message.card.fingerprint)
        if isinstance(message, Failed):
            _report_failure(message, arguments.failure_fd)
        channel.emit(message)

    try:
        done = run_engine(config, channel, emit, report=log.error)
    finally:
        channel.close()
    return 0 if done else 1


def _report_failure(failed: Failed, failure_fd: int) -> None:
    """Write the reason where the parent finds it after this process has ended."""
    fault = failed.fault
    room = MAX_FAILURE_BYTES // 8  # a character takes at most 4 bytes; the frame has other fields
    if len(fault.message) > room:
        failed = replace(failed, fault=replace(fault, message=f"{fault.message[:room]} ..."))
    with suppress(OSError):  # the parent is gone
        os.write(failure_fd, from_engine_wire().encode(failed))


def _leave_with_parent(folder: Path) -> None:
    # The descriptor, not the buffered file: a thread that blocks in the latter holds its lock
    # while the interpreter shuts down.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # its owner can no longer do it
    os._exit(PARENT_GONE)

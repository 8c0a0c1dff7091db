"""Runs one engine from its config to its end, in whatever thread or process calls it.

`run_engine` is an edge: what goes wrong in it is sent to the client as Failed; its `emit` may be
called in several threads at once. EngineThread runs it in this process, with a queue for its
inbox. Knows no event loop and no sockets.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack

from quire.base.clock import Clock
from quire.base.errors import QuireError
from quire.base.log import Log
from quire.base.report import Report
from quire.config.groups import EngineConfig
from quire.engine.assembly.assemble import assemble
from quire.engine.core import Inbox, error_fields, serve
from quire.engine.process.heartbeat import Heartbeat
from quire.engine.process.messages import (
    PROTOCOL_VERSION,
    Beat,
    Failed,
    FromEngine,
    Hello,
    Loading,
    Ready,
    Stop,
    ToEngine,
    fault_of,
)

_END_S = 10.0


def run_engine(
    config: EngineConfig,
    inbox: Inbox,
    emit: Callable[[FromEngine], None],
    *,
    report: Report,
) -> bool:
    """Start, serve until Stop, end. Return False where it failed; the client has the reason."""
    clock, ending = Clock(), ExitStack()
    try:
        emit(Hello(protocol_version=PROTOCOL_VERSION, process_id=os.getpid()))
        engine = assemble(config, clock=clock, report=report, progress=_loading(emit))
        core = engine.core
        if core.grammars is not None:
            ending.callback(core.grammars.close)
        ending.callback(core.runner.close)
        heartbeat = Heartbeat(
            core.steps,
            ops_done=engine.ops_done,
            beat=lambda ops_done: emit(Beat(ops_done=ops_done)),
        )
        ending.callback(heartbeat.close)
        emit(Ready(card=engine.card, notes=engine.notes))
        serve(core, inbox, emit, clock.now_ms)
        return True
    except Exception as error:  # noqa: BLE001  the process edge: report to the client and end
        if not isinstance(error, QuireError):  # the client gets the message, the log the traceback
            report("the engine failed", **error_fields(error))
        emit(Failed(fault=fault_of(error)))
        return False
    finally:
        ending.close()


class EngineThread:
    """An engine in a thread of this process. `emit` and `on_end` are called in that thread."""

    def __init__(
        self,
        config: EngineConfig,
        emit: Callable[[FromEngine], None],
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._inbox = QueueInbox()

        def run() -> None:
            run_engine(config, self._inbox, emit, report=Log("engine").error)
            on_end()

        self._thread = threading.Thread(target=run, name="quire-engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine."""
        self._inbox.put(message)

    def end(self) -> None:
        """Ask the engine to stop and wait for it."""
        self._inbox.put(Stop())
        self._thread.join(_END_S)


class QueueInbox:
    """An Inbox that other threads put messages in."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()

    def put(self, message: ToEngine) -> None:
        """Queue a message."""
        self._queue.put(message)

    def wake(self) -> None:
        """End a wait now, or the next."""
        self._queue.put(None)

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """All that came; waits at most `wait_s` for the first (None: for ever)."""
        came: list[ToEngine | None] = []
        try:
            if wait_s != 0.0:
                came.append(self._queue.get(timeout=wait_s))
            while True:
                came.append(self._queue.get_nowait())
        except queue.Empty:
            return [message for message in came if message is not None]


def _loading(emit: Callable[[FromEngine], None]) -> Callable[[int, int], None]:
    """Progress of packing as messages, one a percent at most."""
    last_percent = -1

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_percent
        percent = done_bytes * 100 // max(total_bytes, 1)
        if percent != last_percent:
            last_percent = percent
            emit(Loading(done_bytes=done_bytes, total_bytes=total_bytes))

    return progress

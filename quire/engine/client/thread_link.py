"""An engine in a thread of this process: EngineThread, and ThreadLink for an event loop.

ThreadLink is the in-process counterpart of ProcessLink, with the same interface. Always holds: what
the engine sent before the loop was known is delivered first, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from quire.base.log import Log
from quire.config.groups import EngineConfig
from quire.engine.process.engine_host import run_engine
from quire.engine.process.messages import FromEngine, Stop, ToEngine

_END_S = 10.0


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
        self._report = Log("engine").error

        def run() -> None:
            run_engine(config, self._inbox, emit, report=self._report)
            on_end()

        self._thread = threading.Thread(target=run, name="quire-engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine."""
        self._inbox.put(message)

    def end(self) -> bool:
        """Ask the engine to stop and wait for it; False where it hangs and is left behind."""
        self._inbox.put(Stop())
        self._thread.join(_END_S)
        has_ended = not self._thread.is_alive()
        if not has_ended:
            self._report("the engine's thread is left behind: it has not ended", waited_s=_END_S)
        return has_ended


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
        """Return the received messages; wait at most `wait_s` for the first (None: no limit)."""
        came: list[ToEngine | None] = []
        try:
            if wait_s != 0.0:
                came.append(self._queue.get(timeout=wait_s))
            while True:
                came.append(self._queue.get_nowait())
        except queue.Empty:
            return [message for message in came if message is not None]


class ThreadLink:
    """Messages come as calls in the loop's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._lock = threading.Lock()
        self._early: list[FromEngine] = []  # what came before the loop was known
        self._deliver: Callable[[FromEngine], None] | None = None
        self._tell_end: Callable[[], None] | None = None
        self._ended = False
        self._closed = False
        self._thread = EngineThread(config, self._emit, on_end=self._end)

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Call `on_message` for each message, and once `on_end` when the thread has ended."""

        def call(function: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no listeners are left
                loop.call_soon_threadsafe(function, *arguments)

        with self._lock:
            for message in self._early:
                call(on_message, message)
            self._early.clear()
            self._deliver = lambda message: call(on_message, message)
            self._tell_end = lambda: call(on_end, "the engine thread ended")
            if self._ended:
                self._tell_end()

    def send(self, message: ToEngine) -> bool:
        """Queue a message to the engine; True: a thread is always there to take it."""
        self._thread.send(message)
        return True

    async def close(self) -> None:
        """Ask the engine to stop and wait for it."""
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._thread.end)

    def _emit(self, message: FromEngine) -> None:
        with self._lock:
            if self._deliver is None:
                self._early.append(message)
            else:
                self._deliver(message)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            if self._tell_end is not None and not self._closed:
                self._tell_end()

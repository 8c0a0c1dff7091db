"""WorkerThread: one thread that runs jobs in the order they came; Job: a call and its outcome.

What a job raises is kept and raised to whoever asks for its outcome, so the thread goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from quire.base.records import StepResult


class WorkerTask:
    """A call that will have an outcome: what it returned or what it raised."""

    def __init__(self, call: Callable[[], StepResult]) -> None:
        self._call = call
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Make the call and keep its outcome."""
        try:
            self._result = self._call()
        except Exception as error:  # noqa: BLE001  raised again, in the thread that asks
            self._error = error
        self._done.set()

    def outcome(self) -> StepResult:
        """Wait; then return or raise as the call did."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a finished job has a result or an error"
        return self._result


class WorkerThread:
    """Runs jobs one by one. Not a daemon's queue: close() lets what was put in finish."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[WorkerTask | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: WorkerTask) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queue, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()

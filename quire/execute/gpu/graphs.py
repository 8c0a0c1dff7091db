"""Captured steps: each size computed once as usual, then captured, then replayed.

A step is launched as the next larger size (step_sizes.py), so that few graphs serve all batches;
its rows beyond the real ones do nothing that is seen. Graphs are made when a size first comes and
share one pool of memory. Knows no program and no kernel: `capture` turns a function into something
to be replayed. Always holds: a size's function is run before it is captured, so that everything it
launches has been compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from quire.base.log import Log
from quire.execute.gpu.device import first_line, is_lost


class Capture(Protocol):
    """Records what a function launches, without doing it; the result does it."""

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]: ...


class Graphs:
    """Graphs by key, where the key says a size and what is in it. num_replayed: steps so far."""

    def __init__(self, capture: Capture) -> None:
        self.num_replayed = 0
        self._capture = capture
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._log = Log("executor")
        self.trouble = ""  # why no more are captured: there was no memory for another

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Do what `body` does: the first time by itself, later by replaying it, if there was memory
        to capture it."""
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            self.num_replayed += 1
            return
        body()
        if not self.trouble:
            try:
                self._replays[key] = self._capture(body)
            except RuntimeError as error:
                if is_lost(error):
                    raise
                # The step is computed; what was not captured is launched as usual.
                self.trouble = first_line(error)
                self._log.warning(
                    "steps of new sizes are launched kernel by kernel: capturing one failed",
                    size=str(key),
                    error=self.trouble,
                )

    def clear(self) -> None:
        """Forget all: addresses they hold are no longer true."""
        self._replays.clear()
        self.trouble = ""


def capture_of(device: torch.device) -> Capture | None:
    """Return how steps are captured on a device; None on the CPU, where there is nothing to be
    gained."""
    return None if device.type == "cpu" else CudaCapture(device)


class CudaCapture:
    """CUDA graphs in one memory pool, captured in a stream of the device that nothing else uses.

    Not by torch.cuda.graph, which first waits for the device and gives back all memory that is
    free, pinned too, and which leaves the capture's stream the current one where capturing fails.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # What another thread asks the device for meanwhile (blocks that come) is none of it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

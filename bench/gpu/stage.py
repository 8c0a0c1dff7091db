"""Stage: the device, time limit and report function of a section, and its timers.

On a GPU times are between events in the stream, the median of several runs, each after an uncounted
one, so that the device is busy while the host launches the timed work; the work itself flushes the
caches. In a dry run everything is tiny; in a rehearsal shapes are as on a GPU, but tensors have no
memory (absent.py); times of either mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu import absent
from quire.execute.gpu.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """ends: on the monotonic clock; a section checks it between its parts."""

    is_dry: bool
    ends: float
    report: Callable[[str, Any], None]
    is_rehearsal: bool = False

    @property
    def is_on_card(self) -> bool:
        """Return whether times are measured."""
        return not (self.is_dry or self.is_rehearsal)

    @property
    def device(self) -> torch.device:
        """Return the device."""
        if self.is_rehearsal:
            return absent.DEVICE
        return torch.device("cpu") if self.is_dry else torch.device("cuda", 0)

    @property
    def stream(self) -> Stream | None:
        """Return the device's stream if it is not the default one."""
        return absent.AbsentStream() if self.is_rehearsal else None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and activations."""
        return torch.bfloat16

    def has_time(self) -> bool:
        """Return whether another part may start."""
        return time.monotonic() < self.ends

    def seconds(self, work: Callable[[], object], *, times: int = 12) -> float:
        """Return the median time of `work` on the device, or of launching it if that takes
        longer.
        """
        if not self.is_on_card:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        for _ in range(2):
            work()
        taken = []
        for _ in range(times):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            work()
            first.record()
            work()
            last.record()
            last.synchronize()
            taken.append(first.elapsed_time(last) / 1e3)
            if not self.has_time():
                break
        return median(taken)

    def replayed_seconds(self, works: Sequence[Callable[[], object]]) -> float:
        """Return the median device time of one of `works`, all of them replayed in turn as one
        graph, so that launches take no host time.
        """

        def all_of_them() -> None:
            for work in works:
                work()

        if not self.is_on_card:
            return self.seconds(all_of_them) / len(works)
        all_of_them()  # compiles
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        return self.seconds(graph.replay) / len(works)

    def wall_seconds(self, work: Callable[[], object], *, times: int = 20) -> float:
        """Return the median time until `work` is done on the device, by the host's clock."""
        taken = []
        for _ in range(times + 2 if self.is_on_card else 1):
            self.settle()
            began = time.perf_counter()
            work()
            self.settle()
            taken.append(time.perf_counter() - began)
        return median(taken[2:] or taken)

    def settle(self) -> None:
        """Wait for the device."""
        if self.is_on_card:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory that PyTorch keeps for later tensors back to the device."""
        if self.is_on_card:
            torch.cuda.empty_cache()

    def number(self, found: torch.Tensor) -> float:
        """Return a computed number; 0 in a rehearsal."""
        return 0.0 if self.is_rehearsal else float(found)

    def values(self, found: Any) -> np.ndarray:
        """Return a float32 copy of computed values; ones in a rehearsal."""
        if self.is_rehearsal:
            return np.ones(tuple(found.shape), np.float32)
        copied: np.ndarray = torch.as_tensor(found).float().cpu().numpy().copy()
        return copied

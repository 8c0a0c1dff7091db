"""Stage: the device, time limit and report of a section, and a way to take times.

On a GPU times are of events in the stream, the median of several runs, each after one that is not
counted, so that the device has work while the host launches what is timed; caches are flushed by
what the work itself reads. In a dry run everything is tiny; in a rehearsal it is as on a GPU, but
tensors have no memory (absent.py); times of either mean nothing.
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
    """ends: on the monotonic clock; a section looks at it between its parts."""

    is_dry: bool
    ends: float
    tell: Callable[[str, Any], None]
    is_rehearsal: bool = False

    @property
    def is_on_card(self) -> bool:
        """Is anything measured?"""
        return not (self.is_dry or self.is_rehearsal)

    @property
    def device(self) -> torch.device:
        """Where things are measured."""
        if self.is_rehearsal:
            return absent.DEVICE
        return torch.device("cpu") if self.is_dry else torch.device("cuda", 0)

    @property
    def stream(self) -> Stream | None:
        """The device's order of work where it is not the usual one."""
        return absent.AbsentStream() if self.is_rehearsal else None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16

    def has_time(self) -> bool:
        """May another part begin?"""
        return time.monotonic() < self.ends

    def seconds(self, work: Callable[[], object], *, times: int = 12) -> float:
        """The median time of `work` on the device, or of launching it where that takes longer."""
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
        """The median time that one of `works` takes on the device, all of them in turn as one
        graph: launching takes the host no time that is seen."""

        def all_of_them() -> None:
            for work in works:
                work()

        if not self.is_on_card:
            return self.seconds(all_of_them) / len(works)
        all_of_them()  # compiles what must be
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        return self.seconds(graph.replay) / len(works)

    def wall_seconds(self, work: Callable[[], object], *, times: int = 20) -> float:
        """The median time until `work` is done on the device, as the host's clock has it."""
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

    def number(self, found: torch.Tensor) -> float:
        """One that was computed; 0 in a rehearsal."""
        return 0.0 if self.is_rehearsal else float(found)

    def values(self, found: Any) -> np.ndarray:
        """A copy of what was computed, in float32; ones in a rehearsal."""
        if self.is_rehearsal:
            return np.ones(tuple(found.shape), np.float32)
        copied: np.ndarray = torch.as_tensor(found).float().cpu().numpy().copy()
        return copied

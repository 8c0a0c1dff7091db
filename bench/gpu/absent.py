"""An absent GPU: tensors without memory, a stream in which nothing is executed.

With it, sections of the check run in their real shapes on any machine within seconds, and their
launches are recorded (launches.py). Values copied to the host are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.execute.gpu.stream import CpuStream, Mark, Stream

DEVICE = torch.device("meta")


class AbsentStream:
    """A Stream (quire/execute/gpu/stream.py) of DEVICE."""

    is_beside = True

    def here(self) -> AbstractContextManager[object]:
        """See Stream."""
        return nullcontext()

    def do(self, call: Callable[[], None]) -> None:
        """See Stream: launches are recorded."""
        call()

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """See Stream."""
        return torch.from_numpy(values).to(DEVICE)

    def to_host(self, values: Tensor) -> Tensor:
        """See Stream."""
        return torch.zeros(values.shape, dtype=values.dtype)

    def pinned(self, values: Tensor) -> Tensor:
        """See Stream."""
        return values

    def host_memory(self, num_bytes: int) -> Tensor:
        """See Stream."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """See Stream."""
        return lambda: None

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See Stream."""

    def mark(self, *, sleeps: bool = False) -> Mark:
        """See Stream."""
        return CpuStream().mark()

    def beside(self) -> Stream:
        """See Stream."""
        return self

    def behind(self, mark: Mark) -> None:
        """See Stream."""


def captured(body: Callable[[], None]) -> Callable[[], None]:
    """As graphs.Capture: a replay only repeats recorded launches."""
    return lambda: None

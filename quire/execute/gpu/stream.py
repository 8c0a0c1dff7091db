"""Stream: what a device is told to do, in order, beside the host; and copies that nobody waits for.

On the CPU everything is done when it is said. On a GPU calls launch and return, and copies go
through pinned memory, which PyTorch keeps until the device has read or written it; whoever needs
what has come to the host waits for a mark behind it. Knows no step. Always holds: what is said
later is done later; only a mark is ever waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Mark(Protocol):
    """A place in the order."""

    def wait(self) -> None:
        """Until all that was said before it is done."""


class Stream(Protocol):
    """A device's order of work. is_beside: whether it goes on while the host does something else,
    so that host and device each need memory of their own."""

    is_beside: bool

    def do(self, call: Callable[[], None]) -> None:
        """Tell the device to do what `call` launches."""

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """A copy there."""

    def to_host(self, values: Tensor) -> Tensor:
        """A copy here, to be read behind a mark."""

    def pinned(self, values: Tensor) -> Tensor:
        """The same in memory that a device reads by itself."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Between host memory that is pinned and the device's."""

    def mark(self) -> Mark:
        """A place behind all that was said."""


def stream_of(device: torch.device) -> Stream:
    """Of a device."""
    return CpuStream() if device.type == "cpu" else GpuStream(device)


class CpuStream:
    """Everything is done when it is said."""

    is_beside = False

    def do(self, call: Callable[[], None]) -> None:
        """See Stream."""
        call()

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """See Stream."""
        return torch.from_numpy(values.copy())

    def to_host(self, values: Tensor) -> Tensor:
        """See Stream."""
        return values.clone()

    def pinned(self, values: Tensor) -> Tensor:
        """See Stream."""
        return values

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See Stream."""
        target.copy_(source)

    def mark(self) -> Mark:
        """See Stream."""
        return _DONE


class GpuStream:
    """PyTorch's current stream of a device, the one that all its threads have by default."""

    is_beside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def do(self, call: Callable[[], None]) -> None:
        """See Stream."""
        call()

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """See Stream."""
        if not values.size:
            return torch.from_numpy(values.copy()).to(self._device)
        pinned = torch.from_numpy(values.copy()).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def to_host(self, values: Tensor) -> Tensor:
        """See Stream."""
        target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return target.copy_(values, non_blocking=True)

    def pinned(self, values: Tensor) -> Tensor:
        """See Stream."""
        return values.pin_memory()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See Stream."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See Stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _Event(event)


class _Done:
    def wait(self) -> None:
        """Nothing is left to be done."""


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Until the device has come there."""
        self._event.synchronize()


_DONE = _Done()

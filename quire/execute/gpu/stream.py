"""Stream: work queued on a device in order, beside the host; and asynchronous copies.

On the CPU calls compute at once. On a GPU calls queue work and return, and copies go through pinned
memory, which PyTorch keeps until the device has read or written it; a reader of what was copied to
the host waits for a mark behind the copy. A device has further streams for copies that steps do not
wait for; streams are ordered against each other only by marks. Knows no step. Always holds: work of
one stream is done in the order it was queued; the host waits only for marks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Wait until all work queued before it is done."""


class Stream(Protocol):
    """A device's order of work. is_beside: whether it goes on while the host does something else,
    so that host and device each need memory of their own."""

    is_beside: bool

    def here(self) -> AbstractContextManager[object]:
        """While it is open, what this thread launches goes into this order, on this device."""

    def do(self, call: Callable[[], None]) -> None:
        """Queue what `call` launches."""

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """Return a copy there."""

    def to_host(self, values: Tensor) -> Tensor:
        """Return a copy here, to be read behind a mark."""

    def pinned(self, values: Tensor) -> Tensor:
        """Return the same in memory that a device reads by itself."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return pinned host memory, uint8, uninitialized. Raises RuntimeError."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory of the caller, until what is returned is called. Raises RuntimeError."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy between pinned host memory and device memory."""

    def mark(self, *, sleeps: bool = False) -> Mark:
        """Return a mark behind all queued work. sleeps: waiting for it yields the processor and
        ends a little later."""

    def beside(self) -> Stream:
        """Return another, empty stream of the same device."""

    def behind(self, mark: Mark) -> None:
        """Run later calls after `mark`, which may be of any stream of the device."""


def stream_of(device: torch.device) -> Stream:
    """Of a device."""
    return CpuStream() if device.type == "cpu" else GpuStream(device)


class CpuStream:
    """Everything is done when it is said."""

    is_beside = False

    def here(self) -> AbstractContextManager[object]:
        """See Stream."""
        return nullcontext()

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

    def host_memory(self, num_bytes: int) -> Tensor:
        """See Stream."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """See Stream: no device reads it."""
        return _nothing

    def mark(self, *, sleeps: bool = False) -> Mark:
        """See Stream."""
        return _DONE

    def beside(self) -> Stream:
        """See Stream."""
        return self

    def behind(self, mark: Mark) -> None:
        """See Stream: it is done already."""


class GpuStream:
    """PyTorch's current stream of a device, the one that all its threads have by default; or one of
    its own, beside that. A kernel goes to the device that is current in its thread, wherever its
    tensors lie, and in a new thread that is the first: so whatever is launched is launched `here`.
    """

    is_beside = True

    def __init__(self, device: torch.device, own: torch.cuda.Stream | None = None) -> None:
        self._device, self._own = device, own

    def here(self) -> AbstractContextManager[object]:
        """See Stream."""
        if self._own is None:
            return torch.cuda.device(self._device)
        return torch.cuda.stream(self._own)  # and its device

    def do(self, call: Callable[[], None]) -> None:
        """See Stream."""
        with self.here():
            call()

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """See Stream."""
        if not values.size:
            return torch.from_numpy(values.copy()).to(self._device)
        pinned = torch.from_numpy(values.copy()).pin_memory()
        with self.here():
            return pinned.to(self._device, non_blocking=True)

    def to_host(self, values: Tensor) -> Tensor:
        """See Stream."""
        target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self.copy(values, target)
        return target

    def pinned(self, values: Tensor) -> Tensor:
        """See Stream."""
        return values.pin_memory()

    def host_memory(self, num_bytes: int) -> Tensor:
        """See Stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """See Stream. PyTorch's own allocator could not pin memory that other processes map."""
        runtime: Any = torch.cuda.cudart()
        with self.here():
            found = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(found):
            raise RuntimeError(f"CUDA error: {runtime.cudaGetErrorString(found)}")

        def unpin() -> None:
            with self.here():
                runtime.cudaHostUnregister(memory.data_ptr())

        return unpin

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See Stream."""
        with self.here():
            target.copy_(source, non_blocking=True)

    def mark(self, *, sleeps: bool = False) -> Mark:
        """See Stream."""
        event = torch.cuda.Event(blocking=sleeps)
        event.record(self._now())
        return _Event(event)

    def beside(self) -> Stream:
        """See Stream."""
        return GpuStream(self._device, torch.cuda.Stream(self._device))

    def behind(self, mark: Mark) -> None:
        """See Stream."""
        assert isinstance(mark, _Event), "marks of one device only"
        self._now().wait_event(mark.event)

    def _now(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._own is None else self._own


class _Done:
    def wait(self) -> None:
        """Nothing is left to be done."""


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """Until the device has come there."""
        self.event.synchronize()


_DONE = _Done()


def _nothing() -> None:
    """Do nothing."""

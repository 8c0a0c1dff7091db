"""A fake GPU made of PyTorch tensors without memory: shapes and types on their own device.

Nothing is computed. What a real GPU would reject or synchronize on is an error here: an operand in
host memory, a kernel launched while another device is current, a value read by the host; and during
graph capture any copy and any allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from quire.execute.gpu.load import Loaded
from quire.execute.gpu.stream import Mark, Stream

CARD = torch.device("meta")
NUMPY_TYPES = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.uint8: np.uint8,
}
TORCH_TYPES = {np.dtype(theirs): ours for ours, theirs in NUMPY_TYPES.items()}
MAX_GRID = 65_535  # limit of the second and third grid axis


class Card:
    """launched: kernel names so far; allocated: PyTorch operations that allocate during capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        self.allocated: list[str] = []
        self.is_capturing = False
        self._is_current = False
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        card = self

        def launch(self: GridExecutor, *arguments: Any, **named: Any) -> None:
            card._launch(self.fn.__name__, self.grid, [*arguments, *named.values()])

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def open(self) -> AbstractContextManager[object]:
        """Observe PyTorch operations while open."""
        return _Watch(self)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return a Capture with empty replays."""
        self.is_capturing = True
        try:
            body()
        finally:
            self.is_capturing = False
        return lambda: None

    def weights(self, loaded: Loaded) -> Loaded:
        """Move weights to this device."""
        few = {name: _moved(weight) for name, weight in loaded.few.items()}
        return Loaded({name: there(held) for name, held in loaded.plain.items()}, few)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current device of launched kernels."""
        before, self._is_current = self._is_current, True
        yield
        self._is_current = before

    def _launch(self, name: str, grid: Any, arguments: list[Any]) -> None:
        assert self._is_current, f"{name} is launched while another device is current"
        for place, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                assert value.device == CARD, f"{name}: operand {place} is on {value.device}"
        assert all(size <= MAX_GRID for size in grid[1:]), f"{name}: {grid} programs"
        self.launched.append(name)


def there(held: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor on the device."""
    return torch.empty(tuple(held.shape), dtype=held.dtype, device=CARD)


def _moved(weight: Any) -> Any:
    parts = {name: getattr(weight, name) for name in weight.__slots__}
    tensors = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return replace(weight, **{name: there(part) for name, part in tensors.items()})


class _Watch(TorchDispatchMode):
    """Check PyTorch operations during capture: only views, and products into existing buffers, are
    allowed.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        allocates = not func.is_view and "out" not in given and not str(func).startswith("prim.")
        if self._card.is_capturing and allocates:
            self._card.allocated.append(str(func))
        return func(*args, **given)


class HostMemory:
    """Pinned host memory: an array where PyTorch would have a tensor."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values

    def __getitem__(self, key: Any) -> HostMemory:
        return HostMemory(self._values[key])

    def __len__(self) -> int:
        return len(self._values)

    def numpy(self) -> NDArray[Any]:
        return self._values

    def numel(self) -> int:
        return self._values.size

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_TYPES[self._values.dtype]


class CardStream:
    """A stream of the device: copies are checked but not made."""

    is_beside = True

    def __init__(self, card: Card) -> None:
        self._card = card

    def here(self) -> AbstractContextManager[object]:
        return self._card.current()

    def do(self, call: Callable[[], None]) -> None:
        with self.here():
            call()

    def to_device(self, values: NDArray[Any]) -> torch.Tensor:
        assert not self._card.is_capturing
        return torch.empty(values.shape, dtype=TORCH_TYPES[values.dtype], device=CARD)

    def to_host(self, values: torch.Tensor) -> Any:
        assert values.device == CARD
        return HostMemory(np.zeros(tuple(values.shape), NUMPY_TYPES[values.dtype]))

    def pinned(self, values: torch.Tensor) -> Any:
        return HostMemory(np.zeros(tuple(values.shape), NUMPY_TYPES[values.dtype]))

    def host_memory(self, num_bytes: int) -> Any:
        return HostMemory(np.zeros(num_bytes, np.uint8))

    def pin(self, memory: Any) -> Callable[[], None]:
        return lambda: None

    def copy(self, source: Any, target: Any) -> None:
        assert not self._card.is_capturing
        assert (source.numel(), source.dtype) == (target.numel(), target.dtype)

    def mark(self, *, sleeps: bool = False) -> Mark:
        return _Past()

    def beside(self) -> Stream:
        return CardStream(self._card)

    def behind(self, mark: Mark) -> None: ...


class _Past:
    def wait(self) -> None: ...

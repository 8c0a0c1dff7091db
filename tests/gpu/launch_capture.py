"""LaunchCapture: a CUDA graph capture emulated in Triton's interpreter.

It stores launches with their arguments at capture time (scalars by value, tensors by address). A
replay repeats these launches and runs no other Python code. So a stale host scalar, or work outside
kernels, fails here as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

LAUNCH = GridExecutor.__call__


class LaunchCapture:
    """Count captures and replays, and store the launches of the last capture."""

    def __init__(self) -> None:
        self.captured = self.replayed = self.launches = 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        kept: list[tuple[GridExecutor, tuple[Any, ...], dict[str, Any]]] = []

        def keep(kernel: GridExecutor, *arguments: Any, **named: Any) -> None:
            kept.append((kernel, arguments, named))

        with mock.patch.object(GridExecutor, "__call__", keep), _OnlyViews():
            body()
        self.captured += 1
        self.launches = len(kept)

        def replay() -> None:
            self.replayed += 1
            for kernel, arguments, named in kept:
                LAUNCH(kernel, *arguments, **named)

        return replay


class RankCapture:
    """As LaunchCapture, of a rank: stores its exchanges too, and copies by PyTorch between them.

    exchange: calls `kept`, while it is not None, in place of an exchange.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self.exchanges: list[int] = []  # of each capture

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        kept: list[Callable[[], object]] = []
        exchanges: list[Callable[[], object]] = []

        def keep_launch(kernel: GridExecutor, *arguments: Any, **named: Any) -> None:
            kept.append(lambda: LAUNCH(kernel, *arguments, **named))

        def keep_exchange(call: Callable[[], None]) -> None:
            kept.append(call)
            exchanges.append(call)

        self._exchange.kept = keep_exchange
        try:
            with mock.patch.object(GridExecutor, "__call__", keep_launch), _Copies(kept):
                body()
        finally:
            self._exchange.kept = None
        self.exchanges.append(len(exchanges))

        def replay() -> None:
            for call in kept:
                call()

        return replay


class _Copies(TorchDispatchMode):
    """Store copies; reject what else PyTorch computes."""

    def __init__(self, kept: list[Callable[[], object]]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        assert func is torch.ops.aten.copy_.default, f"{func} is computed during capture"
        self._kept.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class _OnlyViews(TorchDispatchMode):
    """Reject computation by PyTorch, which a capture on CPU tensors would not record."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.is_view, f"{func} is computed by PyTorch during capture"
        return func(*args, **(kwargs or {}))

"""LaunchCapture: a capture as a GPU makes it, in Triton's interpreter.

Kept are the launches with the arguments they had then (numbers as they were, tensors as places in
memory); a replay is these launches, and nothing of the function that made them runs again. So what
is a number of the host's, and what is computed beside kernels, is found as it would be on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

LAUNCH = GridExecutor.__call__


class LaunchCapture:
    """Counts what is captured and replayed, and the launches of the last capture."""

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


class _OnlyViews(TorchDispatchMode):
    """Nothing is computed by PyTorch: on CPU tensors that would not be kept."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.is_view, f"{func} is computed while a step is captured"
        return func(*args, **(kwargs or {}))

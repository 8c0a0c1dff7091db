"""Record which kernels are launched in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.interpreter import GridExecutor


@contextmanager
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the names of launched kernels while open."""
    names: list[str] = []
    launch = GridExecutor.__call__

    def counting(self: GridExecutor, *arguments: Any, **named: Any) -> Any:
        names.append(self.fn.__name__)
        return launch(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(GridExecutor, "__call__", counting)
        yield names

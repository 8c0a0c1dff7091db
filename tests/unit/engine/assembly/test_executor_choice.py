"""The import of an executor before there is a model: early, and no reason to end."""

from __future__ import annotations

import pytest

from quire.config.executor_config import ExecutorConfig
from quire.engine.assembly import executor_choice
from quire.engine.assembly.executor_choice import import_executor


@pytest.mark.parametrize("error", [ImportError, OSError, MemoryError, RuntimeError])
def test_an_early_import_that_fails_is_left_to_the_start(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(name: str) -> None:
        asked.append(name)
        raise error

    monkeypatch.setattr(executor_choice, "import_module", fail)
    import_executor(ExecutorConfig())
    assert asked == ["quire.execute.native"]

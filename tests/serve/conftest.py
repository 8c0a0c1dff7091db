"""The model and the server that most tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.running_server import RunningServer
from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose context is long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_llama(folder, seed=5, max_position_embeddings=32768)


@pytest.fixture(scope="session")
def shared_server(tiny: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny, "--max-num-seqs", "8", "--threads", "1") as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """The shared server, with nothing left open by another test."""
    shared_server.until(lambda: shared_server.metric("quire_running_requests") == 0, "idle")
    return shared_server

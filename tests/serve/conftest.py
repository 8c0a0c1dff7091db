"""The model and server shared by most tests of this directory, and an undisturbed stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.healthy_stream import HealthyStream
from tests.serve.running_server import RunningServer
from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a context long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_llama(folder, seed=5, max_position_embeddings=32768)


@pytest.fixture(scope="session")
def shared_server(tiny: Path) -> Iterator[RunningServer]:
    # Slow readers are not disconnected here, however slow the machine is.
    flags = ("--max-num-seqs", "8", "--threads", "1", "--stall-seconds", "600", "--record-content")
    flags += ("--convert", "embed", "--matryoshka-dimensions", "any")
    with RunningServer(tiny, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def healthy_stream(shared_server: RunningServer) -> Iterator[HealthyStream]:
    stream = HealthyStream(shared_server)
    yield stream
    stream.finish()


@pytest.fixture
def server(shared_server: RunningServer, healthy_stream: HealthyStream) -> RunningServer:
    """Return the shared server, and check that no request is left open by another test."""
    healthy_stream.finish()
    shared_server.until(lambda: shared_server.get("/health")[1]["pending"] == 0, "idle")
    return shared_server


@pytest.fixture
def beside_a_healthy_stream(
    shared_server: RunningServer, healthy_stream: HealthyStream
) -> Iterator[RunningServer]:
    """Yield the server while a stream is in progress that must not be disturbed.

    Consecutive tests share a stream; it must proceed, unchanged, after each of them.
    """
    shared_server.until(lambda: shared_server.get("/health")[1]["pending"] <= 1, "others end")
    with healthy_stream.beside():
        yield shared_server
    assert shared_server.get("/health")[1]["state"] == "ready"

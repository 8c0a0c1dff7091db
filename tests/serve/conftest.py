"""The model and server shared by most tests of this directory, and an undisturbed stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import RunningServer, text_of
from tests.tiny_models import write_tiny_llama

COMPLETIONS = "/v1/completions"
HEALTHY = {
    "prompt": "the sea and the stone",
    "seed": 4,
    "max_tokens": 100,
    "ignore_eos": True,
    "logprobs": 1,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a context long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_llama(folder, seed=5, max_position_embeddings=32768)


@pytest.fixture(scope="session")
def shared_server(tiny: Path) -> Iterator[RunningServer]:
    # Slow readers are not disconnected here, however slow the machine is.
    flags = ("--max-num-seqs", "8", "--threads", "1", "--stall-seconds", "600", "--record-content")
    with RunningServer(tiny, *flags) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """Return the shared server, and check that no request is left open by another test."""
    shared_server.until(lambda: shared_server.metric("quire_running_requests") == 0, "idle")
    return shared_server


@pytest.fixture(scope="session")
def healthy_alone(shared_server: RunningServer) -> Any:
    """Return the output of the healthy request when nothing else runs."""
    _, body = shared_server.post(COMPLETIONS, HEALTHY)
    return body["choices"][0]


@pytest.fixture
def beside_a_healthy_stream(server: RunningServer, healthy_alone: Any) -> Iterator[RunningServer]:
    """Yield the server while a stream is in progress that must not be disturbed."""
    with server.stream(COMPLETIONS, HEALTHY) as reader:
        events = [reader.next()]
        yield server
        events += list(reader)
    assert events[-1] == "[DONE]"
    assert text_of(events) == healthy_alone["text"]
    logprobs = [
        value
        for event in events[:-1]
        for value in event["choices"][0]["logprobs"]["token_logprobs"]
    ]
    assert logprobs == healthy_alone["logprobs"]["token_logprobs"]
    assert server.get("/health")[1]["state"] == "ready"

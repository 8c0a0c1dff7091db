"""Live servers shared by the client tests, with network access restricted to loopback.

The libraries are in their own environment (`make clients`); if one is not installed, its file is
skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from tests.clients.offline import VARIABLES, Wall
from tests.clients.scripts import BOX_TEMPLATE
from tests.serve.running_server import RunningServer

BOX = Path(quire.__file__).parent / "models" / "box"

os.environ.update(VARIABLES)  # before any client is imported


@pytest.fixture(autouse=True)
def wall() -> Iterator[None]:
    """Fail a test with connection attempts elsewhere, however its client handled the refusal."""
    with Wall() as wall:
        yield
    assert wall.refused == []


@pytest.fixture(scope="session")
def box_server() -> Iterator[RunningServer]:
    with RunningServer(BOX, "--max-num-seqs", "8", "--threads", "1") as server:
        yield server


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The built-in model with a template that lists tools."""
    template = tmp_path_factory.mktemp("templates") / "hermes.jinja"
    template.write_text(BOX_TEMPLATE)
    with RunningServer(BOX, "--threads", "1", "--chat-template", str(template)) as server:
        yield server


@pytest.fixture
def box(box_server: RunningServer) -> str:
    """Return the base URL of the built-in model."""
    return f"{box_server.url}/v1"


@pytest.fixture
def tools(tool_server: RunningServer) -> str:
    """Return the base URL of the server with tools."""
    return f"{tool_server.url}/v1"

"""Clients from npm against live servers: each script in js/ prints what it received.

`make clients` installs the packages; without them, or Node.js, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import BOX
from tests.clients.scripts import TEMPLATE, call, pieces
from tests.serve.running_server import RunningServer
from tests.serve.scripted_server import ScriptedServer

SCRIPTS = Path(__file__).parent / "js"
# Where `make clients` installs packages: scripts find them beside their own place only.
FOLDER = Path(sys.prefix) / "js"
GIVE_UP_S = 120.0
# The wall around Python's sockets does not hold Node; the scripts have no address but the server's.
QUIET = {"NO_UPDATE_NOTIFIER": "1", "NEXT_TELEMETRY_DISABLED": "1", "AI_SDK_LOG_WARNINGS": "false"}

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").is_dir(),
    reason="needs Node.js and the packages of js/package.json (make clients)",
)


def received(script: str, url: str, model: str, **environment: str) -> Any:
    """Return what a script printed."""
    shutil.copy(SCRIPTS / script, FOLDER)
    done = subprocess.run(
        ["node", script],
        cwd=FOLDER,
        env={**os.environ, **QUIET, "URL": url, "MODEL": model, **environment},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("batches") / "batches.sqlite"
    with RunningServer(BOX, "--threads", "1", "--batch-store", str(store)) as server:
        yield server


def test_openais_client(box_server: RunningServer) -> None:
    found = received("openai.mjs", box_server.url, "box")
    assert found["whole"] == found["streamed"] == found["response"] != ""
    assert found["types"][:2] == ["response.created", "response.in_progress"]
    assert found["items"] == ["message", "message"]
    assert found["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}


def test_anthropics_client(batch_server: RunningServer) -> None:
    found = received("anthropic.mjs", batch_server.url, "box")
    assert found["whole"] == found["streamed"] == found["one"] != ""
    assert found["two"] == "errored"
    assert (found["counts"]["succeeded"], found["counts"]["errored"]) == (1, 1)
    first, second = found["first"], found["second"]
    assert first["cache_creation_input_tokens"] > 0
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert found["error"] == {"name": "BadRequestError", "status": 400}


def test_the_ai_sdk_with_both_providers(box_server: RunningServer) -> None:
    found = received("ai.mjs", box_server.url, "box")
    for provider in ("openai", "anthropic"):
        assert found[provider]["whole"] == found[provider]["streamed"] != ""
    assert found["openai"] == found["anthropic"]


def test_the_ai_sdk_runs_tools() -> None:
    scripts = [pieces(call("weather", city="Oslo")), ["Cold."]] * 2
    with ScriptedServer(TEMPLATE, scripts) as server:
        found = received("ai.mjs", server.url, "fake", TOOLS="1")
    for provider in ("openai", "anthropic"):
        assert found[provider] == {"cities": ["Oslo"], "text": "Cold.", "steps": 2}


def test_langchains_client(box_server: RunningServer) -> None:
    found = received("langchain.mjs", box_server.url, "box")
    assert found["whole"] == found["streamed"] != ""
    with ScriptedServer(TEMPLATE, [pieces(call("weather", city="Oslo"))]) as server:
        found = received("langchain.mjs", server.url, "fake", TOOLS="1")
    assert found["calls"] == [["weather", {"city": "Oslo"}]]

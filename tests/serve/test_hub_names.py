"""Models by name, as a user runs them: pull from a fake hub, then complete and serve by name."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub
from tests.gguf_convert import write_gguf_of
from tests.serve import preloaded
from tests.serve.running_server import RunningServer
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.command import Terminal, quire_main

COMPLETE = ("-p", "Once", "--max-tokens", "8", "--temperature", "0", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repositories' files: a directory, and GGUF files beside it."""
    root = tmp_path_factory.mktemp("repositories")
    write_tiny_llama(root / "tiny", seed=5, shards=2)
    (root / "ggufs").mkdir()
    for kind in ("F32", "F16"):
        write_gguf_of(root / "tiny", root / "ggufs" / f"tiny-{kind}.gguf", kind=kind)
    return root


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with FakeHub() as server:
        server.add("acme/tiny", folder / "tiny")
        server.add("acme/tiny-GGUF", folder / "ggufs")
        yield server


def quire(hub: FakeHub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user of the hub, without a terminal."""
    return preloaded.run(*words, **hub.environment(home))


def ids(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Return the tokens of `quire complete --json`."""
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)["token_ids"]
    return found


def served_name(server: RunningServer) -> str:
    """Return the name of the model as the API lists it."""
    return str(server.get("/v1/models")[1]["data"][0]["id"])


def test_a_pulled_model_is_completed_and_served_by_name(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    done = quire(hub, tmp_path, "pull", "acme/tiny")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_dir()
    assert "%" not in done.stderr  # no progress bar without a terminal
    hub.requests.clear()
    by_path = quire_main("complete", str(folder / "tiny"), *COMPLETE)
    assert ids(quire(hub, tmp_path, "complete", "acme/tiny", *COMPLETE)) == ids(by_path)
    text = json.loads(by_path.stdout)["text"]
    with RunningServer("acme/tiny", environment=hub.environment(tmp_path)) as server:
        assert served_name(server) == "acme/tiny"
        fields = {"model": "acme/tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0}
        status, answer = server.post("/v1/completions", fields)
        assert status == 200
        assert answer["choices"][0]["text"] == text
    assert hub.requests == []  # running a model never asks the hub


def test_one_gguf_file_is_completed_by_name_and_quantization(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    listed = quire(hub, tmp_path, "pull", "acme/tiny-GGUF")
    assert listed.returncode == 2
    assert "acme/tiny-GGUF:tiny-F32.gguf" in listed.stderr
    assert quire(hub, tmp_path, "pull", "acme/tiny-GGUF:F32").returncode == 0
    by_path = ids(quire_main("complete", str(folder / "tiny"), *COMPLETE))
    for name in ("acme/tiny-GGUF:tiny-F32.gguf", "acme/tiny-GGUF:F32", "acme/tiny-GGUF"):
        assert ids(quire(hub, tmp_path, "complete", name, *COMPLETE)) == by_path
    assert hub.fetched() == ["tiny-F32.gguf"]


def test_without_a_terminal_a_missing_model_is_an_error_at_once(
    hub: FakeHub, tmp_path: Path
) -> None:
    for words in (("serve", "--port", "0"), ("complete", "-p", "x"), ("chat",)):
        done = quire(hub, tmp_path, *words, "acme/tiny")
        assert done.returncode == 2
        assert "download it with: quire pull acme/tiny, or add --pull" in done.stderr
    assert hub.requests == []


def test_a_flag_downloads_the_model_of_a_server(hub: FakeHub, tmp_path: Path) -> None:
    environment_of_hub = hub.environment(tmp_path)
    with RunningServer("acme/tiny", "--pull", environment=environment_of_hub) as server:
        assert served_name(server) == "acme/tiny"
    hub.requests.clear()
    assert ids(quire(hub, tmp_path, "complete", "--pull", "acme/tiny", *COMPLETE))
    assert hub.requests == []


def test_environment_variables_of_the_hub_are_honoured(hub: FakeHub, tmp_path: Path) -> None:
    own = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN": "hf_mine"}
    env = {**hub.environment(tmp_path / "home"), **own}
    done = preloaded.run("pull", "acme/tiny", **env)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "cache")
    assert hub.tokens == {"Bearer hf_mine"}
    hub.requests.clear()
    env["HF_HUB_OFFLINE"] = "1"
    done = preloaded.run("pull", "acme/tiny", **env)
    assert done.returncode == 2
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert hub.requests == []


def test_a_terminal_is_asked_before_anything_is_downloaded(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment(tmp_path).items():
        monkeypatch.setitem(os.environ, name, value)
    words = ("complete", "acme/tiny", "-p", "x", "--max-tokens", "2")
    with Terminal(words) as terminal:
        terminal.read_until("Download it now? [y/N]")
        terminal.type("\n")
        terminal.read_until("quire pull acme/tiny")
        assert terminal.end() == 2
    assert hub.requests == []
    with Terminal(words) as terminal:
        terminal.read_until("Download it now? [y/N]")
        terminal.type("y\n")
        terminal.read_until(" % of ")
        terminal.read_until("received")
        assert terminal.end() == 0

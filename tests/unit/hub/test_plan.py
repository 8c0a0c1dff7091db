"""`quire plan ORG/NAME` looks in the local cache, then asks the hub for what describes a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from quire.base.gguf_file import GgufFile
from quire.hub import outline
from quire.hub.cache import find, repo_dir, snapshot_of
from quire.hub.names import required_name
from tests.fake_hub import FakeHub
from tests.fp8_checkpoints import write_fp8_of
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.command import quire_main
from tests.unit.hub.test_cache import cached


def test_a_name_is_looked_up_in_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    cached("some/tiny", write_tiny_llama(tmp_path / "m"))
    done = quire_main("plan", "some/tiny", "--device", "h100")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("some/tiny on NVIDIA H100")
    assert hub.requests == []
    missing = quire_main("plan", "some/other", "--device", "h100")
    assert missing.returncode == 2
    assert "there is no model some/other" in missing.stderr


def planned(name: str) -> dict[str, Any]:
    """Return the sizes of a plan."""
    done = quire_main("plan", name, "--device", "h100", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["single", "sharded", "fp8"])
def test_a_model_on_the_hub_is_planned_without_its_weights(
    hub: FakeHub, tiny: Path, sharded: Path, tmp_path: Path, kind: str
) -> None:
    folder = {"single": tiny, "sharded": sharded, "fp8": tmp_path / "fp8"}[kind]
    if kind == "fp8":
        write_fp8_of(tiny, folder, kind="channel")
    hub.add("acme/tiny", folder)
    by_path = planned(str(folder))
    found = planned("acme/tiny")
    assert found | {"model": by_path["model"]} == by_path
    assert found["model"] == "acme/tiny"
    whole = [file for file in hub.fetched() if file.endswith(".safetensors")]
    assert whole == (["model.safetensors"] if kind == "fp8" else [])
    assert all(kept for kind, path, kept in hub.requests if path.endswith(".safetensors"))
    assert find(required_name("acme/tiny")) is None


def test_a_planned_model_is_planned_again_without_a_connection(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", tiny)
    first = planned("acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    done = quire_main("plan", "acme/tiny", "--device", "h100", "--json")
    assert json.loads(done.stdout) == first
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert "Planned from" in done.stderr
    assert hub.requests == []


def test_a_planned_model_is_listed_as_planned_until_it_is_pulled(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    hub.add("acme/other", tiny)
    planned("acme/tiny")
    planned("acme/other")
    assert snapshot_of(required_name("acme/tiny")) is None, "no ref that other programs follow"
    assert "download it with: quire pull acme/tiny" in quire_main("serve", "acme/tiny").stderr
    listed = quire_main("models").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["acme/other", "acme/tiny"]
    assert all("planned, without weights; quire pull acme/" in line for line in listed)
    assert quire_main("pull", "acme/tiny").returncode == 0
    entries = json.loads(quire_main("models", "--json").stdout)["entries"]
    assert [(one["name"], one["planned"]) for one in entries] == [
        ("acme/other", True),
        ("acme/tiny", False),
    ]
    assert quire_main("models", "rm", "acme/other", "--yes").returncode == 0
    assert not repo_dir("acme/other").exists()
    assert "planned" not in quire_main("models").stdout


def test_a_plan_leaves_a_complete_revision_as_it_is(hub: FakeHub, tiny: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    (snapshot / "model.safetensors").unlink()
    hub.add("acme/tiny", tiny)
    planned("acme/tiny")
    assert snapshot_of(required_name("acme/tiny")) == snapshot


@pytest.mark.parametrize("first_bytes", [64, 8 << 20])
def test_a_gguf_file_on_the_hub_is_planned_from_its_header(
    hub: FakeHub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_bytes: int
) -> None:
    monkeypatch.setattr(outline, "_GGUF_HEADER_BYTES", first_bytes)
    path = write_gguf_of(tiny, tmp_path / "tiny-F32.gguf")
    hub.add("acme/tiny-GGUF", {path.name: path.read_bytes(), "other-Q8_0.gguf": b"x"})
    by_path = planned(str(path))
    found = planned("acme/tiny-GGUF:F32")
    assert found | {"model": by_path["model"]} == by_path
    asked = [re.findall(r"\d+", kept) for _, file, kept in hub.requests if kept]
    starts, ends = [int(one[0]) for one in asked], [int(one[1]) + 1 for one in asked]
    assert starts == [0, *ends[:-1]]  # no byte twice
    header = GgufFile(path).header_bytes
    assert ends[-1] < 2 * header if first_bytes == 64 else ends == [path.stat().st_size]
    assert "no GGUF file Q2_K" in quire_main("plan", "acme/tiny-GGUF:Q2_K").stderr


def test_a_corrupt_gguf_file_on_the_hub_names_the_file(hub: FakeHub) -> None:
    hub.add("acme/tiny-GGUF", {"a.gguf": b"GGUF" + bytes(10_000)})
    done = quire_main("plan", "acme/tiny-GGUF")
    assert done.returncode == 2
    assert "acme/tiny-GGUF:a.gguf: " in done.stderr

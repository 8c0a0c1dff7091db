"""Names of models, and how they are found in a cache that may be partial, damaged or hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quire.base.errors import ConfigError, ModelError, SettingError
from quire.config.flags import engine_config
from quire.engine.library.llm import LLM
from quire.hub.cache import cache_dir, find, local_model, repo_dir, required_local, with_local_model
from quire.hub.names import HubName, hub_name, parsed_name, required_name
from tests.cases import each_case
from tests.fake_hub import FakeHub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(repo: str, folder: Path, *, ref: str = "main", commit: str = COMMIT) -> Path:
    """Put a directory's files into the cache as other programs do; return the snapshot."""
    home = repo_dir(repo)
    snapshot = home / "snapshots" / commit
    for place in (snapshot, home / "blobs", (home / "refs" / ref).parent):
        place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        blob = home / "blobs" / f"{commit[:4]}{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (home / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName(repo="Qwen/Qwen3-0.6B")),
        ("a/b@refs/pr/1", HubName(repo="a/b", revision="refs/pr/1")),
        ("a/b:c/d-Q4_0.gguf", HubName(repo="a/b", file="c/d-Q4_0.gguf")),
        ("a/b@v1:Q4_0", HubName(repo="a/b", revision="v1", file="Q4_0")),
    ],
)
def test_names_are_parsed_and_printed_alike(text: str, name: HubName) -> None:
    assert parsed_name(text) == name
    assert str(name) == text


@each_case(
    "text",
    [
        "", "gpt2", "/a/b", "./a", "../a", "~/a", "a/b/c", "a/b@", "a/b:", "a/b:../c", "a/b@../c",
        "a/b@x/../..", "a/..", "-a/b", "a--b/c", "a/b\n", "a/b:/etc/passwd", "a/b:c\0", "a b/c",
        "a/b:\x1b[2J.gguf", "a/b:\udcff.gguf",
        "https://huggingface.co/a/b", "a/" + "b" * 100,
    ],
)  # fmt: skip
def test_paths_and_other_texts_are_no_names(text: str) -> None:
    assert parsed_name(text) is None
    with pytest.raises(SettingError, match="write ORG/NAME"):
        required_name(text)


def test_an_existing_path_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("acme/tiny") is not None
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert hub_name("acme/tiny") is None
    assert local_model("acme/tiny") == Path("acme/tiny")


def test_two_revisions_are_refused() -> None:
    with pytest.raises(SettingError, match="names revision v1, and --revision v2"):
        required_name("a/b@v1", "v2")
    with pytest.raises(SettingError, match="a branch, a tag or a commit"):
        required_name("a/b", "../x")


def test_a_model_is_found_by_name_and_called_by_it(hub: FakeHub, tiny: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    assert find(HubName(repo="acme/tiny")) == snapshot
    config = with_local_model(engine_config({"model": "acme/tiny"}))
    assert config.model.model == str(snapshot)
    assert config.model.served_model_name == ("acme/tiny",)
    named = with_local_model(engine_config({"model": "acme/tiny", "served_model_name": "x"}))
    assert named.model.served_model_name == ("x",)
    drafting = with_local_model(engine_config({"draft_model": "acme/tiny", "speculate": "draft"}))
    assert drafting.speculation.draft_model == str(snapshot)
    with LLM("acme/tiny") as llm:
        assert llm.card.name == "acme/tiny"
    assert hub.requests == []  # nothing is asked of the hub


def test_a_model_that_is_not_there_names_the_command(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match=r"download it with: quire pull acme/x@v1:Q4_0$"):
        LLM("acme/x@v1:Q4_0")
    assert hub.requests == []


def test_a_partial_model_names_its_missing_files(hub: FakeHub, sharded: Path) -> None:
    snapshot = cached("acme/tiny", sharded)
    (snapshot / "model-00002-of-00003.safetensors").resolve().unlink()
    (snapshot / "config.json").unlink()
    (snapshot / "tokenizer.json").resolve().unlink()  # a link without its blob
    with pytest.raises(ConfigError):
        required_local(HubName(repo="acme/tiny"))
    (snapshot / "config.json").symlink_to(f"../../blobs/{COMMIT[:4]}config.json")
    told = r"not complete .*: model-00002-of-00003.safetensors, tokenizer.json missing; complete it"
    with pytest.raises(ConfigError, match=told):
        required_local(HubName(repo="acme/tiny"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_links_that_leave_the_cache_are_refused(hub: FakeHub, tiny: Path, file: str) -> None:
    snapshot = cached("acme/tiny", tiny)
    (snapshot / file).unlink()
    (snapshot / file).symlink_to(tiny / file)
    with pytest.raises(ConfigError, match="outside the Hugging Face cache"):
        find(HubName(repo="acme/tiny"))


def test_loops_directories_and_pipes_are_refused(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    name, file = HubName(repo="acme/tiny"), snapshot / "merges.txt"
    file.symlink_to(file.name)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        find(name)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="not a regular file"):
        find(name)
    file.unlink()
    (snapshot / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="outside the Hugging Face cache"):
        find(name)


@pytest.mark.parametrize("content", ["../../../etc", "main", "", "x" * 1000, "\xff"])
def test_a_damaged_ref_is_refused(hub: FakeHub, tiny: Path, content: str) -> None:
    snapshot = cached("acme/tiny", tiny)
    (snapshot.parents[1] / "refs" / "main").write_text(content)
    with pytest.raises(ConfigError, match="delete it"):
        find(HubName(repo="acme/tiny"))


def test_an_index_that_names_other_directories_is_refused(hub: FakeHub, sharded: Path) -> None:
    snapshot = cached("acme/tiny", sharded)
    index = (snapshot / "model.safetensors.index.json").resolve()
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ConfigError, match="a plain name ending in"):
        find(HubName(repo="acme/tiny"))


def test_a_cache_on_another_disk_may_be_linked(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    cached("acme/tiny", tiny)
    home = repo_dir("acme/tiny")
    home.rename(tmp_path / "elsewhere")
    home.symlink_to(tmp_path / "elsewhere")
    assert find(HubName(repo="acme/tiny")) == home / "snapshots" / COMMIT


def test_a_blob_in_the_store_that_repositories_share_is_inside(hub: FakeHub, tiny: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    blob = (snapshot / "model.safetensors").resolve()
    shared = cache_dir() / "blobs" / "ab" / "abcd"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to("../../blobs/ab/abcd")
    assert find(HubName(repo="acme/tiny")) == snapshot


def test_several_gguf_files_in_the_cache_are_listed(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "ggufs"
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        (folder / f"a-{kind}.gguf").write_bytes(b"x")
    snapshot = cached("acme/a", folder)
    with pytest.raises(ModelError, match=r"acme/a:a-Q4_0\.gguf"):
        find(HubName(repo="acme/a"))
    assert find(HubName(repo="acme/a", file="Q8_0")) == snapshot / "a-Q8_0.gguf"
    assert find(HubName(repo="acme/a", file="Q6_K")) is None

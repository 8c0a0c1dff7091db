"""quire models: what is listed, why a model cannot be loaded, and what removal frees and keeps."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.hub.blob_lock import blob_lock
from quire.hub.cache import cache_dir, repo_dir
from quire.hub.inventory import entries, models, packs, tiers
from quire.hub.removal import freed_bytes, remove, selected
from quire.transfer.folder import TierFolder, segment_path
from quire.weights.pack_cache import MAGIC
from tests.fake_hub import FakeHub
from tests.gguf_convert import write_gguf_of
from tests.unit.cli.command import quire_main
from tests.unit.hub.test_cache import COMMIT, cached

OTHER = "f" * 40


def test_models_are_listed_with_architecture_and_size(
    hub: FakeHub, tiny: Path, tmp_path: Path
) -> None:
    cached("acme/tiny", tiny)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    cached("acme/mamba", broken)
    ggufs = tmp_path / "ggufs"
    ggufs.mkdir()
    size = write_gguf_of(tiny, ggufs / "tiny-F32.gguf").stat().st_size
    cached("acme/ggufs", ggufs)
    found = {entry.name: entry for entry in models()}
    assert list(found) == ["acme/ggufs:tiny-F32.gguf", "acme/mamba", "acme/tiny"]
    assert found["acme/tiny"].architecture == "LlamaForCausalLM"
    assert found["acme/tiny"].num_bytes == sum(file.stat().st_size for file in tiny.iterdir())
    assert found["acme/ggufs:tiny-F32.gguf"].architecture == "LlamaForCausalLM"
    assert found["acme/ggufs:tiny-F32.gguf"].num_bytes == size
    assert "MambaForCausalLM" in found["acme/mamba"].problem
    told = quire_main("models").stdout
    assert "acme/mamba" in told
    assert "cannot be loaded: " in told
    listed = json.loads(quire_main("models", "--json").stdout)["entries"]
    assert [entry["name"] for entry in listed] == list(found)
    assert [entry["problem"] is None for entry in listed] == [True, False, True]


def test_a_partial_model_is_listed_with_what_is_missing(hub: FakeHub, tiny: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    (snapshot / "model.safetensors").unlink()
    [entry] = models()
    assert entry.problem == "not complete: model.safetensors missing; quire pull acme/tiny"


def test_a_revision_keeps_the_blobs_of_another(hub: FakeHub, tiny: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    other = repo_dir("acme/tiny") / "snapshots" / OTHER
    other.mkdir()
    for file in snapshot.iterdir():
        (other / file.name).symlink_to(os.readlink(file))
    own = repo_dir("acme/tiny") / "blobs" / "own"
    own.write_bytes(b"x" * 1000)
    (other / "added_tokens.json").symlink_to("../../blobs/own")
    (repo_dir("acme/tiny") / "refs" / "v1").write_text(OTHER)
    found = entries([], [])
    assert [entry.name for entry in found] == ["acme/tiny", "acme/tiny@v1"]
    chosen = selected(found, ["acme/tiny@v1"])
    assert freed_bytes(chosen) == 1000
    remove(chosen)
    assert not other.exists()
    assert not own.exists()
    assert [path.name for path in (repo_dir("acme/tiny") / "refs").iterdir()] == ["main"]
    assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == {
        file.name: file.read_bytes() for file in tiny.iterdir()
    }
    remove(selected(entries([], []), ["acme/tiny"]))
    assert not repo_dir("acme/tiny").exists()


def test_one_gguf_file_of_several_is_removed(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "ggufs"
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        (folder / f"a-{kind}.gguf").write_bytes(kind.encode() * 100)
    snapshot = cached("acme/a", folder)
    chosen = selected(models(), ["acme/a:a-Q4_0.gguf"])
    assert freed_bytes(chosen) == 400
    remove(chosen)
    assert [file.name for file in snapshot.iterdir()] == ["a-Q8_0.gguf"]
    assert len(list((repo_dir("acme/a") / "blobs").iterdir())) == 1
    assert len(selected(models(), ["acme/a"])) == 1  # the repository's name selects all of it


def gguf_repository(tmp_path: Path, *more: str) -> Path:
    """Put two GGUF models with the files of their repository into the cache."""
    folder = tmp_path / "ggufs"
    folder.mkdir()
    beside = ("mmproj-a-F16.gguf", "config.json", "README.md")
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", *beside, *more):
        (folder / name).write_bytes(name.encode())
    return cached("acme/a", folder)


def test_what_gguf_models_share_is_removed_with_the_last(hub: FakeHub, tmp_path: Path) -> None:
    snapshot = gguf_repository(tmp_path)
    assert [entry.name for entry in models()] == ["acme/a:a-Q4_0.gguf", "acme/a:a-Q8_0.gguf"]
    remove(selected(models(), ["acme/a:a-Q4_0.gguf"]))
    assert sorted(file.name for file in snapshot.iterdir()) == [
        "README.md", "a-Q8_0.gguf", "config.json", "mmproj-a-F16.gguf",
    ]  # fmt: skip
    left = sum(file.stat().st_size for file in snapshot.iterdir())
    last = selected(models(), ["acme/a:a-Q8_0.gguf"])
    assert freed_bytes(last) == left
    remove(last)
    assert not repo_dir("acme/a").exists()


def test_a_directory_beside_gguf_files_stays_without_them(hub: FakeHub, tmp_path: Path) -> None:
    snapshot = gguf_repository(tmp_path, "model.safetensors")
    remove(selected(models(), ["acme/a:a-Q4_0.gguf", "acme/a:a-Q8_0.gguf"]))
    assert len(list(snapshot.iterdir())) == 4
    remove(models())
    assert not repo_dir("acme/a").exists()


def test_what_is_downloaded_meanwhile_stays(hub: FakeHub, tiny: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    blobs = snapshot.parents[1] / "blobs"
    partial, stale = blobs / "abcd.incomplete", blobs / "ef01.incomplete"
    for file in (partial, stale):
        file.write_bytes(b"x")
    config = (snapshot / "config.json").resolve()
    with blob_lock(partial), blob_lock(config):
        remove(models())
        assert sorted(blobs.iterdir()) == sorted([config, partial])
        assert not snapshot.exists()


def test_directories_that_killed_downloads_left_are_removed(hub: FakeHub, tiny: Path) -> None:
    blobs = cached("acme/tiny", tiny).parents[1] / "blobs"
    for name in ("abcd.incomplete.d", "tmp1234.incomplete"):  # the second as older versions did
        (blobs / name / ".cache").mkdir(parents=True)
        (blobs / name / "model.safetensors").write_bytes(b"x")
    with blob_lock(blobs / "abcd"):
        remove(models())
        assert [path.name for path in blobs.iterdir()] == ["abcd.incomplete.d"]


def test_a_blob_shared_by_repositories_is_removed_with_the_last(
    hub: FakeHub, tmp_path: Path
) -> None:
    shared = cache_dir() / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    shared.write_bytes(b"x" * 500)
    for repo in ("acme/a", "acme/b"):
        folder = repo_dir(repo)
        (folder / "blobs").mkdir(parents=True)
        (folder / "snapshots" / COMMIT).mkdir(parents=True)
        (folder / "blobs" / "one").symlink_to(f"../../blobs/ab/{shared.name}")
        (folder / "snapshots" / COMMIT / "a.gguf").symlink_to("../../blobs/one")
    remove(selected(models(), ["acme/a"]))
    assert shared.exists()
    remove(models())
    assert not shared.exists()


def test_packs_and_tiers_are_listed_and_removed(hub: FakeHub, tmp_path: Path) -> None:
    pack_dir, tier_dir = tmp_path / "packs", tmp_path / "tier"
    pack_dir.mkdir()
    pack = pack_dir / "tiny-0123.packed"
    pack.write_bytes(MAGIC + bytes(92))
    (pack_dir / "other.packed").write_bytes(b"something else")
    tier = TierFolder(tier_dir)
    segment_path(tier_dir, 0).write_bytes(bytes(1000))
    assert [(entry.name, entry.num_bytes) for entry in packs(pack_dir)] == [(str(pack), 100)]
    [entry] = tiers(tier_dir)
    assert entry.num_bytes > 1000
    flags = ("--pack-cache", str(pack_dir), "--kv-tier-path", str(tier_dir))
    words = ("models", *flags, "rm", str(pack), str(tier_dir), "--yes")
    done = quire_main(*words)
    assert done.returncode == 2
    assert "is in use by another engine" in done.stderr
    assert pack.exists()  # nothing is removed where one thing cannot be
    tier.close()
    assert quire_main(*words).returncode == 0
    assert not pack.exists()
    assert list(tier_dir.iterdir()) == []
    assert (pack_dir / "other.packed").exists()


def test_a_directory_with_foreign_files_is_no_tier(hub: FakeHub, tmp_path: Path) -> None:
    TierFolder(tmp_path / "tier").close()
    (tmp_path / "tier" / "thesis.txt").write_text("x")
    assert tiers(tmp_path / "tier") == []


def test_removal_is_shown_and_needs_a_yes(hub: FakeHub, tiny: Path) -> None:
    cached("acme/tiny", tiny)
    done = quire_main("models", "rm", "acme/tiny")
    assert (done.returncode, "acme/tiny" in done.stdout) == (2, True)
    assert "add --yes where no terminal can be asked" in done.stderr
    assert len(models()) == 1
    done = quire_main("models", "rm", "acme/tiny", "--yes")
    assert "freed" in done.stdout
    assert models() == []
    assert "no models in the Hugging Face cache" in quire_main("models").stdout


def test_a_snapshot_that_is_a_link_is_not_listed_and_its_files_stay(
    hub: FakeHub, tiny: Path, tmp_path: Path
) -> None:
    snapshots = cached("acme/tiny", tiny).parent
    (snapshots / OTHER).symlink_to(tiny)
    (snapshots / COMMIT / "more").symlink_to(tiny)
    assert [entry.path for entry in models()] == [snapshots / COMMIT]
    before = sorted(tiny.iterdir())
    remove(models())
    assert sorted(tiny.iterdir()) == before


def test_a_file_behind_a_linked_directory_is_not_removed(
    hub: FakeHub, tiny: Path, tmp_path: Path
) -> None:
    [entry] = [cached("acme/tiny", tiny)] and models()
    (entry.path / "sub").symlink_to(tiny)
    outside = replace(entry, files=(*entry.files, entry.path / "sub" / "config.json"))
    with pytest.raises(SettingError, match="outside the Hugging Face cache"):
        remove([outside])
    assert (tiny / "config.json").exists()
    assert (entry.path / "config.json").exists()


def test_copied_files_count_as_freed(hub: FakeHub, tiny: Path) -> None:
    snapshot = cached("acme/tiny", tiny)
    for link in [path for path in snapshot.iterdir() if path.is_symlink()]:
        content = link.read_bytes()
        link.unlink()
        link.write_bytes(content)
    assert freed_bytes(models()) == sum(path.stat().st_size for path in snapshot.iterdir())


def test_an_unknown_name_lists_what_there_is(hub: FakeHub, tiny: Path) -> None:
    cached("acme/tiny", tiny)
    read = re.escape(f"cache {cache_dir()}, and HF_HOME names another place; packed")
    with pytest.raises(SettingError, match=f"quire models lists: acme/tiny.*{read}"):
        selected(models(), ["acme/tin"])

"""Remove models, packed weights and KV tiers that quire.hub.inventory lists.

A file of a model is removed from its snapshot; its blob only if no other snapshot of the repository
links to it and no download has locked it. A KV tier in use, which its engine has locked, is not
removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.user_path import user_path
from quire.hub.blob_lock import Timeout, blob_lock
from quire.hub.cache import PLANNED, cache_dir
from quire.hub.inventory import MODEL, TIER, Entry
from quire.transfer.folder import TierFolder

_PATIENCE_S = 0.1  # for a blob that a download has locked


def selected(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """Return the entries that names select: by name, or all of a repository by ORG/NAME.

    Raises SettingError for a name that selects nothing.
    """
    found: list[Entry] = []
    for name in names:
        path = str(user_path(name).absolute())
        matching = [
            entry
            for entry in entries
            if entry.name == name
            or (entry.kind == MODEL and entry.name.startswith((f"{name}:", f"{name}@")))
            or (entry.kind != MODEL and str(entry.path.absolute()) == path)
        ]
        if not matching:
            listed = ", ".join(entry.name for entry in entries[:8]) or "nothing"
            near = [one.name for one in entries if len(name) > 2 and name in one.name][:1]
            hint = f"did you mean {near[0]}? " if near else ""
            raise SettingError(
                f"nothing here is called {name!r}; {hint}quire models lists: {listed}. Models are "
                f"those of the Hugging Face cache {cache_dir()}, and HF_HOME names another place; "
                "packed weights and KV tiers are found with --pack-cache and --kv-tier-path"
            )
        found += [entry for entry in matching if entry not in found]
    return found


def freed_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes that removing entries frees."""
    models = _paths([entry for entry in entries if entry.kind == MODEL])
    others = sum(entry.num_bytes for entry in entries if entry.kind != MODEL)
    copies = sum(path.stat().st_size for path in models if path.is_file() and not path.is_symlink())
    return others + copies + sum(blob.stat().st_size for blob in _unused_blobs(models))


def remove(entries: Sequence[Entry]) -> None:
    """Remove entries.

    Raises SettingError for a KV tier in use, and for a file of a directory outside the cache,
    before anything is removed.
    """
    with ExitStack() as locks:
        for entry in entries:
            if entry.kind == TIER:
                locks.callback(TierFolder(entry.path).close)
        models = _paths([entry for entry in entries if entry.kind == MODEL])
        _check_inside(models)
        blobs = _unused_blobs(models)
        # Links first: an interruption leaves blobs without links, never links without blobs.
        for path in models:
            path.unlink(missing_ok=True)
        for blob in blobs:
            _remove_blob(blob)
        for folder in {_repository(path) for path in models}:
            _remove_rest(folder)
        for entry in entries:
            for file in entry.files if entry.kind != MODEL else ():
                file.unlink(missing_ok=True)


def _paths(models: Sequence[Entry]) -> list[Path]:
    """Return the models' files, and those that they share with no model that stays."""
    own = {path: None for entry in models for path in entry.files}
    shared = {path: None for entry in models for path in entry.shared}
    by_snapshot: dict[Path, list[Path]] = {}
    for path in shared:
        by_snapshot.setdefault(_snapshot(path), []).append(path)
    found = list(own)
    for snapshot, files in by_snapshot.items():
        going = own.keys() | files
        if all(path in going for path in snapshot.rglob("*") if not path.is_dir()):
            found += files
    return found


def _check_inside(models: Sequence[Path]) -> None:
    for path in models:
        if not Path(os.path.realpath(path.parent)).is_relative_to(
            os.path.realpath(_repository(path))
        ):
            raise SettingError(
                f"{path.parent} leads outside the Hugging Face cache through a link; nothing was "
                "removed. Delete the link yourself if it should go"
            )


def _snapshot(path: Path) -> Path:
    folders = (path, *path.parents)
    return next(folder for folder in folders if folder.parent.name == "snapshots")


def _repository(path: Path) -> Path:
    return _snapshot(path).parents[1]


def _unused_blobs(paths: Sequence[Path]) -> set[Path]:
    """Return the blobs that no file of a snapshot links to, once `paths` are removed."""
    going, blobs = set(paths), {blob for path in paths if (blob := _blob(path)) is not None}
    for folder in {_repository(path) for path in paths}:
        for path in folder.glob("snapshots/**/*"):
            if path not in going and not path.is_dir():
                blobs.discard(_blob(path) or path)
    return {blob for blob in blobs if blob.exists()}


def _blob(path: Path) -> Path | None:
    """Return the blob that a snapshot's link names, None if it is no link into blobs/."""
    if not path.is_symlink():
        return None
    blob = Path(os.path.normpath(path.parent / os.readlink(path)))
    return blob if blob.parent == _repository(path) / "blobs" else None


def _remove_blob(blob: Path) -> None:
    """Remove a blob that no snapshot links to, unless a download has locked it.

    Also what it links to in the cache's store of blobs that repositories share, which stays as long
    as another repository links to it.
    """
    with suppress(Timeout), blob_lock(blob, timeout_s=_PATIENCE_S):
        if blob.is_dir() and not blob.is_symlink():  # left by a killed download of a large file
            shutil.rmtree(blob)
            return
        folder = blob.parents[1]
        if not any(_blob(path) == blob for path in folder.glob("snapshots/**/*")):
            _unlink_blob(blob)


def _unlink_blob(blob: Path) -> None:
    shared = Path(os.path.realpath(blob))
    is_shared = blob.is_symlink() and shared.is_relative_to(os.path.realpath(cache_dir() / "blobs"))
    blob.unlink(missing_ok=True)
    if is_shared and not _is_linked(shared):
        for path in (shared, shared.with_name(f"{shared.name}.refs")):
            path.unlink(missing_ok=True)


def _is_linked(shared: Path) -> bool:
    blobs = cache_dir().glob("*--*/blobs/*")
    return any(blob.is_symlink() and Path(os.path.realpath(blob)) == shared for blob in blobs)


def _remove_rest(folder: Path) -> None:
    """Remove snapshots without files with their refs; the whole repository after the last one.

    What another process downloads meanwhile stays: blobs that it has locked, files that it has
    added since, and the directories of both.
    """
    left = []
    for snapshot in folder.glob("snapshots/*"):
        _remove_empty(snapshot)
        if snapshot.is_dir() and not snapshot.is_symlink():
            left.append(snapshot.name)
    refs = [path for name in ("refs", PLANNED) for path in (folder / name).rglob("*")]
    for ref in [path for path in refs if path.is_file()]:
        with suppress(OSError):
            if ref.read_text(errors="replace").strip() not in left:
                ref.unlink()
    if not left:
        for blob in folder.glob("blobs/*"):
            _remove_blob(blob)
        for marker in folder.glob(".no_exist/**/*"):  # files that huggingface_hub asked for in vain
            if not marker.is_dir():
                marker.unlink(missing_ok=True)
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    """Remove a directory with its directories, as far as they are empty, and links to others."""
    found = [path for path in folder.rglob("*") if path.is_dir()] if folder.is_dir() else []
    for path in [*sorted(found, reverse=True), folder]:
        with suppress(OSError):
            path.unlink() if path.is_symlink() else path.rmdir()

"""Remove models, packed weights and KV tiers that quire.hub.inventory lists.

A file of a model is removed from its snapshot; its blob only if no other snapshot of the repository
links to it. A KV tier in use, which its engine has locked, is not removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from quire.base.errors import SettingError
from quire.hub.cache import cache_dir
from quire.hub.inventory import MODEL, TIER, Entry
from quire.transfer.folder import TierFolder


def selected(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """Return the entries that names select: by name, or all of a repository by ORG/NAME.

    Raises SettingError for a name that selects nothing.
    """
    found: list[Entry] = []
    for name in names:
        path = str(Path(name).expanduser().absolute())
        matching = [
            entry
            for entry in entries
            if entry.name == name
            or (entry.kind == MODEL and entry.name.startswith((f"{name}:", f"{name}@")))
            or (entry.kind != MODEL and str(entry.path.absolute()) == path)
        ]
        if not matching:
            listed = ", ".join(entry.name for entry in entries[:8]) or "nothing"
            raise SettingError(
                f"nothing here is called {name!r}; quire models lists: {listed}. Packed weights "
                "and KV tiers are found with --pack-cache and --kv-tier-path"
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
            _remove_empty(folder)
        for entry in entries:
            for file in entry.files if entry.kind != MODEL else ():
                file.unlink(missing_ok=True)


def _paths(models: Sequence[Entry]) -> list[Path]:
    return [path for entry in models for path in entry.files]


def _check_inside(models: Sequence[Path]) -> None:
    for path in models:
        if not Path(os.path.realpath(path.parent)).is_relative_to(
            os.path.realpath(_repository(path))
        ):
            raise SettingError(
                f"{path.parent} leads outside the Hugging Face cache through a link; nothing was "
                "removed. Delete the link yourself if it should go"
            )


def _repository(path: Path) -> Path:
    return next(parent.parent for parent in path.parents if parent.name == "snapshots")


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
    """Remove a blob, and what it links to in the cache's store of blobs that repositories share.

    A shared file stays as long as another repository links to it.
    """
    shared = Path(os.path.realpath(blob))
    is_shared = blob.is_symlink() and shared.is_relative_to(os.path.realpath(cache_dir() / "blobs"))
    blob.unlink(missing_ok=True)
    if is_shared and not _is_linked(shared):
        for path in (shared, shared.with_name(f"{shared.name}.refs")):
            path.unlink(missing_ok=True)


def _is_linked(shared: Path) -> bool:
    blobs = cache_dir().glob("*--*/blobs/*")
    return any(blob.is_symlink() and Path(os.path.realpath(blob)) == shared for blob in blobs)


def _remove_empty(folder: Path) -> None:
    """Remove snapshots without files with their refs; the whole repository after the last one."""
    left = []
    for snapshot in folder.glob("snapshots/*"):
        if any(not path.is_dir() for path in snapshot.rglob("*")):
            left.append(snapshot.name)
        else:
            shutil.rmtree(snapshot, ignore_errors=True)
    if not left:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for ref in [path for path in (folder / "refs").rglob("*") if path.is_file()]:
        with suppress(OSError):
            if ref.read_text(errors="replace").strip() not in left:
                ref.unlink()

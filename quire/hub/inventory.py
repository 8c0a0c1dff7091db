"""List what lies on this machine's disk: models in the cache, packed weights and KV tiers.

Models are those of the Hugging Face cache, which other programs share; packed weights and KV tiers
are in directories that their owner names (--pack-cache, --kv-tier-path). Judges a model by its
configuration, as a start does; reads no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError
from quire.base.gguf_parts import parts_of
from quire.base.regular_file import open_regular
from quire.hub.cache import COMMIT, PLANNED, cache_dir, gguf_sizes, missing_files
from quire.hub.gguf_choice import gguf_models
from quire.hub.names import DEFAULT_REVISION, HubName
from quire.models.head_kind import heads_in
from quire.models.registry import open_model
from quire.transfer.folder import tier_files
from quire.weights.pack_cache import MAGIC
from quire.weights.pack_cache import SUFFIX as PACKED_SUFFIX

MODEL, PACK, TIER = "model", "packed weights", "KV tier"
_MAX_REASON_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something on disk. name: what `quire models rm` takes.

    kind: MODEL, PACK or TIER. architecture: "" if it cannot be loaded. problem: why it cannot.
    files: what is removed; for a model, paths in its snapshots. shared: files that models of the
    snapshot share, removed with the last of them: what describes GGUF models, and their mmproj.
    is_planned: only its configuration is there, which `quire plan` has downloaded.
    """

    kind: str
    name: str
    num_bytes: int
    path: Path
    files: tuple[Path, ...]
    shared: tuple[Path, ...] = ()
    architecture: str = ""
    problem: str = ""
    is_planned: bool = False

    def record(self) -> dict[str, Any]:
        """Return the entry for JSON output."""
        return {
            "kind": self.kind,
            "name": self.name,
            "bytes": self.num_bytes,
            "path": str(self.path),
            "architecture": self.architecture or None,
            "problem": self.problem or None,
            "planned": self.is_planned,
        }


def models() -> list[Entry]:
    """Return the models of the cache by name; one for each GGUF model of a revision."""
    found: list[Entry] = []
    for folder in sorted(cache_dir().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        names, planned = _revisions(folder / "refs"), _revisions(folder / PLANNED)
        for snapshot in sorted(folder.glob("snapshots/*")):
            # A linked directory is not the cache's: its files would be listed and removed.
            if snapshot.is_symlink() or not snapshot.is_dir():
                continue
            if COMMIT.fullmatch(snapshot.name):
                revision = names.get(snapshot.name)
                if revision is None and snapshot.name in planned:
                    name = HubName(repo=repo, revision=planned[snapshot.name])
                    found.append(_planned(name, snapshot))
                    continue
                name = HubName(repo=repo, revision=revision or snapshot.name)
                found += _in_snapshot(name, snapshot)
    return sorted(found, key=lambda entry: entry.name)


def packs(folder: Path) -> list[Entry]:
    """Return the packed weights of a directory."""
    return [
        Entry(kind=PACK, name=str(file), num_bytes=file.stat().st_size, path=file, files=(file,))
        for file in sorted(folder.glob(f"*{PACKED_SUFFIX}"))
        if _is_packed(file)
    ]


def tiers(folder: Path) -> list[Entry]:
    """Return the KV tier of a directory, if there is one."""
    files = tier_files(folder)
    if not files:
        return []
    size = sum(file.stat().st_size for file in files)
    return [Entry(kind=TIER, name=str(folder), num_bytes=size, path=folder, files=tuple(files))]


def _is_packed(file: Path) -> bool:
    """Return whether a file was written as packed weights, not only named so."""
    try:
        with open_regular(file) as content:
            return not file.is_symlink() and content.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _revisions(refs: Path) -> dict[str, str]:
    """Return a revision's name for each commit; main takes precedence."""
    found: dict[str, str] = {}
    for ref in sorted(file for file in refs.rglob("*") if file.is_file()):
        revision = ref.relative_to(refs).as_posix()
        commit = ref.read_text(encoding="ascii", errors="replace")[:64].strip()
        if commit not in found or revision == DEFAULT_REVISION:
            found[commit] = revision
    return found


def _planned(name: HubName, snapshot: Path) -> Entry:
    files = tuple(path for path in sorted(snapshot.rglob("*")) if not path.is_dir())
    num_bytes = sum(_size(path) for path in files)
    return replace(_model(name, snapshot, files, num_bytes), problem="", is_planned=True)


def _in_snapshot(name: HubName, snapshot: Path) -> list[Entry]:
    files = [path for path in sorted(snapshot.rglob("*")) if not path.is_dir()]
    ggufs = gguf_models(gguf_sizes(snapshot))
    parts_by_first = {
        snapshot / first: tuple(
            part for name in parts_of(first) if (part := snapshot / name) in files
        )
        for first in ggufs
    }
    owned = {part for parts in parts_by_first.values() for part in parts}
    rest = tuple(path for path in files if path not in owned)
    has_config = snapshot / "config.json" in rest
    is_directory = has_config and any(path.match("*.safetensors*") for path in rest)
    shared = () if is_directory else rest
    entries = []
    for first, size in ggufs.items():
        path = snapshot / first
        of_file = HubName(repo=name.repo, revision=name.revision, file=first)
        entries.append(_model(of_file, path, parts_by_first[path], size, shared))
    if is_directory or not entries:
        entries.append(_model(name, snapshot, rest, sum(_size(path) for path in rest)))
    return entries


def _model(
    name: HubName,
    path: Path,
    files: tuple[Path, ...],
    num_bytes: int,
    shared: tuple[Path, ...] = (),
) -> Entry:
    architecture, problem = "", ""
    try:
        kind = heads_in(path)
        architecture = open_model(path).architecture if kind is None else f"{kind} heads"
        if missing := missing_files(path):
            problem = f"not complete: {', '.join(missing[:3])} missing; quire pull {name}"
    except ModelError as error:
        problem = _short(error, path)
    return Entry(
        kind=MODEL,
        name=str(name),
        num_bytes=num_bytes,
        path=path,
        files=files,
        shared=shared,
        architecture="" if problem else architecture,
        problem=problem,
    )


def _short(error: ModelError, path: Path) -> str:
    text = " ".join(str(error).split()).removeprefix(f"{path}/config.json: ")
    text = text.removeprefix(f"{path}: ")
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def entries(packs_in: Sequence[Path], tiers_in: Sequence[Path]) -> list[Entry]:
    """Return everything: models, then packed weights and KV tiers of the given directories."""
    found = models()
    for folder in packs_in:
        found += packs(folder)
    for folder in tiers_in:
        found += tiers(folder)
    return found

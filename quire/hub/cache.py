"""Find a model by name in the local Hugging Face cache. Reads files only; opens no connection.

    local_model("Qwen/Qwen3-0.6B")         # the snapshot's directory
    local_model("ORG/NAME:FILE.gguf")      # the GGUF file

    models--ORG--NAME/refs/REVISION        the commit of a branch or tag
    models--ORG--NAME/snapshots/COMMIT/    the files by name, symbolic links into blobs/
    models--ORG--NAME/blobs/               the contents by digest
    models--ORG--NAME/quire-planned/REVISION   as refs/, of a revision without weights (quire plan)

The cache's directory is the one `huggingface_hub` uses (HF_HUB_CACHE, HF_HOME), and is shared with
other programs. Invariant: a model is returned only if all its files are there, and each is a
regular file inside the cache.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

from quire.base.errors import ConfigError, WeightsError
from quire.base.gguf_parts import SUFFIX, parts_of
from quire.base.regular_file import is_present, read_regular
from quire.base.show import show
from quire.base.user_path import user_path
from quire.config.groups import EngineConfig
from quire.hub.gguf_choice import TEMPLATES, chosen_gguf, gguf_models, matching_gguf
from quire.hub.names import HubName, hub_name

PLANNED = "quire-planned"
COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 256
_MAX_NAMED = 4
_MAX_FILES = 100_000


def with_local_model(config: EngineConfig) -> EngineConfig:
    """Replace names of models by their paths in the cache; the name stays its name in the API.

    Raises ConfigError if the cache has no such model, or only a part of it.
    """
    draft = config.speculation.draft_model
    if draft is not None and hub_name(draft) is not None:
        try:
            path = str(local_model(draft))
        except ConfigError as error:
            raise ConfigError(f"--draft-model {error}") from None
        config = replace(config, speculation=replace(config.speculation, draft_model=path))
    name = hub_name(config.model.model)
    if name is None:
        return config
    model = replace(
        config.model,
        model=str(required_local(name)),
        served_model_name=config.model.served_model_name or (config.model.model,),
    )
    return replace(config, model=model)


def local_model(text: str) -> Path:
    """Return the path of a model: a path as it is, a name's in the cache. Raises ConfigError."""
    name = hub_name(text)
    return user_path(text) if name is None else required_local(name)


def required_local(name: HubName) -> Path:
    """Return the path of a model in the cache. Raises ConfigError that names the command."""
    path = find(name)
    if path is None:
        raise ConfigError(why_not_found(name))
    return path


def find(name: HubName) -> Path | None:
    """Return the path of a complete model in the cache, None if it is not there.

    Raises ConfigError where several GGUF files match, or the cache is damaged.
    """
    snapshot = snapshot_of(name)
    if snapshot is None:
        return None
    path = _path_in(snapshot, name)
    return None if path is None or missing_files(path) else path


def why_not_found(name: HubName) -> str:
    """Return the error for a model that `find` does not find, with the command to download it."""
    pull = f"quire pull {name}"
    snapshot = snapshot_of(name)
    path = None if snapshot is None else _path_in(snapshot, name)
    if path is not None:
        missing = missing_files(path)
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        return (
            f"{name} is not complete in the Hugging Face cache: {', '.join(missing[:_MAX_NAMED])}"
            f"{more} missing; complete it with: {pull}"
        )
    others = _other_revisions(name) if snapshot is None else []
    there = f" (there are {', '.join(others)})" if others else ""
    return (
        f"{name} is neither a path nor a model in the Hugging Face cache {cache_dir()}{there}; "
        f"download it with: {pull}"
    )


def cache_dir() -> Path:
    """Return the cache's directory, as `huggingface_hub` reads it from the environment."""
    from huggingface_hub import constants  # slow import

    return Path(constants.HF_HUB_CACHE)


def token_file() -> Path:
    """Return the file of the user's token, as `huggingface_hub` reads it from the environment."""
    from huggingface_hub import constants  # slow import

    return Path(constants.HF_TOKEN_PATH)


def repo_dir(repo: str) -> Path:
    """Return the directory of a repository in the cache, whether or not it exists."""
    return cache_dir() / f"models--{repo.replace('/', '--')}"


def snapshot_of(name: HubName) -> Path | None:
    """Return the snapshot of a revision, or None. Raises ConfigError where its ref is damaged."""
    return _snapshot_by(name, "refs")


def planned_snapshot(name: HubName) -> Path | None:
    """Return the snapshot that has the configuration of a planned revision, or None."""
    return _snapshot_by(name, PLANNED)


def _snapshot_by(name: HubName, refs: str) -> Path | None:
    folder = repo_dir(name.repo)
    commit, ref = name.revision, folder / refs / name.revision
    if not COMMIT.fullmatch(commit):
        if not is_present(ref):
            return None
        try:
            commit = read_regular(ref, limit_bytes=_MAX_REF_BYTES).decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{ref}: cannot be read ({error}); delete it") from error
        if not COMMIT.fullmatch(commit):
            raise ConfigError(f"{ref} holds {show(commit)}, not a commit's 40 digits; delete it")
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def missing_files(path: Path) -> list[str]:
    """Return the names of files a model lacks. Raises ConfigError for files outside the cache.

    path: a snapshot's directory or a GGUF file in one.
    """
    if path.suffix == SUFFIX:
        wanted = [path.with_name(part) for part in parts_of(path.name)]
    else:
        wanted = [path / name for name in _required_files(path)] + _readable_files(path)
    return sorted({file.name for file in wanted if not is_cached(file)})


def gguf_sizes(snapshot: Path) -> dict[str, int]:
    """Return the bytes of a snapshot's GGUF files by path; 0 for a broken link."""
    found = {}
    for file in islice(snapshot.rglob(f"*{SUFFIX}"), _MAX_FILES):
        found[file.relative_to(snapshot).as_posix()] = file.stat().st_size if file.is_file() else 0
    return found


def is_cached(file: Path) -> bool:
    """Return whether a file of a snapshot is there. Raises ConfigError where it is outside the
    cache."""
    try:
        target = Path(os.path.realpath(file, strict=True))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be resolved ({error.strerror}); delete it and pull the model again"
        ) from error
    folder = next(parent.parent for parent in file.parents if parent.name == "snapshots")
    roots = (Path(os.path.realpath(folder)), Path(os.path.realpath(folder.parent)))
    if not any(target.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"{file} links to {target}, outside the Hugging Face cache; delete it and pull the "
            "model again, or give the path of a directory instead of a name"
        )
    if not target.is_file():
        raise ConfigError(f"{file} is not a regular file; delete it and pull the model again")
    return True


def _required_files(snapshot: Path) -> list[str]:
    """Return the files without which a directory of safetensors cannot be loaded."""
    from quire.weights.checkpoint import (  # imports NumPy
        HEADS_FILE,
        INDEX_FILE,
        SINGLE_FILE,
        read_weight_map,
    )

    if is_present(snapshot / SINGLE_FILE) or not is_present(snapshot / INDEX_FILE):
        is_of_heads = is_present(snapshot / HEADS_FILE) and not is_present(snapshot / SINGLE_FILE)
        return ["config.json", HEADS_FILE if is_of_heads else SINGLE_FILE]
    if not is_cached(snapshot / INDEX_FILE):
        return ["config.json", INDEX_FILE]
    try:
        return ["config.json", *set(read_weight_map(snapshot / INDEX_FILE).values())]
    except WeightsError as error:
        raise ConfigError(str(error)) from error


def _readable_files(snapshot: Path) -> list[Path]:
    """Return all files of a snapshot that are read when a model is loaded."""
    files: list[Path] = []
    for folder in (snapshot, snapshot / TEMPLATES):
        if folder.is_dir():
            entries = islice(os.scandir(folder), _MAX_FILES)
            # A link to a directory is checked as well, and found not to be a regular file.
            files += [Path(entry) for entry in entries if entry.is_symlink() or not entry.is_dir()]
    return files


def _path_in(snapshot: Path, name: HubName) -> Path | None:
    """Return the model's path in a snapshot; None if a GGUF file was named and is not there."""
    is_directory = is_present(snapshot / "config.json") and not name.file
    if is_directory and any(snapshot.glob("*.safetensors*")):
        return snapshot
    models = gguf_models(gguf_sizes(snapshot))
    if matching_gguf(models, name):
        return snapshot / chosen_gguf(models, name)
    return snapshot if is_directory else None


def _other_revisions(name: HubName) -> list[str]:
    refs = repo_dir(name.repo) / "refs"
    found = sorted(file for file in refs.rglob("*") if file.is_file())
    return [f"{name.repo}@{ref.relative_to(refs).as_posix()}" for ref in found[:_MAX_NAMED]]

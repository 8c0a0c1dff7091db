"""Download a model into the local Hugging Face cache: only its needed files, each verified.

    path = pull(required_name("ORG/NAME"), report=print, progress=silent)

The configuration comes first, so that an architecture that is not supported, a disk that is too
small and a memory that is too small are reported before gigabytes are fetched. Complete files are
never fetched again; a partial file is resumed where it ends (quire/hub/download.py). Invariants:
all files are those of one commit, even if the repository changes meanwhile; a file of another size
or digest than in the hub's list is removed; the revision points to the commit only once all files
are there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from quire.base.errors import CapacityError, ConfigError, ModelError
from quire.base.gguf_parts import SUFFIX
from quire.config.machine import machine_memory, stores_files
from quire.hub.cache import COMMIT, PLANNED, missing_files, repo_dir
from quire.hub.download import Downloads
from quire.hub.files import CONFIGURATION, RemoteFile, first_files, shards
from quire.hub.fit import Fit, fit_of_directory, fit_of_gguf
from quire.hub.gguf_choice import size_text
from quire.hub.names import HubName
from quire.hub.remote import Revision, read_revision
from quire.weights.checkpoint import HEADS_FILE, INDEX_FILE, SINGLE_FILE, read_weight_map


class Progress(Protocol):
    """Receives the progress of a download."""

    def begin(self, file: str, done_bytes: int, total_bytes: int) -> None:
        """Report that a file begins, with the bytes of all files so far and in the end."""

    def advance(self, num_bytes: int) -> None:
        """Report received bytes; negative where they are received again."""

    def end(self) -> None:
        """Report that nothing more comes."""


def pull(name: HubName, *, report: Callable[[str], None], progress: Progress) -> Path:
    """Download what is missing of a model and return its path in the cache.

    report: receives lines for the user. Raises ModelError, or CapacityError if the disk is too
    small.
    """
    return _Pull(name, read_revision(name), report, progress).run()


class _Pull:
    """One download: a revision of a repository, and the snapshot it goes to."""

    def __init__(
        self,
        name: HubName,
        revision: Revision,
        report: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._name, self._revision = name, revision
        self._report, self._progress = report, progress
        self._downloads = Downloads(name, revision, report)
        self._snapshot = self._downloads.snapshot

    def run(self) -> Path:
        """Download, verify, and point the revision to the commit."""
        listing = self._revision.files
        first = first_files(listing, self._name)
        if first[0].path.endswith(SUFFIX):
            path = self._snapshot / first[0].path
            size = sum(file.num_bytes for file in first)
            self._fetch_all(first, fit_of_gguf(path.name, size))
        else:
            path = self._snapshot
            self._fetch_configuration(first)
            weights = weight_files(self._name, self._revision, path)
            size = sum(file.num_bytes for file in weights)
            self._fetch_all([*first, *weights], fit_of_directory(path, size))
        if missing := missing_files(path):
            raise ModelError(f"{path}: {', '.join(missing[:4])} disappeared; pull again")
        point_revision(self._name, self._revision)
        with suppress(OSError):  # it is found by its ref now
            (repo_dir(self._name.repo) / PLANNED / self._name.revision).unlink()
        return path

    def _fetch_configuration(self, files: Sequence[RemoteFile]) -> None:
        """Download the files that describe the model: a few kilobytes."""
        described = [file for file in files if file.path in CONFIGURATION]
        self._check_disk(described)
        for file in described:
            if not self._downloads.is_there(file):
                self._downloads.fetch(file, _ignore)

    def _fetch_all(self, files: Sequence[RemoteFile], fit: Fit) -> None:
        """Report what the download and the model need, check the disk, and download."""
        left = [file for file in files if not self._downloads.is_there(file)]
        left_bytes = sum(self._downloads.bytes_left(file) for file in left)
        kind = f", {fit.architecture}" if fit.architecture else ""
        self._report(f"model     {self._name} (commit {self._revision.commit[:12]}{kind})")
        self._report(
            f"download  {size_text(left_bytes)} of {size_text(sum(f.num_bytes for f in files))} "
            f"in {len(left)} of {len(files)} files, to {self._snapshot}"
        )
        self._report(f"disk      {size_text(free_bytes(self._snapshot))} free")
        self._report(f"memory    {fit.text(machine_memory())}")
        self._check_disk(files)
        self._fetch(left)

    def _check_disk(self, files: Sequence[RemoteFile]) -> None:
        """Raise CapacityError where the disk has less free space than the download needs."""
        needed = sum(self._downloads.bytes_left(file) for file in files)
        free = free_bytes(self._snapshot)
        if needed and not stores_files(_nearest(self._snapshot)):
            raise CapacityError(
                f"{self._name}: the cache {repo_dir(self._name.repo).parent} is on a file system "
                "of size 0, such as /proc, which stores no files; set HF_HOME to a directory that "
                "you may write to, on a disk"
            )
        if needed > free:
            raise CapacityError(
                f"{self._name}: {size_text(needed)} ({needed} bytes) are to be downloaded, and the "
                f"disk of {repo_dir(self._name.repo).parent} has {size_text(free)} ({free} bytes) "
                "free; make room (quire models lists what is there, quire models rm removes it), "
                "or set HF_HOME to a directory on a larger disk"
            )

    def _fetch(self, files: Sequence[RemoteFile]) -> None:
        total_bytes = sum(self._downloads.bytes_left(file) for file in files)
        done_bytes = 0
        try:
            for file in files:
                self._progress.begin(file.path, done_bytes, total_bytes)
                done_bytes += self._downloads.bytes_left(file)
                self._downloads.fetch(file, self._progress.advance)
        finally:
            self._progress.end()


def weight_files(name: HubName, revision: Revision, snapshot: Path) -> list[RemoteFile]:
    """Return the safetensors files of a model. Its index, if any, is in the snapshot."""
    if SINGLE_FILE in revision.files:
        return [revision.files[SINGLE_FILE]]
    if INDEX_FILE not in revision.files:
        return [revision.files[HEADS_FILE]]
    return shards(revision.files, name, read_weight_map(snapshot / INDEX_FILE))


def point_revision(name: HubName, revision: Revision, *, refs: str = "refs") -> None:
    """Write the commit into the revision's ref, as other programs that use the cache do.

    refs: PLANNED for a revision without weights, which those programs must not take for a model.
    """
    if COMMIT.fullmatch(name.revision):
        return
    ref = repo_dir(name.repo) / refs / name.revision
    partial = ref.with_name(f"{ref.name}.{secrets.token_hex(4)}.tmp")
    try:
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(revision.commit)
        os.replace(partial, ref)
    except OSError as error:
        raise ConfigError(f"{ref}: cannot be written: {error.strerror}") from error


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk where `path` is or would be created."""
    return shutil.disk_usage(_nearest(path)).free


def _nearest(path: Path) -> Path:
    """Return the directory, or the nearest one above it that exists."""
    while not path.is_dir():
        path = path.parent
    return path


def _ignore(num_bytes: int) -> None:
    """Show no progress."""

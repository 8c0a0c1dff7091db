"""Download one file of a repository into the Hugging Face cache, and resume a partial one.

    blobs/DIGEST.incomplete                         what was received so far
    blobs/DIGEST.incomplete.d/                      a file too large for HTTP, while it is received
    blobs/DIGEST                                    the file, once its size and digest are verified
    snapshots/COMMIT/PATH -> ../../blobs/DIGEST
    .locks/models--ORG--NAME/DIGEST.lock            the lock that `huggingface_hub` takes as well

A partial file survives a killed process, and the next download asks for the bytes behind it. Two
downloads of one file at once: the second waits for the lock, and finds the file. Invariant: a blob
under its digest has that digest.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from quire.base.errors import ConfigError, ModelError
from quire.base.regular_file import is_present, open_regular
from quire.hub.blob_lock import Timeout, blob_lock
from quire.hub.cache import is_cached, repo_dir
from quire.hub.files import RemoteFile
from quire.hub.names import HubName
from quire.hub.remote import Revision, receive

_PART_BYTES = 4 << 20
_PATIENCE_S = 0.1  # before it is reported that another process downloads the file
# A file system without symbolic links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Downloads:
    """The files of one revision in the cache. report: receives lines for the user."""

    def __init__(self, name: HubName, revision: Revision, report: Callable[[str], None]) -> None:
        self._name, self._revision, self._report = name, revision, report
        self._folder = repo_dir(name.repo)
        self.snapshot = self._folder / "snapshots" / revision.commit

    def is_there(self, file: RemoteFile) -> bool:
        """Return whether the snapshot has the file in its full size. Raises ConfigError."""
        path = self.snapshot / file.path
        return is_present(path) and is_cached(path) and path.stat().st_size == file.num_bytes

    def bytes_left(self, file: RemoteFile) -> int:
        """Return the bytes to download; 0 if another revision has the same file already."""
        if self.is_there(file) or _size(self._blob(file)) == file.num_bytes:
            return 0
        return file.num_bytes - self._resumed_bytes(file)

    def fetch(self, file: RemoteFile, on_bytes: Callable[[int], None]) -> None:
        """Download a file that is not there. Raises ModelError, and ConfigError for the cache.

        on_bytes: called with the number of bytes of each part received; negative where some are
        received again.
        """
        try:
            with self._locked(file):
                if not self.is_there(file):  # now: another process may have finished it meanwhile
                    self._fetch(file, on_bytes)
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: cannot be written ({error.strerror}); make room, or set HF_HOME "
                "to a directory that you may write to"
            ) from error

    def _fetch(self, file: RemoteFile, on_bytes: Callable[[int], None]) -> None:
        blob, path = self._blob(file), self.snapshot / file.path
        if is_present(path):
            path.unlink()  # of another size
        if is_present(blob) and (problem := _problem(blob, file)):
            blob.unlink()
            self._report(f"{file.path}: the cached file has {problem}; it is downloaded again")
        if not blob.exists():
            partial = self._partial(file)
            if _size(partial) > file.num_bytes:
                partial.unlink()
            receive(self._name, self._revision, file, partial, on_bytes)
            self._verify(file, partial)
            os.replace(partial, blob)
        path.parent.mkdir(parents=True, exist_ok=True)
        _link(blob, path)

    def _blob(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / file.digest

    def _partial(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / f"{file.digest}.incomplete"

    def _resumed_bytes(self, file: RemoteFile) -> int:
        found = max(_size(self._partial(file)), 0)
        return found if found <= file.num_bytes else 0

    @contextmanager
    def _locked(self, file: RemoteFile) -> Iterator[None]:
        blob = self._blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(blob_lock(blob, timeout_s=_PATIENCE_S))
            except Timeout:
                self._report(f"waiting   another process downloads {file.path}")
                stack.enter_context(blob_lock(blob))
            yield

    def _verify(self, file: RemoteFile, partial: Path) -> None:
        """Compare a received file with the hub's list; remove it if it differs."""
        problem = _problem(partial, file)
        if not problem:
            return
        with suppress(OSError):
            partial.unlink()
        raise ModelError(
            f"{self._name}: {file.path} was received with {problem} as the hub lists it; it was "
            "removed. Pull again; if it happens again, a proxy or HF_ENDPOINT changes the files"
        )


def _problem(path: Path, file: RemoteFile) -> str:
    """Return how a file differs from the hub's list, "" if it does not."""
    found = _size(path)
    if found != file.num_bytes:
        return f"{found} bytes, not {file.num_bytes}"
    digest = _digest(path, file)
    same = digest == file.digest
    return "" if same else f"the digest {digest[:16]}..., not {file.digest[:16]}..."


def _digest(path: Path, file: RemoteFile) -> str:
    """Return the digest that the hub would list for a file's content."""
    hasher = hashlib.sha256()
    if not file.is_large:  # git's name of a blob, which is no protection but against accidents
        hasher = hashlib.sha1(usedforsecurity=False)
        hasher.update(b"blob %d\0" % file.num_bytes)
    with open_regular(path) as content:
        while part := content.read(_PART_BYTES):
            hasher.update(part)
    return hasher.hexdigest()


def _link(blob: Path, path: Path) -> None:
    """Link to a blob from a snapshot; without symbolic links, move it there."""
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        made.symlink_to(os.path.relpath(blob, path.parent))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.replace(blob, path)
        return
    os.replace(made, path)


def _size(path: Path) -> int:
    """Return a file's bytes, -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1

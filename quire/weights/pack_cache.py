"""Packed weights in a file, so that the next start maps them instead of packing anew.

    head   64 bytes: MAGIC, u64 layout, u64 start and u64 size of the index, its digest (16 bytes),
           the stamp (16 bytes)
    data   each weight as it lies in memory, at a multiple of 4096
    index  JSON: what the file was made for, the digest of its checkpoint, and of each weight the
           place and a digest of its bytes

Everything read is verified: the head and the index by cryptographic digests, each weight by a
digest of all its bytes, computed by all threads, which also pages the file in. A file that fails
any check is written again, and the reason is logged.

The index contains the digest of every tensor of the checkpoint. Reading the checkpoint again would
cost as much as a cold start, so the stamp covers the metadata of its files when they were opened:
names, inode numbers, sizes and modification times. While the stamp matches, the checkpoint counts
as unchanged; where it differs, or the files were modified too recently to rule out a second change
within the same timestamp, the checkpoint is read and compared.

A digest is no signature: a user with write access to the directory can change answers. A directory
or file that other users may write to is therefore rejected. Knows no program and no layout: the
caller passes bytes and a text that describes what they are for.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.base.file_ownership import danger
from quire.base.log import Log
from quire.base.strict_json import parse_object

Bytes = NDArray[np.uint8]
Digest = Callable[[Bytes], tuple[int, int]]

MAGIC = b"QuirePak"
HEAD = struct.Struct("<8sQQQ16s16s")
STAMP_AT = HEAD.size - 16
NO_STAMP = bytes(16)
ALIGNMENT = 4096
SLACK_BYTES = 64  # readable behind the last weight: kernels may look ahead
MAX_INDEX_BYTES = 64 << 20
# Pages of the size the system maps at once are made where it is written in such runs.
RUN_BYTES = 2 << 20
# Changes within this time may have one and the same date.
SETTLED_S = 2.0
SUFFIX = ".packed"


class Unusable(Exception):
    """The reason why a file cannot be used; it is written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What packed weights depend on besides the checkpoint's bytes.

    layout: the version of the packed layout. text: all else, as one text. model: a readable part
    of the file's name.
    """

    model: str
    layout: int
    text: str

    @property
    def digest(self) -> str:
        """Return the digest of the text, 32 hexadecimal digits."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """Verified weights as views of the mapped file, and the digest of their checkpoint.

    coarse_rows: the number of rows too coarse for their format, by name, counted while packing.
    starts: the place of each weight in the file at `path`.
    """

    weights: Mapping[str, Bytes]
    weights_digest: str
    coarse_rows: Mapping[str, int]
    path: Path
    starts: Mapping[str, int]
    mapped: mmap.mmap
    opened: os.stat_result

    def forget(self, names: Sequence[str]) -> None:
        """Give the pages of some weights back to the system; they are read again if used."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for name in names:
                size = -(-len(self.weights[name]) // mmap.PAGESIZE) * mmap.PAGESIZE
                self.mapped.madvise(mmap.MADV_DONTNEED, self.starts[name], size)

    def is_same(self, found: os.stat_result) -> bool:
        """Return whether `found` is of the file that was verified, as it was then."""
        one, other = (
            (of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns) for of in (self.opened, found)
        )
        return one == other


class PackCache:
    """A directory of packed files; `log` records what happens to them.

    Raises SettingError where it is no directory, or other users may write to it.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder, self.log = folder, log
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except OSError as error:
            raise SettingError(
                f"pack_cache: {folder} cannot be used as a folder: {error.strerror}; "
                "name a directory that you may write to, or one to be created"
            ) from error
        if why := danger(found):
            raise SettingError(
                f"pack_cache: {folder}: {why}, so its files could change a model's answers; use a "
                "directory of your own, or chmod 700 it"
            )

    def path(self, recipe: Recipe, checkpoint: Path) -> Path:
        """Return the file for this recipe and checkpoint path.

        It does not depend on the layout version or the checkpoint's content.
        """
        place = f"{checkpoint.resolve()}\0{recipe.text}".encode()
        name = re.sub(r"[^\w.-]", "_", recipe.model)[:80].lstrip(".")
        key = hashlib.blake2b(place, digest_size=8).hexdigest()
        return self.folder / f"{name or 'model'}-{key}{SUFFIX}"


def stamp_of(files: Mapping[Path, os.stat_result]) -> bytes:
    """Return a digest of the files' metadata; NO_STAMP where one was modified too recently."""
    digest = hashlib.blake2b(digest_size=16)
    newest_ns = 0
    for file, found in sorted(files.items()):
        newest_ns = max(newest_ns, found.st_mtime_ns, found.st_ctime_ns)
        known = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        digest.update(f"{file}\0{known}\0".encode(errors="surrogateescape"))
    return digest.digest() if newest_ns < (time.time() - SETTLED_S) * 1e9 else NO_STAMP


def read_packed(
    path: Path,
    recipe: Recipe,
    *,
    sizes: Mapping[str, int],
    stamp: bytes,
    weights_digest: Callable[[], str],
    digest: Digest,
) -> PackedFile:
    """Map and verify the weights in `path`. Raises Unusable, and FileNotFoundError.

    sizes: bytes of each weight. weights_digest: computes the digest of the checkpoint; called only
    where the stamp does not match. digest: a 128-bit digest of bytes.
    """
    descriptor = _open(path)
    try:
        size = os.fstat(descriptor).st_size
        if size < HEAD.size + SLACK_BYTES:
            raise Unusable(f"it has {size} bytes, too few for packed weights")
        mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # this system maps files by small pages only
                mapped.madvise(mmap.MADV_HUGEPAGE)
        content: Bytes = np.frombuffer(mapped, np.uint8)
        index, found_stamp = _read_index(content, recipe)
        weights = _checked_weights(content, index, sizes, digest)
        if found_stamp == NO_STAMP or found_stamp != stamp:
            if weights_digest() != index["weights_digest"]:
                raise Unusable("it is of other weights: the checkpoint has changed since")
            _restamp(path, stamp)
        return PackedFile(
            weights=weights,
            weights_digest=index["weights_digest"],
            coarse_rows=index["coarse_rows"],
            path=path,
            starts={name: entry[0] for name, entry in index["tensors"].items()},
            mapped=mapped,
            opened=os.fstat(descriptor),
        )
    finally:
        os.close(descriptor)


class PackWriter:
    """Writes a packed file. Raises OSError where that fails; `abandon` removes the partial file."""

    def __init__(self, path: Path, recipe: Recipe, *, total_bytes: int, stamp: bytes) -> None:
        self._path, self._recipe, self._stamp = path, recipe, stamp
        _remove_left_behind(path)
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        self._held = bytearray()  # what does not fill a run yet
        self._tensors: dict[str, list[Any]] = {}
        self._size = 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_room(self._file, total_bytes)
            self._append(memoryview(bytes(ALIGNMENT)))  # the head's place
        except BaseException:
            self.abandon()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._size

    def add(self, name: str, packed: Bytes, digest: tuple[int, int]) -> None:
        """Append a weight."""
        self._append(memoryview(bytes(-self._size % ALIGNMENT)))
        self._tensors[name] = [self._size, len(packed), *_hex(digest)]
        self._append(packed.data)

    def finish(self, weights_digest: str, coarse_rows: Mapping[str, int]) -> None:
        """Write the index and the head, and move the file into place atomically."""
        self._append(memoryview(bytes(SLACK_BYTES)))
        index = json.dumps(
            {
                "recipe": self._recipe.digest,
                "weights_digest": weights_digest,
                "coarse_rows": dict(coarse_rows),
                "tensors": self._tensors,
            }
        ).encode()
        start = self._size
        self._append(memoryview(index))
        _write_all(self._file, memoryview(self._held))
        self._held.clear()
        os.ftruncate(self._file, self._size)
        head = HEAD.pack(
            MAGIC, self._recipe.layout, start, len(index), _index_digest(index), self._stamp
        )
        os.pwrite(self._file, head, 0)
        os.replace(self._part, self._path)
        os.close(self._file)
        self._file = -1

    def abandon(self) -> None:
        """Remove the partial file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with suppress(OSError):
                self._part.unlink()

    def _append(self, content: memoryview) -> None:
        self._size += len(content)
        if self._held:
            room = RUN_BYTES - len(self._held)
            self._held += content[:room]
            content = content[room:]
            if len(self._held) < RUN_BYTES:
                return
            _write_all(self._file, memoryview(self._held))
            self._held = bytearray()
        whole = len(content) - len(content) % RUN_BYTES
        _write_all(self._file, content[:whole])
        self._held += content[whole:]


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unusable(f"it cannot be opened: {error.strerror}") from error
    found = os.fstat(descriptor)
    why = "it is no plain file" if not stat.S_ISREG(found.st_mode) else danger(found)
    if why:
        os.close(descriptor)
        raise Unusable(why)
    return descriptor


def _read_index(content: Bytes, recipe: Recipe) -> tuple[dict[str, Any], bytes]:
    magic, layout, start, size, digest, stamp = HEAD.unpack(content[: HEAD.size].tobytes())
    if magic != MAGIC:
        raise Unusable("it holds no packed weights, or was never finished")
    if layout != recipe.layout:
        raise Unusable(f"it was packed by another version (layout {layout}, not {recipe.layout})")
    if size > MAX_INDEX_BYTES or start + size != len(content):
        raise Unusable(f"it has {len(content)} bytes, its head says {start + size}: it was cut")
    raw = content[start:].tobytes()
    if _index_digest(raw) != digest:
        raise Unusable("its index was changed: the digest differs")
    index = parse_object(raw, limit_bytes=MAX_INDEX_BYTES)
    if index["recipe"] != recipe.digest:
        raise Unusable("it was packed for another program")
    if "coarse_rows" not in index:
        raise Unusable("it was packed by an earlier version, which did not look for coarse rows")
    return index, stamp


def _checked_weights(
    content: Bytes, index: Mapping[str, Any], sizes: Mapping[str, int], digest: Digest
) -> dict[str, Bytes]:
    tensors = index["tensors"]
    if {name: entry[1] for name, entry in tensors.items()} != dict(sizes):
        raise Unusable("it holds other weights than the program has")
    weights: dict[str, Bytes] = {}
    for name, (start, size, *said) in tensors.items():
        weights[name] = content[start : start + size]
        if list(_hex(digest(weights[name]))) != said:
            raise Unusable(f"the bytes of {name} were changed: the digest differs")
    return weights


def _restamp(path: Path, stamp: bytes) -> None:
    """Replace the stamp after a comparison found the checkpoint unchanged."""
    with suppress(OSError):  # in a read-only directory the checkpoint is compared at each start
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.pwrite(descriptor, stamp, STAMP_AT)
        finally:
            os.close(descriptor)


def _hex(digest: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{word:016x}" for word in digest)


def _index_digest(index: bytes) -> bytes:
    return hashlib.blake2b(index, digest_size=16).digest()


def _check_room(file: int, num_bytes: int) -> None:
    """Raise OSError where the disk has less free space."""
    free = os.fstatvfs(file)
    if free.f_bavail * free.f_frsize < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{num_bytes} bytes are needed, {free.f_bavail * free.f_frsize} are free",
        )


def _write_all(file: int, content: memoryview) -> None:
    while len(content):
        content = content[os.write(file, content) :]


def _remove_left_behind(path: Path) -> None:
    """Remove partial files left by ended writers; a running writer holds a lock."""
    for part in path.parent.glob(f".{path.name}.*.part"):
        with suppress(OSError):
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)

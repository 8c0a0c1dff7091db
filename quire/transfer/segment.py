"""Segment: one file of a disk tier, with room for a number of blocks, and how it lies on disk.

    head    4096 bytes: MAGIC, version, number of blocks, their size and the distance between two of
            them, a fingerprint of whoever can read such blocks, and a checksum of all that
    table   64 bytes a block: digest, age, checksum of the block's bytes, checksum of the entry
    blocks  at multiples of 4096

The whole file is laid out when it is made, so a disk that fills up later takes nothing away. An
entry is wiped before its block is written and made when that is done: what a crash leaves behind,
in whatever order the pages reached the disk, is an entry or a block whose checksum is wrong.

Bytes move by preadv and pwrite and not through a mapping: both are copies out of the page cache,
equally fast here, but a disk that fails is an error in the one and the end of the process (SIGBUS)
in the other. What is not in the page cache is read past it (O_DIRECT) where the file system can: it
goes to the pool, and a second copy of it would only cost memory and, in a virtual machine, the time
to be given that memory.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.base.file_ownership import danger

Bytes = NDArray[np.uint8]

MAGIC = b"QuireKVT"
VERSION = 1
PAGE = 4096
HEAD = struct.Struct("<8sIIQQ32s")
ENTRY = struct.Struct("<16sQII")  # digest, age, checksum of the block, 0
CHECK = struct.Struct("<I")
ENTRY_BYTES = 64


class Segment:
    """An open file. Raises OSError where the disk does; closing is the owner's.

    direct: a descriptor of the same file that reads past the page cache, if there is one.
    """

    def __init__(
        self, descriptor: int, direct: int | None, num_blocks: int, block_bytes: int
    ) -> None:
        self._descriptor = descriptor
        self._direct, self._may_be_direct = direct, direct is not None
        self.num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._stride = stride_of(block_bytes)
        self._first = _first_block(num_blocks)

    @classmethod
    def make(cls, path: Path, num_blocks: int, block_bytes: int, fingerprint: bytes) -> Segment:
        """A new file with nothing in it, laid out whole; it stands at `path` when it is ready."""
        partial = path.with_suffix(".partial")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(partial, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, segment_bytes(num_blocks, block_bytes))
            _write_all(descriptor, _head(num_blocks, block_bytes, fingerprint), 0)
            os.rename(partial, path)
        except OSError:
            os.close(descriptor)
            partial.unlink(missing_ok=True)
            raise
        return cls(descriptor, _open_direct(path), num_blocks, block_bytes)

    @classmethod
    def open(
        cls, path: Path, num_blocks: int, block_bytes: int, fingerprint: bytes
    ) -> Segment | None:
        """The file at `path`; None if there is none, or it is not of this size and fingerprint."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        found = os.fstat(descriptor)
        wanted = _head(num_blocks, block_bytes, fingerprint)
        fits = (
            not danger(found)
            and found.st_size == segment_bytes(num_blocks, block_bytes)
            and os.pread(descriptor, len(wanted), 0) == wanted
        )
        if not fits:
            os.close(descriptor)
            return None
        return cls(descriptor, _open_direct(path), num_blocks, block_bytes)

    def entries(self) -> Iterator[tuple[int, bytes, int]]:
        """(age, digest, block) of each whole entry of the table."""
        table = os.pread(self._descriptor, self.num_blocks * ENTRY_BYTES, PAGE)
        for block in range(len(table) // ENTRY_BYTES):
            raw = table[block * ENTRY_BYTES : block * ENTRY_BYTES + ENTRY.size + CHECK.size]
            if (entry := _entry(raw)) is not None:
                digest, age, _, _ = entry
                yield age, digest, block

    def save(self, block: int, digest: bytes, raw: Bytes, age: int) -> None:
        """Put a block there."""
        self.wipe(block)
        _write_all(self._descriptor, raw.data, self._first + block * self._stride)
        body = ENTRY.pack(digest, age, zlib.crc32(raw.data), 0)
        _write_all(self._descriptor, body + CHECK.pack(zlib.crc32(body)), _entry_at(block))

    def read(self, block: int, pages: Bytes) -> bytes | None:
        """Read it into pages [stride_of(block_bytes)], which begin with a page; its digest, None if
        nothing whole lies there. May be called in several threads at once."""
        raw = os.pread(self._descriptor, ENTRY.size + CHECK.size, _entry_at(block))
        entry = _entry(raw)
        if entry is None:
            return None
        at, content = self._first + block * self._stride, pages.data[: self._block_bytes]
        if not self._read_cached(content, at) and not self._read_direct(pages.data, at):
            _read_all(self._descriptor, content, at)
        return entry[0] if zlib.crc32(content) == entry[2] else None

    def _read_cached(self, content: memoryview, at: int) -> bool:
        """Whether all of it was in the page cache, and now is in `content`."""
        if not self._may_be_direct:
            return False  # it is read the one way there is
        try:
            return os.preadv(self._descriptor, [content], at, os.RWF_NOWAIT) == len(content)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            return False

    def _read_direct(self, content: memoryview, at: int) -> bool:
        """Whether it could be read past the page cache, and now is in `content`."""
        if self._direct is None or not self._may_be_direct:
            return False
        try:
            _read_all(self._direct, content, at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._may_be_direct = False  # pages are not enough for this file system
        return self._may_be_direct

    def wipe(self, block: int) -> None:
        """Nothing lies there any more."""
        _write_all(self._descriptor, bytes(ENTRY_BYTES), _entry_at(block))

    def clear(self) -> None:
        """Nothing lies in the file any more."""
        _write_all(self._descriptor, bytes(self.num_blocks * ENTRY_BYTES), PAGE)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)


def stride_of(block_bytes: int) -> int:
    """Bytes between the beginnings of two blocks."""
    return -(-block_bytes // PAGE) * PAGE


def segment_bytes(num_blocks: int, block_bytes: int) -> int:
    """Size of a file."""
    return _first_block(num_blocks) + num_blocks * stride_of(block_bytes)


def _first_block(num_blocks: int) -> int:
    return PAGE + -(-num_blocks * ENTRY_BYTES // PAGE) * PAGE


def _entry_at(block: int) -> int:
    return PAGE + block * ENTRY_BYTES


def _entry(raw: bytes) -> tuple[bytes, int, int, int] | None:
    """The entry, None where there is none, or not a whole one."""
    body, check = raw[: ENTRY.size], raw[ENTRY.size :]
    if len(check) != CHECK.size or not any(body) or CHECK.unpack(check)[0] != zlib.crc32(body):
        return None
    digest, age, checksum, zero = ENTRY.unpack(body)
    return digest, age, checksum, zero


def _head(num_blocks: int, block_bytes: int, fingerprint: bytes) -> bytes:
    body = HEAD.pack(
        MAGIC,
        VERSION,
        num_blocks,
        block_bytes,
        stride_of(block_bytes),
        fingerprint.ljust(32, b"\0"),
    )
    return body + CHECK.pack(zlib.crc32(body))


def _open_direct(path: Path) -> int | None:
    """A descriptor that reads past the page cache; None where the file system has none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None


def _read_all(descriptor: int, content: memoryview, at: int) -> None:
    done = 0
    while done < len(content):
        count = os.preadv(descriptor, [content[done:]], at + done)
        if not count:
            raise OSError(errno.EIO, "the file ends before the block does")
        done += count


def _write_all(descriptor: int, content: bytes | memoryview, at: int) -> None:
    view = memoryview(content).cast("B")
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count

"""Segment: one file of a disk tier with a fixed number of blocks, and its layout on disk.

    head    4096 bytes: MAGIC, version, number of blocks, their size and stride, the fingerprint of
            what computes such blocks, and a checksum of the head
    table   64 bytes a block: digest, age, checksum of the block's bytes, checksum of the entry
    blocks  at multiples of 4096

The whole file is allocated when it is created, so a disk that fills up later cannot truncate it. An
entry is erased before its block is written and written after it: after a crash, in whatever order
the pages reached the disk, an incomplete block has an entry or a checksum that does not match.

Blocks are read and written by preadv and pwrite, not through a mapping: both copy from the page
cache at the same speed, but a failing disk is an OSError in one case and ends the process (SIGBUS)
in the other. Blocks that are not in the page cache are read with O_DIRECT where the file system
supports it: they are copied to the pool anyway, and a second copy in the page cache costs memory.
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
    """An open segment. Methods raise OSError where the disk fails; the owner closes it.

    direct: a descriptor of the same file opened with O_DIRECT, or None.
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
        """Create an empty segment, fully allocated, and move it to `path` when it is complete."""
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
        """Open the segment at `path`; None if missing or of another size or fingerprint."""
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
        """Yield (age, digest, block) of each intact entry of the table."""
        table = os.pread(self._descriptor, self.num_blocks * ENTRY_BYTES, PAGE)
        for block in range(len(table) // ENTRY_BYTES):
            raw = table[block * ENTRY_BYTES : block * ENTRY_BYTES + ENTRY.size + CHECK.size]
            if (entry := _entry(raw)) is not None:
                digest, age, _, _ = entry
                yield age, digest, block

    def save(self, block: int, digest: bytes, raw: Bytes, age: int) -> None:
        """Write a block and its entry."""
        self.wipe(block)
        _write_all(self._descriptor, raw.data, self._first + block * self._stride)
        body = ENTRY.pack(digest, age, zlib.crc32(raw.data), 0)
        _write_all(self._descriptor, body + CHECK.pack(zlib.crc32(body)), _entry_at(block))

    def read(self, block: int, pages: Bytes) -> bytes | None:
        """Read a block and return its digest; None if it is missing or damaged.

        pages: page-aligned memory, [stride_of(block_bytes)]. Thread-safe.
        """
        raw = os.pread(self._descriptor, ENTRY.size + CHECK.size, _entry_at(block))
        entry = _entry(raw)
        if entry is None:
            return None
        at, content = self._first + block * self._stride, pages.data[: self._block_bytes]
        if not self._read_cached(content, at) and not self._read_direct(pages.data, at):
            _read_all(self._descriptor, content, at)
        return entry[0] if zlib.crc32(content) == entry[2] else None

    def _read_cached(self, content: memoryview, at: int) -> bool:
        """Read the block from the page cache; return False unless all of it was there."""
        if not self._may_be_direct:
            return False  # without O_DIRECT one ordinary read does both
        try:
            return os.preadv(self._descriptor, [content], at, os.RWF_NOWAIT) == len(content)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            return False

    def _read_direct(self, content: memoryview, at: int) -> bool:
        """Read the block with O_DIRECT; return False where that is not supported."""
        if self._direct is None or not self._may_be_direct:
            return False
        try:
            _read_all(self._direct, content, at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._may_be_direct = False  # this file system needs a larger alignment
        return self._may_be_direct

    def wipe(self, block: int) -> None:
        """Erase the entry of a block."""
        _write_all(self._descriptor, bytes(ENTRY_BYTES), _entry_at(block))

    def clear(self) -> None:
        """Erase all entries."""
        _write_all(self._descriptor, bytes(self.num_blocks * ENTRY_BYTES), PAGE)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)


def stride_of(block_bytes: int) -> int:
    """Return the distance in bytes between the starts of two blocks."""
    return -(-block_bytes // PAGE) * PAGE


def segment_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return the size of a segment in bytes."""
    return _first_block(num_blocks) + num_blocks * stride_of(block_bytes)


def _first_block(num_blocks: int) -> int:
    return PAGE + -(-num_blocks * ENTRY_BYTES // PAGE) * PAGE


def _entry_at(block: int) -> int:
    return PAGE + block * ENTRY_BYTES


def _entry(raw: bytes) -> tuple[bytes, int, int, int] | None:
    """Unpack an entry; None where it is empty or damaged."""
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
    """Open with O_DIRECT; None where the file system does not support it."""
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

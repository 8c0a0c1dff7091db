"""DiskStore: a tier in one folder of one's own: a key, a lock, and files of blocks.

    lock             held by the process that uses the folder; it says which
    key              16 secret bytes, of which the digests are made (quire.cache.digest): with
                     another key nothing would be found again
    segment-0000.kv  blocks (segment.py), made when the first of them is needed

Blocks of another model, precision, layout or instruction set have another fingerprint: they are
never read, and give way when their room is needed. Always holds: all segments together take no
more than the bytes given.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.base.own_folder import danger
from quire.transfer.segment import Segment, segment_bytes

Bytes = NDArray[np.uint8]

SEGMENT_BYTES = 256 << 20
KEY_BYTES = 16


class TierFolder:
    """A folder that is this process's alone until it is closed. hash_key: kept from run to run.

    Raises SettingError where it cannot be used: in use, open to others' writing, or read-only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path)
        try:
            self.hash_key = _key(path)
        except OSError as error:
            os.close(self._lock)
            raise _unusable(path, error) from error

    def close(self) -> None:
        """Let others use it."""
        os.close(self._lock)


class DiskStore:
    """A BlockStore (see store.py) in a folder, which it closes.

    Raises SettingError where the folder cannot be read, or the bytes are too few for a block.
    """

    def __init__(
        self,
        folder: TierFolder,
        *,
        max_bytes: int,
        block_bytes: int,
        fingerprint: bytes,
        most_segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder, self._path, self.block_bytes = folder, folder.path, block_bytes
        self._max_bytes, self._fingerprint = max_bytes, fingerprint
        self._per_segment = _fitting(min(most_segment_bytes, max_bytes), block_bytes)
        if not self._per_segment:
            # One block may be larger than a segment is meant to be.
            self._per_segment = int(segment_bytes(1, block_bytes) <= max_bytes)
        if not self._per_segment:
            raise SettingError(
                f"kv_tier_bytes is {max_bytes}; a block takes {segment_bytes(1, block_bytes)} "
                "bytes: give the tier more"
            )
        whole = segment_bytes(self._per_segment, block_bytes)
        self.num_blocks = max_bytes // whole * self._per_segment
        self._segments: dict[int, Segment] = {}
        self._age = 0
        try:
            self._open_segments()
        except OSError as error:
            raise _unusable(folder.path, error) from error

    def held(self) -> Sequence[tuple[bytes, int]]:
        """See BlockStore."""
        aged = [
            (age, digest, number * self._per_segment + block)
            for number, segment in self._segments.items()
            for age, digest, block in segment.entries()
        ]
        aged.sort()
        self._age = aged[-1][0] if aged else 0
        newest = {digest: place for _, digest, place in aged}  # one place a digest
        return [(digest, place) for _, digest, place in aged if newest[digest] == place]

    def save(self, place: int, digest: bytes, raw: Bytes) -> None:
        """See BlockStore."""
        number, block = divmod(place, self._per_segment)
        segment = self._segments.get(number) or self._make(number)
        self._age += 1
        segment.save(block, digest, raw, self._age)

    def fetch(self, place: int, digest: bytes, out: Bytes) -> bool:
        """See BlockStore."""
        number, block = divmod(place, self._per_segment)
        segment = self._segments.get(number)
        if segment is None:
            return False
        if not segment.fetch(block, digest, out):
            segment.wipe(block)
            return False
        return True

    def expect(self, places: Sequence[int]) -> None:
        """See BlockStore."""
        for first, count in _runs(places):
            while count:
                number, block = divmod(first, self._per_segment)
                part = min(count, self._per_segment - block)
                if (segment := self._segments.get(number)) is not None:
                    segment.expect(block, part)
                first, count = first + part, count - part

    def clear(self) -> None:
        """See BlockStore."""
        for segment in self._segments.values():
            segment.clear()

    def close(self) -> None:
        """Close the files and let others use the folder."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._folder.close()

    def _open_segments(self) -> None:
        """Those that are ours; what lies beyond the bytes given is deleted."""
        for path in _segment_files(self._path):
            number = int(path.stem.rpartition("-")[2])
            if number >= self.num_blocks // self._per_segment:
                path.unlink()
                continue
            segment = Segment.open(path, self._per_segment, self.block_bytes, self._fingerprint)
            if segment is not None:
                self._segments[number] = segment

    def _make(self, number: int) -> Segment:
        """A new segment, after others' have given way."""
        path = self._path / f"segment-{number:04d}.kv"
        path.unlink(missing_ok=True)
        needed = segment_bytes(self._per_segment, self.block_bytes)
        own = {self._path / f"segment-{mine:04d}.kv" for mine in self._segments}
        others = [file for file in _segment_files(self._path) if file not in own]
        others.sort(key=lambda file: file.stat().st_mtime_ns)
        taken = len(own) * needed + sum(file.stat().st_size for file in others)
        while others and taken + needed > self._max_bytes:
            taken -= others[0].stat().st_size
            others.pop(0).unlink()
        segment = Segment.make(path, self._per_segment, self.block_bytes, self._fingerprint)
        self._segments[number] = segment
        return segment


def _segment_files(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.glob("segment-*.kv") if file.stem.rpartition("-")[2].isdigit()
    )


def _fitting(most_bytes: int, block_bytes: int) -> int:
    """Most blocks of a segment of at most `most_bytes`."""
    count = most_bytes // block_bytes
    while count and segment_bytes(count, block_bytes) > most_bytes:
        count -= 1
    return count


def _locked(folder: Path) -> int:
    """The folder's lock, open and held."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := danger(folder.stat()):
            raise SettingError(
                f"kv_tier_path: {folder}: {why}, who could change a model's answers unseen; take a "
                "folder of your own, or chmod 700 it"
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(folder / "lock", flags, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise _unusable(folder, error) from error
        raise SettingError(
            f"kv_tier_path: {folder} is in use by another engine (process {holder}); give each "
            "engine a folder of its own"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _key(folder: Path) -> bytes:
    """The folder's key; made where there is none, or none that is whole and secret."""
    path = folder / "key"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _new_key(path)
    try:
        mode, key = os.fstat(descriptor).st_mode, os.read(descriptor, KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    return key if len(key) == KEY_BYTES and not mode & 0o077 else _new_key(path)


def _new_key(path: Path) -> bytes:
    key, partial = secrets.token_bytes(KEY_BYTES), path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(partial, flags, 0o600)
    try:
        os.write(descriptor, key)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(partial, path)
    return key


def _unusable(folder: Path, error: OSError) -> SettingError:
    return SettingError(
        f"kv_tier_path: {folder} cannot be used as a tier: {error.strerror or error}; name a "
        "folder you may write to, on a disk with room"
    )


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive places as (first, count), in order."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and place == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((place, 1))
    return found

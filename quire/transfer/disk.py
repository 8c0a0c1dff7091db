"""DiskStore: a tier on disk, in a directory that it locks (folder.py).

Blocks are kept in segments (segment.py), created when the first of their blocks is saved. Segments
of another model, precision, layout or instruction set have another fingerprint: they are never
read, and deleted when their space is needed. Always holds: all segments together take no more than
the given bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import Tier
from quire.base.errors import SettingError
from quire.transfer.folder import TierFolder, segment_files, segment_path, unusable
from quire.transfer.read_ahead import ReadAhead
from quire.transfer.segment import Segment, segment_bytes, stride_of

Bytes = NDArray[np.uint8]

SEGMENT_BYTES = 256 << 20


class DiskStore:
    """A BlockStore (see store.py) in a directory, which `close` closes too.

    Raises SettingError where the directory cannot be read or max_bytes is too small for one block.
    """

    tier = Tier.DISK

    def __init__(
        self,
        folder: TierFolder,
        *,
        max_bytes: int,
        block_bytes: int,
        fingerprint: bytes,
        max_segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder, self._path, self.block_bytes = folder, folder.path, block_bytes
        self._max_bytes, self._fingerprint = max_bytes, fingerprint
        self._per_segment = _fitting(min(max_segment_bytes, max_bytes), block_bytes)
        if not self._per_segment:
            # A single block may exceed the usual size of a segment.
            self._per_segment = int(segment_bytes(1, block_bytes) <= max_bytes)
        if not self._per_segment:
            raise SettingError(
                f"kv_tier_bytes is {max_bytes}; a block takes {segment_bytes(1, block_bytes)} "
                "bytes: give the tier more"
            )
        whole = segment_bytes(self._per_segment, block_bytes)
        self.num_blocks = max_bytes // whole * self._per_segment
        self._segments: dict[int, Segment] = {}
        self._ahead = ReadAhead(self._read, stride_of(block_bytes))
        self._age = 0
        try:
            self._open_segments()
        except OSError as error:
            self.close()
            raise unusable(folder.path, error) from error

    def room(self, place: int) -> None:
        """See BlockStore: places are in files."""

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
        self._ahead.forget(place)
        self._age += 1
        segment.save(block, digest, raw, self._age)

    def fetch(self, place: int, digest: bytes, out: Bytes) -> bool:
        """See BlockStore."""
        if self._ahead.read(place, out) == digest:
            return True
        number, block = divmod(place, self._per_segment)
        if (segment := self._segments.get(number)) is not None:
            segment.wipe(block)
        return False

    def expect(self, places: Sequence[int]) -> None:
        """See BlockStore."""
        self._ahead.expect(places)

    def clear(self) -> None:
        """See BlockStore."""
        self._ahead.forget()
        for segment in self._segments.values():
            segment.clear()

    def close(self) -> None:
        """Close the segments and unlock the directory."""
        self._ahead.close()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._folder.close()

    def _read(self, place: int, pages: Bytes) -> bytes | None:
        number, block = divmod(place, self._per_segment)
        segment = self._segments.get(number)
        return None if segment is None else segment.read(block, pages)

    def _open_segments(self) -> None:
        """Open the segments with our fingerprint; delete those beyond the byte limit."""
        for path, number in segment_files(self._path).items():
            if number >= self.num_blocks // self._per_segment:
                path.unlink()
                continue
            segment = Segment.open(path, self._per_segment, self.block_bytes, self._fingerprint)
            if segment is not None:
                self._segments[number] = segment

    def _make(self, number: int) -> Segment:
        """Create a segment; first delete foreign ones, oldest first, where space is needed."""
        path = segment_path(self._path, number)
        path.unlink(missing_ok=True)
        needed = segment_bytes(self._per_segment, self.block_bytes)
        own = {segment_path(self._path, mine) for mine in self._segments}
        others = [file for file in segment_files(self._path) if file not in own]
        others.sort(key=lambda file: file.stat().st_mtime_ns)
        taken = len(own) * needed + sum(file.stat().st_size for file in others)
        while others and taken + needed > self._max_bytes:
            taken -= others[0].stat().st_size
            others.pop(0).unlink()
        segment = Segment.make(path, self._per_segment, self.block_bytes, self._fingerprint)
        self._segments[number] = segment
        return segment


def _fitting(max_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit into a segment of at most `max_bytes`."""
    count = max_bytes // block_bytes
    while count and segment_bytes(count, block_bytes) > max_bytes:
        count -= 1
    return count

"""Shared memory of two engines on one machine: the store of one, read by the other.

The memory is a file in memory without a name (memfd), which the other process opens through
/proc. So there is nothing to unlink: the system frees it when the last of the two processes has
closed it, however each of them ends. A mapping is kept a little longer than it is read, because the
first touch of its pages takes about as long as a copy of their bytes. Knows no block. Always holds:
what is mapped is the segment that the other side has made, checked by a secret in its first page,
and keeps its size; nothing stays mapped for long without a reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CapacityError
from quire.transfer.links.messages import Segment
from quire.transfer.links.ways import Opener

Bytes = NDArray[np.uint8]

# The first page has the secret; blocks begin after it.
PAGE = 4096
SECRET_BYTES = 32
# A mapping beyond the end of a file ends the process that reads it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CLOSED = -1  # in place of a descriptor
NO_BYTES: Bytes = np.zeros(0, np.uint8)
# How long a mapping outlives its last reader, and how often it is looked whether its engine still
# lives: the memory of one that has ended is kept so much longer.
KEEP_S, LOOK_S = 2.0, 0.25


class OwnSegment:
    """Memory that other processes of this user can map. memory: the bytes after the first page."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = PAGE + num_bytes
        try:
            self._descriptor = os.memfd_create("quire-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, self._num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            whole = np.frombuffer(mmap.mmap(self._descriptor, self._num_bytes), np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"shared memory of {num_bytes} bytes for KV transfers cannot be made: {error}; "
                "lower --kv-transfer-size"
            ) from error
        self._secret = secrets.token_bytes(SECRET_BYTES)
        whole[:SECRET_BYTES] = np.frombuffer(self._secret, np.uint8)
        self.memory: Bytes = whole[PAGE:]

    def message(self) -> Segment:
        """Return what the other side needs to map it."""
        return Segment(os.getpid(), self._descriptor, self._num_bytes, self._secret)

    def close(self) -> None:
        """Close the descriptor, once; the memory is freed with its last mapping."""
        descriptor, self._descriptor = self._descriptor, _CLOSED
        if descriptor != _CLOSED:
            os.close(descriptor)


class MappedSegment:
    """The memory of another process, for reading. Raises OSError where it cannot be mapped."""

    def __init__(self, segment: Segment) -> None:
        self._path = f"/proc/{segment.process_id}/fd/{segment.descriptor}"
        # What is no file does not answer an open at once.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError("the segment could become smaller, which ends what reads it")
            if os.fstat(descriptor).st_size != segment.num_bytes:
                raise OSError("the segment of the other side has another size")
            shared = mmap.mmap(descriptor, segment.num_bytes, prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(str(error)) from error
        finally:
            os.close(descriptor)
        if shared[:SECRET_BYTES] != segment.secret:
            raise OSError("the segment is not that of the other side")
        self._bytes: Bytes = np.frombuffer(shared, np.uint8)
        self.num_bytes = segment.num_bytes - PAGE

    @property
    def is_abandoned(self) -> bool:
        """Whether the other side has closed it, or ended."""
        return not os.path.lexists(self._path)

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Return bytes at an offset after the first page. Raises OSError beyond the end."""
        if not 0 <= offset <= self.num_bytes - num_bytes:
            raise OSError(f"a block lies at {offset}, beyond {self.num_bytes} shared bytes")
        return self._bytes[PAGE + offset : PAGE + offset + num_bytes]

    def close(self) -> None:
        """Let it be unmapped, with the last view; further views are errors."""
        self._bytes, self.num_bytes = NO_BYTES, 0


class MappedSegments:
    """The segments of other engines that are mapped here; any thread may call.

    now_s: a clock. Readers of one segment share its mapping.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._mapped: dict[Segment, MappedSegment] = {}
        self._readers: dict[Segment, int] = {}
        self._unread_s: dict[Segment, float] = {}  # since when those without a reader have none
        self._is_closed = False

    def __len__(self) -> int:
        """How many segments are mapped."""
        return len(self._mapped)

    def opener(self) -> Opener:
        """Return what opens segments for reading."""
        return Opener(Segment, self.open, self.forget_unread)

    def open(self, segment: Segment) -> SegmentReader:
        """Return a reader. Raises OSError where the segment cannot be mapped."""
        with self._lock:
            if self._is_closed:
                raise OSError("no segment is mapped any more: the engine ends")
            if segment not in self._mapped:
                self._mapped[segment] = MappedSegment(segment)
            self._readers[segment] = self._readers.get(segment, 0) + 1
            self._unread_s.pop(segment, None)
            return SegmentReader(self, segment, self._mapped[segment])

    def ended(self, segment: Segment) -> None:
        """Note that a reader has ended; unmap what is due, since all threads may have jobs."""
        with self._lock:
            if segment not in self._readers:
                return  # all were closed
            self._readers[segment] -= 1
            if not self._readers[segment]:
                del self._readers[segment]
                self._unread_s[segment] = self._now_s()
        self.forget_unread()

    def close(self) -> None:
        """Unmap all, and map nothing any more; what a reader views is unmapped with its view."""
        with self._lock:
            self._is_closed = True
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped.clear()
            self._readers.clear()
            self._unread_s.clear()

    def forget_unread(self) -> float | None:
        """Unmap what has had no reader for KEEP_S, or was abandoned; return when to look again.

        None: nothing is mapped without a reader.
        """
        with self._lock:
            due_s = self._now_s() - KEEP_S
            for segment, since_s in [*self._unread_s.items()]:
                if since_s <= due_s or self._mapped[segment].is_abandoned:
                    del self._unread_s[segment]
                    self._mapped.pop(segment).close()
            left_s = (since_s - due_s for since_s in self._unread_s.values())
            return min((min(one, LOOK_S) for one in left_s), default=None)


class SegmentReader:
    """A Reader (see ways.py) of one segment."""

    ahead = 0

    def __init__(self, segments: MappedSegments, segment: Segment, mapped: MappedSegment) -> None:
        self._segments, self._segment = segments, segment
        self._mapped: MappedSegment | None = mapped

    def expect(self, offset: int) -> None:
        """See Reader: what is mapped needs no reading."""

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """See Reader."""
        if self._mapped is None:
            raise OSError("a reader of shared memory was closed")
        return self._mapped.view(offset, num_bytes)

    def close(self) -> None:
        """See Reader; a second call does nothing."""
        if self._mapped is not None:
            self._mapped = None
            self._segments.ended(self._segment)

"""Ranks on one machine that exchange through shared memory: native/src/rank_group.cc.

A segment is a file in memory without a name: it is passed to other processes as a descriptor, and
the system frees it with the last of them, however they end. It has huge pages where the system
gives some (huge_pages.py). Knows no program and no process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire import _native
from quire.base.errors import CapacityError, DeviceLost
from quire.base.log import Log
from quire.comm.communicator import Bytes
from quire.comm.huge_pages import Near, advise, anywhere, pages_of, reserved_file

# The longest wait for a rank that responds but has not come; a rank that does not is found sooner.
TIMEOUT_S = 60.0
# Of why a rank fails; not more than native/src/rank_sockets.cc sends (kMaxReason).
_MAX_REASON_BYTES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSizes:
    """What fits: a part of a rank in one exchange, and a message."""

    slot_bytes: int
    message_bytes: int

    def total(self, degree: int) -> int:
        """Return the bytes of a segment for `degree` ranks."""
        return _native.rank_group_bytes(
            degree, slot_bytes=self.slot_bytes, message_bytes=self.message_bytes
        )

    def writer(self, byte: int, degree: int) -> int:
        """Return the rank that writes most of the huge page at a byte: the slots of ranks, in
        order, come first (but for some words), then the messages of rank 0, and links."""
        rank = byte // (2 * self.slot_bytes)
        return rank if rank < degree else 0


def create_segment(
    degree: int,
    sizes: SegmentSizes,
    *,
    link_bytes: int = 0,
    near: Near = anywhere,
) -> int:
    """Return the descriptor of a new segment, zero-filled, of these bytes or some more; the caller
    closes it.

    link_bytes: of links between ranks, after the rest (quire/comm/links.py). near: a rank, so that
    it has reserved huge pages of its own NUMA node; of usual pages it writes its own ones first.

    Raises CapacityError where there is no memory for it.
    """
    num_bytes = sizes.total(degree) + link_bytes
    reserved = reserved_file(
        "quire-ranks", num_bytes, near=lambda byte: near(sizes.writer(byte, degree))
    )
    if reserved is not None:
        return reserved
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
        else:
            descriptor, path = tempfile.mkstemp(prefix="quire-ranks-")
            os.unlink(path)
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        raise _no_memory(degree, sizes, error) from error
    return descriptor


def _no_memory(degree: int, sizes: SegmentSizes, error: Exception) -> CapacityError:
    return CapacityError(
        f"shared memory of {sizes.total(degree)} bytes for {degree} ranks cannot be made: {error}; "
        "lower the number of ranks, or max_num_seqs and max_model_len, by which it grows"
    )


class SharedMemoryRank:
    """A Communicator (see communicator.py) on a segment; `native` is what kernels exchange with.

    timeout_s: the longest wait for a rank that responds. members: how many ranks gather together,
    from each multiple of it on; 0 for all. Rank 0 sends its messages to those of its own group.
    memory: of the whole segment, links included. pages: its pages, in words.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        rank: int,
        degree: int,
        sizes: SegmentSizes,
        timeout_s: float = TIMEOUT_S,
        members: int = 0,
    ) -> None:
        self.rank, self.degree = rank, degree
        self._on_abort: list[Callable[[], None]] = []
        try:
            mapped = mmap.mmap(descriptor, 0)
            self.pages = pages_of(descriptor)
        except (OSError, ValueError) as error:
            raise _no_memory(degree, sizes, error) from error
        advise(mapped)
        self.memory = np.frombuffer(mapped, np.uint8)
        self.native = _native.RankGroup(
            self.memory,
            rank=rank,
            degree=degree,
            slot_bytes=sizes.slot_bytes,
            message_bytes=sizes.message_bytes,
            timeout_s=timeout_s,
            members=members,
        )

    def all_gather(self, own: Bytes) -> Bytes:
        """See Communicator."""
        gathered = np.empty((self.native.members, len(own)), np.uint8)
        try:
            self.native.all_gather(own, gathered)
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error
        return gathered

    def barrier(self) -> None:
        """See Communicator."""
        try:
            self.native.barrier()
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error

    def broadcast(self, message: bytes | None) -> bytes:
        """See Communicator."""
        try:
            if message is None:
                return bytes(self.native.receive())
            self.native.send(np.frombuffer(message, np.uint8))
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error
        return message

    def abort(self, reason: str = "") -> None:
        """See Communicator. reason: why this rank fails, for those connected by sockets; what is
        no text (as of a path) is replaced, and the end of a long one is cut."""
        short = reason.encode(errors="replace")[:_MAX_REASON_BYTES]
        self.native.abort(short.decode(errors="ignore"))
        for call in self._on_abort:
            try:
                call()
            except Exception as error:  # noqa: BLE001  the others are called all the same
                Log("ranks").warning(
                    "an exchange could not be aborted",
                    error=f"{type(error).__name__}: {error}",
                )

    def on_abort(self, call: Callable[[], None]) -> None:
        """Call this after every abort of this rank, in its thread."""
        self._on_abort.append(call)

    def close(self) -> None:
        """See Communicator."""
        del self.native

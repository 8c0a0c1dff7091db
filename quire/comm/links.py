"""Links: from one rank of a group to another, in one direction (native/src/rank_link.cc).

Rows of a step go to the next stage of a pipeline by operations of the compiled module; messages are
bytes. Links lie in the segment of their group, after what that uses. Knows no program and no
process. Always holds: a wait ends with DeviceLost if the rank at the other end is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.errors import CapacityError, DeviceLost
from quire.comm.shared_memory import SharedMemoryRank

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSizes:
    """A ring of `slots`, each of which holds some rows, or a message."""

    slot_bytes: int
    slots: int

    @property
    def total(self) -> int:
        """Bytes of one link, up to where another may begin."""
        num_bytes = _native.rank_link_bytes(slot_bytes=self.slot_bytes, slots=self.slots)
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class LinkMemory:
    """The links in the segment of a group, from `first_byte` on: `num_rows` for rows, then
    `num_messages` for messages, by number."""

    def __init__(
        self,
        group: SharedMemoryRank,
        *,
        first_byte: int,
        rows: LinkSizes,
        messages: LinkSizes,
        num_rows: int,
        num_messages: int,
    ) -> None:
        self._rows, self._messages, self._num_rows = rows, messages, num_rows
        total = first_byte + num_rows * rows.total + num_messages * messages.total
        if total > len(group.memory):
            raise CapacityError(
                f"shared memory of {total} bytes for links between ranks cannot be used: there are "
                f"{len(group.memory)}; lower pipeline_parallel_size, or max_num_seqs and "
                "max_model_len, by which it grows"
            )
        # Of the same mapping as the group: ranks without this memory get it by its place there.
        self._memory: NDArray[np.uint8] = group.memory[first_byte:]

    def rows(self, number: int, group: SharedMemoryRank, *, peer: int, sends: bool) -> Link:
        """Return an end of a link for rows."""
        first = number * self._rows.total
        return Link(group, self._memory[first:], self._rows, peer=peer, sends=sends)

    def messages(self, number: int, group: SharedMemoryRank, *, peer: int, sends: bool) -> Link:
        """Return an end of a link for messages."""
        first = self._num_rows * self._rows.total + number * self._messages.total
        return Link(group, self._memory[first:], self._messages, peer=peer, sends=sends)


class Link:
    """One end; `native` is what operations move rows through. peer: the rank at the other end."""

    def __init__(
        self,
        group: SharedMemoryRank,
        memory: NDArray[np.uint8],
        sizes: LinkSizes,
        *,
        peer: int,
        sends: bool,
    ) -> None:
        self.native = _native.RankLink(
            group.native,
            memory[: sizes.total],
            slot_bytes=sizes.slot_bytes,
            slots=sizes.slots,
            peer=peer,
            sends=sends,
        )
        self._copier: _native.Pool | None = None

    def reject(self) -> None:
        """Let the other end reject the step too."""
        try:
            self.native.reject()
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error

    def send_rows(self, rows: NDArray[np.uint8]) -> None:
        """Send rows [rows, bytes] of the step that was begun."""
        try:
            self.native.send_rows(rows, self._pool())
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error

    def receive_rows(self, rows: NDArray[np.uint8]) -> None:
        """Fill rows [rows, bytes]. Raises ValueError where the other end rejects the step."""
        try:
            self.native.receive_rows(rows, self._pool())
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error

    def send(self, message: bytes) -> None:
        """Send a message; waits while the ring is full."""
        try:
            self.native.send_message(np.frombuffer(message, np.uint8))
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error

    def receive(self) -> bytes:
        """Return the next message; waits for it without limit."""
        try:
            return self.native.receive_message()
        except _native.RankLost as error:
            raise DeviceLost(str(error)) from error

    def _pool(self) -> _native.Pool:
        """Return what copies rows, where it is not an operation of the compiled module: this
        thread."""
        if self._copier is None:
            self._copier = _native.Pool(1)
        return self._copier

"""What the executor of a rank exchanges with other ranks, as tensors: columns with those of its
group, rows with the stages of a pipeline beside it.

HostExchange and HostLink go through host memory and a transport of quire/comm (shared memory,
sockets); process_group.py goes from device to device. Knows no program and no process. Always
holds: calls are collective and in one order on all ranks of a group, and no byte changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.comm.communicator import Communicator, RowLink

Bytes = NDArray[np.uint8]


class TensorExchange(Protocol):
    """One rank's end; calls are queued in the current stream. is_captured: whether they can be part
    of a captured graph."""

    is_captured: bool

    @property
    def rank(self) -> int:
        """This rank's place in its group."""

    @property
    def degree(self) -> int:
        """How many ranks gather together."""

    def connect(self) -> None:
        """Meet the other ranks; before the first call. Raises DeviceLost."""

    def all_gather(self, own: Tensor, every: Tensor) -> None:
        """Fill every [degree, ...] with the contiguous `own` of all ranks, in their order."""

    def all_to_all(self, own: Tensor, every: Tensor) -> None:
        """Give each rank r its part own[r] of own [degree, ...]; fill every [degree, ...] with the
        parts of all ranks for this one, in their order. Both are contiguous, of one size."""

    def broadcast(self, values: Tensor) -> None:
        """Make contiguous values those of the first rank."""

    def close(self) -> None:
        """Leave; further calls are errors."""


class TensorLink(Protocol):
    """From one stage to the next, in one direction."""

    def send(self, rows: Tensor) -> None:
        """Hand on rows [R, N]."""

    def receive(self, rows: Tensor) -> None:
        """Fill rows [R, N] with what the other end sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnds:
    """What one rank exchanges through; None: there is no such other rank."""

    exchange: TensorExchange | None = None
    source: TensorLink | None = None
    target: TensorLink | None = None

    @property
    def is_captured(self) -> bool:
        """Whether steps can be captured, exchanges included."""
        if self.source is not None or self.target is not None:
            return False
        return self.exchange is None or self.exchange.is_captured


ALONE = RankEnds()


class HostExchange:
    """A TensorExchange over a Communicator: tensors of a device pass through host memory."""

    is_captured = False

    def __init__(self, group: Communicator, *, rank: int, degree: int) -> None:
        self._group, self.rank, self.degree = group, rank, degree

    def connect(self) -> None:
        """See TensorExchange: the group has met already."""

    def all_gather(self, own: Tensor, every: Tensor) -> None:
        """See TensorExchange."""
        if own.numel():
            gathered = self._group.all_gather(_bytes_of(own))
            every.copy_(torch.from_numpy(gathered).view(own.dtype).view(every.shape))

    def all_to_all(self, own: Tensor, every: Tensor) -> None:
        """See TensorExchange; the parts for other ranks come too, since groups only gather."""
        if own.numel():
            gathered = torch.from_numpy(self._group.all_gather(_bytes_of(own)))
            parts = gathered.view(own.dtype).view(self.degree, *own.shape)
            every.copy_(parts[:, self.rank])

    def broadcast(self, values: Tensor) -> None:
        """See TensorExchange."""
        if values.numel():
            first = self._group.all_gather(_bytes_of(values))[0]
            values.copy_(torch.from_numpy(first).view(values.dtype).view(values.shape))

    def close(self) -> None:
        """See TensorExchange: the group belongs to the executor's maker."""


class HostLink:
    """A TensorLink over a RowLink."""

    def __init__(self, link: RowLink) -> None:
        self._link = link

    def send(self, rows: Tensor) -> None:
        """See TensorLink."""
        if rows.numel():
            self._link.send_rows(_bytes_of(rows.contiguous()).reshape(len(rows), -1))

    def receive(self, rows: Tensor) -> None:
        """See TensorLink."""
        if rows.numel():
            here = torch.empty(rows.shape, dtype=rows.dtype)
            self._link.receive_rows(_bytes_of(here).reshape(len(rows), -1))
            rows.copy_(here)


def exchange_first(exchange: TensorExchange, device: torch.device) -> None:
    """Let the library of an exchange take its own memory of a device, before the KV pool takes
    the rest."""
    own = torch.zeros(1, dtype=torch.int32, device=device)
    exchange.all_gather(own, own.new_empty(exchange.degree))
    exchange.broadcast(own)


def _bytes_of(values: Tensor) -> Bytes:
    """Return the bytes of contiguous values: the same memory on the CPU, a copy of a device's."""
    flat: Bytes = values.cpu().view(-1).view(torch.uint8).numpy()
    return flat

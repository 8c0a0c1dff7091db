"""Place: all that bound operations read and write, at fixed addresses.

Knows a program's tables and tensors; no operation and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.execute.executor import StepLimits
from quire.execute.gpu.exchange import RankEnds
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.load import Loaded
from quire.execute.gpu.step_buffers import Counts, StepBuffers
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.program import Program
from quire.program.tensors import Rows, View

Call = Callable[[Counts], None]


@dataclass(frozen=True, slots=True)
class GatherBuffers:
    """Memory for one exchange, which all of a program use in turn: bytes of this rank's part, and
    of all ranks' parts."""

    own: Tensor
    every: Tensor

    @classmethod
    def of(cls, program: Program, limits: StepLimits, device: torch.device) -> GatherBuffers:
        """Room for the largest exchange."""
        sizes = list(_sizes(program, limits))
        own = max((size for size, _ in sizes), default=0)
        every = max((size * degree for size, degree in sizes), default=0)
        return cls(
            own=torch.empty(own, dtype=torch.uint8, device=device),
            every=torch.empty(every, dtype=torch.uint8, device=device),
        )

    @staticmethod
    def num_bytes(program: Program, limits: StepLimits) -> int:
        """Return the bytes of both."""
        sizes = list(_sizes(program, limits))
        own = max((size for size, _ in sizes), default=0)
        return own + max((size * degree for size, degree in sizes), default=0)

    def parts(
        self, rows: int, width: int, degree: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return own [rows, width] and every [degree, rows, width]."""
        num_bytes = rows * width * dtype.itemsize
        own = self.own[:num_bytes].view(dtype).view(rows, width)
        return own, self.every[: degree * num_bytes].view(dtype).view(degree, rows, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """All that operations read and write. buffers: [max rows, width] by index. ropes: cosines and
    sines [positions, half]. pool: set when the cache is made, after that never another. ends: what
    is exchanged with other ranks through, by way of `room`."""

    program: Program
    buffers: Sequence[Tensor]
    weights: Loaded
    ropes: Sequence[tuple[Tensor, Tensor]]
    step: StepBuffers
    pool: Callable[[], CachePool]
    exact: bool
    ends: RankEnds
    room: GatherBuffers

    def of(self, view: View, counts: Counts) -> Tensor:
        """The view's rows of this step."""
        rows = num_rows(view.buffer.rows, counts)
        return self.buffers[view.buffer.index][:rows, view.offset : view.offset + view.width]

    def vector(self, name: str | None) -> Tensor | None:
        """A weight that may not be there."""
        return None if name is None else self.weights.plain[name]


def num_rows(rows: Rows, counts: Counts) -> int:
    """How many a step has of what a buffer's rows are."""
    return {
        Rows.TOKENS: counts.tokens,
        Rows.SEQUENCES: counts.sequences,
        Rows.SAMPLES: counts.samples,
    }[rows]


def widest_share(op: AllGather) -> int:
    """Return the columns of the largest share."""
    shares = (share_of(op.x.width, op.unit, rank, op.degree) for rank in range(op.degree))
    return max(end - start for start, end in shares)


def _sizes(program: Program, limits: StepLimits) -> Iterator[tuple[int, int]]:
    """Yield the bytes of a rank's part and the number of ranks, of each exchange."""
    for op in program.operations():
        if isinstance(op, AllGather | AllReduce):
            width = widest_share(op) if isinstance(op, AllGather) else op.x.width
            rows = limits.rows(op.x.buffer.rows)
            yield rows * width * op.x.dtype.itemsize, op.degree

"""Place: all that bound operations read and write, at fixed addresses.

Knows a program's tables and tensors; no operation's arithmetic and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.execute.executor import StepLimits
from quire.execute.gpu.exchange import RankEnds
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.load import Loaded
from quire.execute.gpu.step_buffers import Counts, StepBuffers
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.expert_ops import Experts
from quire.program.expert_parallel import mixtures
from quire.program.program import Program
from quire.program.tensors import Rows, View

Call = Callable[[Counts], None]
# Of experts' outputs that are exchanged at once; more rows than these are exchanged in parts.
_OUTPUT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class GatherBuffers:
    """Memory for one exchange, which all of a program use in turn: bytes of what this rank gives,
    and of what it gets."""

    own: Tensor
    every: Tensor

    @classmethod
    def of(cls, program: Program, limits: StepLimits, device: torch.device) -> GatherBuffers:
        """Return room for the largest exchange."""
        own, every = _largest(program, limits)
        return cls(
            own=torch.empty(own, dtype=torch.uint8, device=device),
            every=torch.empty(every, dtype=torch.uint8, device=device),
        )

    @staticmethod
    def num_bytes(program: Program, limits: StepLimits) -> int:
        """Return the bytes of both."""
        return sum(_largest(program, limits))

    def parts(
        self, rows: int, width: int, degree: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return own [rows, width] and every [degree, rows, width]."""
        own, every = self.own.view(dtype), self.every.view(dtype)
        size = rows * width
        return own[:size].view(rows, width), every[: degree * size].view(degree, rows, width)

    def to_each(
        self, rows: int, width: int, degree: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return own and every, each [degree, rows, width]."""
        size = degree * rows * width
        own, every = self.own.view(dtype)[:size], self.every.view(dtype)[:size]
        return own.view(degree, rows, width), every.view(degree, rows, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """All that operations read and write. buffers: [max rows, width] by index. ropes: cosines and
    sines [positions, half]. pool: set when the cache is made, after that never another. ends: what
    is exchanged with other ranks through, by way of `room`. loads: how often rows have chosen each
    expert [E], by the first weight of a mixture."""

    program: Program
    buffers: Sequence[Tensor]
    weights: Loaded
    ropes: Sequence[tuple[Tensor, Tensor]]
    step: StepBuffers
    pool: Callable[[], CachePool]
    exact: bool
    ends: RankEnds
    room: GatherBuffers
    loads: Mapping[str, Tensor]

    def of(self, view: View, counts: Counts) -> Tensor:
        """Return the view's rows of this step."""
        rows = num_rows(view.buffer.rows, counts)
        return self.buffers[view.buffer.index][:rows, view.offset : view.offset + view.width]

    def vector(self, name: str | None) -> Tensor | None:
        """Return a weight that may not be there."""
        return None if name is None else self.weights.plain[name]

    def count_experts(self, op: Experts, experts: Tensor) -> None:
        """Count the chosen experts of rows, -1 for none."""
        if (load := self.loads.get(op.gate_up)) is not None:
            flat = experts.flatten()
            load.scatter_add_(0, flat.clamp(min=0), (flat >= 0).long())


def no_loads(program: Program, device: torch.device) -> dict[str, Tensor]:
    """Return zeros for each expert of a program's mixtures, in order."""
    return {
        op.gate_up: torch.zeros(op.routing.width, dtype=torch.int64, device=device)
        for op in mixtures(program)
    }


def num_rows(rows: Rows, counts: Counts) -> int:
    """Return how many a step has of what a buffer's rows are."""
    return {
        Rows.TOKENS: counts.tokens,
        Rows.SEQUENCES: counts.sequences,
        Rows.SAMPLES: counts.samples,
    }[rows]


def widest_share(op: AllGather) -> int:
    """Return the columns of the largest share."""
    return _widest(op.x.width, op.unit, op.degree)


def rows_exchanged(op: Experts) -> int:
    """Return the rows with outputs that are exchanged at once under expert parallelism."""
    return max(_OUTPUT_BYTES // (op.top_k * op.x.width * op.y.dtype.itemsize), 1)


def _widest(width: int, unit: int, degree: int) -> int:
    shares = (share_of(width, unit, rank, degree) for rank in range(degree))
    return max(end - start for start, end in shares)


def _largest(program: Program, limits: StepLimits) -> tuple[int, int]:
    """Return the bytes of the largest parts of an exchange: what a rank gives, and what it gets.
    Rounded up to whole elements of any type."""
    sizes = [(0, 0), *_sizes(program, limits)]
    own, every = (max(parts) for parts in zip(*sizes, strict=True))
    return own + -own % 8, every + -every % 8


def _sizes(program: Program, limits: StepLimits) -> Iterator[tuple[int, int]]:
    """Yield the bytes of what a rank gives and gets, of each exchange."""
    for op in program.operations():
        if isinstance(op, AllGather | AllReduce):
            width = widest_share(op) if isinstance(op, AllGather) else op.x.width
            own = limits.rows(op.x.buffer.rows) * width * op.x.dtype.itemsize
            yield own, own * op.degree
        elif isinstance(op, Experts) and op.holders:
            rows = min(limits.rows(op.x.buffer.rows), rows_exchanged(op)) * op.top_k
            to_each = rows * _widest(op.x.width, op.unit, op.degree) * op.y.dtype.itemsize
            yield to_each * op.degree, to_each * op.degree
        elif isinstance(op, Experts) and op.degree > 1:
            inner = _widest(program.weights[op.down].columns, op.unit, op.degree)
            own = limits.rows(op.x.buffer.rows) * op.top_k * inner * op.x.dtype.itemsize
            yield own, own * op.degree

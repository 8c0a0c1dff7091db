"""AllGather, by which ranks exchange columns, AllReduce, by which they add up partial results, and
which columns belong to a rank.

Knows no transport. Always holds: AllGather moves bytes and computes nothing, so that no result
depends on the number of ranks, on their order or on the transport. AllReduce adds in the order of
ranks, so that a result depends on their number, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.program.cost import Cost, StepShape
from quire.program.declarations import Declarations
from quire.program.operation import Operation
from quire.program.tensors import View


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnExchange(Operation):
    """What ranks exchange of x[R, N], in place: each has its own columns, `share_of`(N, unit, ...).

    The part that AllGather and AllReduce have in common.
    """

    reads = ("x",)
    writes = ("x",)
    is_row_wise = False

    x: View
    rank: int
    degree: int
    unit: int

    @property
    def own(self) -> View:
        """The columns of this rank."""
        start, end = share_of(self.x.width, self.unit, self.rank, self.degree)
        return self.x.columns(start, end - start)

    def check(self, declared: Declarations) -> None:
        """Check that the rank is one of the ranks, and that each of them has a column."""
        if not 0 <= self.rank < self.degree:
            raise ValueError(f"rank is {self.rank}; there are {self.degree} ranks")
        if self.unit < 1 or -(-self.x.width // self.unit) < self.degree:
            raise ValueError(
                f"{self.x.width} columns in units of {self.unit} are too few for {self.degree} "
                "ranks"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(ColumnExchange):
    """Fill x[R, N] on all ranks: each has computed its own columns.

    A rank sends its columns and receives those of the others.
    """

    kind = "all_gather"

    @property
    def exchanges(self) -> int:
        """See Operation."""
        return 1

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"{self.own.width} of {self.x.width} columns from rank {self.rank} of {self.degree}"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        others = self.x.width - self.own.width
        return Cost(comm_bytes=step.rows(self.x.buffer.rows) * others * self.x.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(ColumnExchange):
    """x[R, N] = the sum of what the ranks have in x, in f32 in the order of ranks, rounded once.

    A rank receives its own columns of all other ranks and adds them up; the sums are then exchanged
    like those of AllGather.
    """

    kind = "all_reduce"

    @property
    def exchanges(self) -> int:
        """See Operation."""
        return 2

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"sum of {self.degree} ranks, in their order"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        rows, own, others = step.rows(self.x.buffer.rows), self.own.width, self.degree - 1
        received = own * others + self.x.width - own
        return Cost(
            other_ops=rows * own * others, comm_bytes=rows * received * self.x.dtype.itemsize
        )


def share_of(width: int, unit: int, rank: int, degree: int) -> tuple[int, int]:
    """Return the columns [start, end) of `width` that belong to a rank.

    Whole units, the last one cut off at `width`; earlier ranks get the units that do not divide.
    native/include/quire/rank_group.h has the same rule.
    """
    units = -(-width // unit)
    start, end = (-(-units * edge // degree) * unit for edge in (rank, rank + 1))
    return min(start, width), min(end, width)


def num_exchanges(ops: Iterable[Operation]) -> int:
    """Return how often ranks wait for each other in a sequence of operations."""
    return sum(op.exchanges for op in ops)

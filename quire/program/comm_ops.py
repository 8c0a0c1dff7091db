"""AllGather, the operation by which ranks exchange columns, and which columns belong to a rank.

Knows no transport. Always holds: an exchange moves bytes and computes nothing, so that no result
depends on the number of ranks, on their order or on the transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.program.cost import Cost, StepShape
from quire.program.declarations import Declarations
from quire.program.operation import Operation
from quire.program.tensors import View


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(Operation):
    """Fill x[R, N] on all ranks: each has computed its own columns, `share_of`(N, unit, ...).

    In place. A rank sends its columns and receives those of the others.
    """

    kind = "all_gather"
    reads = ("x",)
    writes = ("x",)
    is_row_wise = False

    x: View
    rank: int
    degree: int
    unit: int

    @property
    def own(self) -> View:
        """The columns that this rank has computed."""
        start, end = share_of(self.x.width, self.unit, self.rank, self.degree)
        return self.x.columns(start, end - start)

    def check(self, declared: Declarations) -> None:
        """The rank is one of the ranks, and each of them has a column."""
        if not 0 <= self.rank < self.degree:
            raise ValueError(f"rank is {self.rank}; there are {self.degree} ranks")
        if self.unit < 1 or -(-self.x.width // self.unit) < self.degree:
            raise ValueError(
                f"{self.x.width} columns in units of {self.unit} are too few for {self.degree} "
                "ranks"
            )

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"{self.own.width} of {self.x.width} columns from rank {self.rank} of {self.degree}"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        others = self.x.width - self.own.width
        return Cost(comm_bytes=step.rows(self.x.buffer.rows) * others * self.x.dtype.itemsize)


def share_of(width: int, unit: int, rank: int, degree: int) -> tuple[int, int]:
    """Return the columns [start, end) of `width` that belong to a rank.

    Whole units, the last one cut off at `width`; earlier ranks get the units that do not divide.
    native/include/quire/rank_group.h has the same rule.
    """
    units = -(-width // unit)
    start, end = (-(-units * edge // degree) * unit for edge in (rank, rank + 1))
    return min(start, width), min(end, width)

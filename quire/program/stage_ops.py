"""Send and Recv, the operations by which stages of a pipeline hand on the rows of a step.

Knows no transport. Always holds: they move bytes and compute nothing, so that no result depends on
the number of stages or on the transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.program.cost import Cost, StepShape
from quire.program.declarations import Declarations
from quire.program.operation import Operation
from quire.program.tensors import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Operation):
    """Hand x[R, N] to stage `stage`, which has a Recv of as many columns at the same place."""

    kind = "send"
    reads = ("x",)
    writes = ()
    is_row_wise = False

    x: View
    stage: int

    def check(self, declared: Declarations) -> None:
        """Check that the first stage receives nothing."""
        if self.stage < 1:
            raise ValueError(f"stage is {self.stage}; stages after the first receive")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"to stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv(Operation):
    """y[R, N] = what stage `stage` has sent. Its bytes are counted here."""

    kind = "recv"
    reads = ()
    writes = ("y",)
    is_row_wise = False

    y: View
    stage: int

    def check(self, declared: Declarations) -> None:
        """Check that a stage has sent it."""
        if self.stage < 0:
            raise ValueError(f"stage is {self.stage}; stages count from 0")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        return f"from stage {self.stage}"

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        rows = step.rows(self.y.buffer.rows)
        return Cost(comm_bytes=rows * self.y.width * self.y.dtype.itemsize)

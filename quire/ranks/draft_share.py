"""The first layers that draft for a model over ranks: which numbers, and the share of each rank.

Plain records. Knows no executor and no process; the executors are in first_layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.execute.executor import StepLimits
from quire.program.first_layers import num_draft_layers, num_layers
from quire.program.program import Program
from quire.speculative.layer_choice import candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayers:
    """num: how many layers draft; None: rank 0 measures it. limits: the largest pass."""

    num: int | None
    limits: StepLimits

    def nums(self, program: Program) -> tuple[int, ...]:
        """Return how many layers of the program may draft, ascending; rank 0 says with each pass
        how many do."""
        measured = () if self.num is not None else candidates(num_layers(program))
        return tuple(sorted({num_draft_layers(program, self.num), *measured}))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShare:
    """A rank's programs of these layers and the head, by how many they are. limits: the largest
    pass."""

    programs: Mapping[int, Program]
    limits: StepLimits

"""The first layers that draft for a model over ranks: how many, and the share of each rank.

Plain records. Knows no executor and no process; the executors are in first_layers.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.execute.executor import StepLimits
from quire.program.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayers:
    """num: how many layers draft; None: the default share. limits: the largest pass."""

    num: int | None
    limits: StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShare:
    """A rank's program of these layers and the head. limits: the largest pass."""

    program: Program
    limits: StepLimits

"""What a request says of draft tokens (SpeculationParams), and what it gets (Speculation).

Plain numbers, checked where they are read from fields. They change the speed of an answer only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """is_on: whether the server's proposer is asked; None: as the server is set.

    max_drafts: most draft tokens of a step; None: the server's. prediction_ids: the tokens of a
    text that the answer may repeat.
    """

    is_on: bool | None = None
    max_drafts: int | None = None
    prediction_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How tokens of a request are proposed.

    max_drafts: most tokens proposed per step, at least 1. uses_proposer: the engine's proposer is
    asked. prediction_ids: a text that the answer may repeat.
    """

    max_drafts: int
    uses_proposer: bool = True
    prediction_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

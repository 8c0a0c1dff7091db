"""LinearCost: how long a step takes, from the depths and token counts of its rows.

The numbers come from outside (measured, or from the program's operation counts); nothing here reads
a clock. Times are predicted milliseconds. A token at depth p attends to p + 1 positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]

_MAX_TOKENS = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """fixed_ms + tokens * token_ms + attended positions * position_ms + scores * score_ms.

    read_ms: for each position of which a row reads the key and value, once however many of its
    tokens attend to it.
    """

    fixed_ms: float
    token_ms: float
    position_ms: float
    score_ms: float = 0.0
    read_ms: float = 0.0

    def rows_ms(self, starts: Int32s, counts: Int32s, scored: Bools | None = None) -> Float64s:
        """See CostModel."""
        tokens = counts.astype(np.float64)
        positions = tokens * starts + tokens * (tokens + 1.0) / 2.0
        cost: Float64s = tokens * self.token_ms + positions * self.position_ms
        if self.read_ms:
            cost += np.where(counts > 0, starts + tokens, 0.0) * self.read_ms
        return cost if scored is None else cost + tokens * (scored * self.score_ms)

    def row_ms(self, start: int, count: int, *, scored: bool = False) -> float:
        """See CostModel."""
        positions = count * start + count * (count + 1) / 2.0
        cost = count * self.token_ms + positions * self.position_ms
        if count > 0:
            cost += (start + count) * self.read_ms
        return cost + count * self.score_ms * scored

    def max_tokens(self, start: int, budget_ms: float, *, scored: bool = False) -> int:
        """See CostModel: the root of (position_ms / 2) n^2 + (token_ms + ...) n = budget."""
        budget_ms -= start * self.read_ms
        if budget_ms <= 0:
            return 0
        square = self.position_ms / 2.0
        linear = self.token_ms + scored * self.score_ms + self.position_ms * (start + 0.5)
        linear += self.read_ms
        root = math.sqrt(linear * linear + 4.0 * square * budget_ms)
        if 2.0 * budget_ms >= _MAX_TOKENS * (linear + root):  # next to no cost: no quotient
            return _MAX_TOKENS
        return int(2.0 * budget_ms / (linear + root))

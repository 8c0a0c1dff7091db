"""StepBudget: what is left to hand out within one step, in tokens and in predicted time.

Hands out in the order it is given and knows nothing of slots, blocks or requests. Always
holds: the first row that wants tokens gets at least one, however small the budget, so a step
never starves everybody.
"""

from __future__ import annotations

import math

import numpy as np

from quire.scheduler.cost import CostModel, Int32s


class StepBudget:
    """A fresh budget for one step. `tokens` and `ms` say what is left."""

    def __init__(self, tokens: int, ms: float, cost: CostModel | None) -> None:
        self.tokens = tokens
        self._cost = cost if ms > 0 else None
        self.ms = ms - self._cost.fixed_ms if self._cost is not None else math.inf
        self._untouched = True

    @property
    def spent(self) -> bool:
        """Whether nothing further can be handed out."""
        return self.tokens < 1 or (self.ms <= 0 and not self._untouched)

    def hand_out(self, starts: Int32s, wanted: Int32s) -> Int32s:
        """Tokens for each row, in order, until the budget is spent. Takes nothing from it yet."""
        counts = wanted
        if int(wanted.sum()) > self.tokens:
            before = np.cumsum(wanted, dtype=np.int64) - wanted
            counts = np.clip(self.tokens - before, 0, wanted).astype(np.int32)
        if self._cost is None:
            return counts
        return self._cut_to_time(self._cost, starts, counts)

    def take(self, starts: Int32s, counts: Int32s) -> None:
        """Subtract what rows really got."""
        self.tokens -= int(counts.sum())
        self._untouched = self._untouched and not counts.any()
        if self._cost is not None:
            self.ms -= float(self._cost.rows_ms(starts, counts).sum())

    def most_tokens(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens from position `start` on one further row may have."""
        most = min(wanted, self.tokens)
        if self._cost is not None:
            most = min(most, self._cost.most_tokens(start, self.ms))
            most = max(most, int(self._untouched and wanted > 0))
        return most

    def _cut_to_time(self, cost: CostModel, starts: Int32s, counts: Int32s) -> Int32s:
        row_ms = cost.rows_ms(starts, counts)
        until = np.cumsum(row_ms)
        cut = int(np.searchsorted(until, self.ms, side="right"))
        if cut == len(counts):
            return counts
        counts = counts.copy()
        left = self.ms - (float(until[cut - 1]) if cut else 0.0)
        counts[cut] = min(int(counts[cut]), cost.most_tokens(int(starts[cut]), left))
        counts[cut + 1 :] = 0
        wanting = np.flatnonzero(row_ms > 0)
        if not counts.any() and len(wanting):
            counts[wanting[0]] = 1
        return counts

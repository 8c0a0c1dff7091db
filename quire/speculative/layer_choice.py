"""How many of a model's first layers draft best, from what was measured of some numbers of them.

Knows no executor and no clock. A draft costs a pass of the layers and a row to verify, and is worth
the chance that it and all before it are the model's tokens. Always holds: a number is chosen even
where no draft pays; whether any is made is decided step by step (control.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The largest candidate has four fifths of the layers: more cost nearly a step.
SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)
# Observations that the chance of further drafts begins with: those of the first.
PRIOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """step_ms: of a step of one request. row_ms: what each further row of it adds."""

    step_ms: float
    row_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayers:
    """num: layers that drafted. pass_ms: of a pass of one request. agrees [texts, positions]: at
    which positions they chose the model's token."""

    num: int
    pass_ms: float
    agrees: NDArray[np.bool_]

    @property
    def first(self) -> float:
        """The chance that a first draft is right."""
        return float(self.agrees.mean())

    @property
    def further(self) -> float:
        """The chance that a draft behind a right one is right."""
        behind = self.agrees[:, 1:][self.agrees[:, :-1]]
        return (float(behind.sum()) + PRIOR * self.first) / (len(behind) + PRIOR)

    def tokens_per_ms(self, times: StepTimes, max_drafts: int) -> float:
        """Return the rate of one request with the best number of drafts, at least one."""
        tokens, chance, best = 1.0, self.first, 0.0
        for num_drafts in range(1, max_drafts + 1):
            tokens += chance
            chance *= self.further
            ms = times.step_ms + num_drafts * (self.pass_ms + times.row_ms)
            best = max(best, tokens / max(ms, 1e-9))
        return best


def candidates(num_layers: int) -> tuple[int, ...]:
    """Return the numbers of first layers, of at least two, that are measured; ascending."""
    nums = {min(max(round(share * num_layers), 1), num_layers - 1) for share in SHARES}
    return tuple(sorted(nums))


def best_of(
    measured: Sequence[MeasuredLayers], times: StepTimes, max_drafts: int
) -> MeasuredLayers:
    """Return what drafts fastest; of equals the fewest layers."""
    return max(measured, key=lambda one: (one.tokens_per_ms(times, max_drafts), -one.num))

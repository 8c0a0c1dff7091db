"""DraftPrices: what drafts add to the time of a step on this machine, learned from such steps.

A step with drafts takes longer than one without by a part that does not depend on their number (the
host proposes, plans and verifies), a part for each row with drafts, and a part for each draft. The
first two are learned in milliseconds, the third as a multiple of what the step-cost model predicts
for so many tokens. Steps with drafts are no part of the cost model's own fit: its prices are those
of plain steps, against which drafts are judged. Knows no clock: times are arguments. Always holds:
prices are not negative; while no step has drafts, what was learned fades, so that a few slow steps
do not end drafting for good.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
# What a step with drafts leaves of its forerunners' weight: the last 30 or so count.
KEEP = 0.97
# What a step in which drafts did not pay leaves of it.
FADE = 0.99
# Once so many steps are known, a fit waits for so many more, or for so many that fade.
MANY, FEW, FADES_PER_FIT = 16, 8, 32
# A step counts as at most so many times its prediction: one stall must not set the prices.
MAX_TIMES_PREDICTED = 4.0
# The weight of the prior: no host time, drafts as the cost model predicts.
PRIOR_WEIGHT = 0.0001
# About what the host takes of a plain step for drafts: so much counts as one in the fit, in which
# what a single kind of step cannot separate is shared between the prices.
HOST_SHARE = 0.1
_PRIOR: Float64s = np.array([0.0, 0.0, 1.0])


class DraftedStep(NamedTuple):
    """A step with drafts: its rows with drafts, and what the cost model predicts for the step
    without drafts and for the drafts."""

    num_rows: int
    plain_ms: float
    drafts_ms: float


class DraftPrices:
    """once_ms, row_ms: see DraftCost. scale: of the predicted time of drafts."""

    def __init__(self) -> None:
        self.once_ms = self.row_ms = 0.0
        self.scale = 1.0
        self._noted: list[tuple[int, float, float, float]] = []
        self._num_steps = self._num_fades = 0
        self._unit_ms = 0.0  # of the host's prices within the fit
        self._products: Float64s = np.zeros((3, 3))
        self._sums: Float64s = np.zeros(3)

    def note(self, step: DraftedStep, ms: float) -> None:
        """Learn from a step that took `ms`; ignore times of 0."""
        if ms <= 0.0 or step.plain_ms <= 0.0:
            return
        self._noted.append((*step, ms))
        self._num_steps += 1
        if self._num_steps <= MANY or len(self._noted) >= FEW:
            self._learn()

    def added_ms(self, step: DraftedStep) -> float:
        """Return what drafts are predicted to add to a step."""
        return self.once_ms + step.num_rows * self.row_ms + self.scale * step.drafts_ms

    def fade(self) -> None:
        """Note a step in which no drafts were worth their price."""
        self._num_fades += 1
        if self._num_fades >= FADES_PER_FIT:
            self._learn()

    def _learn(self) -> None:
        """Take in the noted steps and fit."""
        left = FADE**self._num_fades * KEEP ** len(self._noted)
        self._products *= left
        self._sums *= left
        if self._noted:
            num_rows, plain_ms, drafts_ms, ms = np.array(self._noted).T
            self._unit_ms = self._unit_ms or HOST_SHARE * float(plain_ms[0])
            expected_ms = plain_ms + self.once_ms + num_rows * self.row_ms + self.scale * drafts_ms
            extra_ms = np.minimum(ms, MAX_TIMES_PREDICTED * expected_ms) - plain_ms
            units = np.full(len(ms), self._unit_ms)
            # Errors count relative to the predicted time, as in the cost model.
            features = np.stack((units, num_rows * units, drafts_ms), axis=1) / expected_ms[:, None]
            weights = KEEP ** np.arange(len(ms))[::-1]
            self._products += (features * weights[:, None]).T @ features
            self._sums += (features * weights[:, None]).T @ (extra_ms / expected_ms)
        self._noted, self._num_fades = [], 0
        once, row, self.scale = self._fit().tolist()
        self.once_ms, self.row_ms = once * self._unit_ms, row * self._unit_ms

    def _fit(self) -> Float64s:
        """Return the prices: least squares, none below 0, near the prior where steps say little."""
        products = self._products + PRIOR_WEIGHT * np.eye(3)
        sums = self._sums + PRIOR_WEIGHT * _PRIOR
        free: NDArray[np.intp] = np.arange(3)
        found: NDArray[np.floating[Any]] = np.zeros(0)
        while len(free):
            found = np.linalg.solve(products[np.ix_(free, free)], sums[free])
            if (found >= 0.0).all():
                break
            free = free[found > 0.0]
        prices = np.zeros(3)
        prices[free] = found[: len(free)]
        return prices

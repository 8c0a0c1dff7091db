"""SpeedEstimate: what steps cost on this machine, learned from the steps that run anyway.

A step is a fixed part, tokens through the trunk, rows through the head, positions attended to and
positions read. Their five prices are a least-squares fit of recent steps' times, held in place by a
prior where no step has separated them yet. Errors count relative to the predicted time, not to the
measured one: dividing by the measured time would weigh slow steps least, and on a busy machine the
fit would lie far below the mean. Knows no clock and no machine: times are arguments. Always holds:
prices are not negative; the first steps set the scale of all of them, so that a prior needs the
right proportions only; a long run of decode steps does not erase the price of prompts. Noting a
step is an append; the fit is made when a price is asked for.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.base.records import PartLayers
from quire.scheduler.cost.step_cost import Bools, Float64s, Int32s, LinearCost
from quire.scheduler.step_budget import StepTimes

# Proportions of a small model on a CPU; the first step sets the scale.
DEFAULT_PRIOR = LinearCost(
    fixed_ms=10.0, token_ms=0.5, position_ms=0.0002, score_ms=0.1, read_ms=0.002
)
_NUM_PRICES = 5
# Once so many steps are known, a fit waits for so many more, although a price is asked for.
_MANY, _FEW = 64, 16
# What a step of the same kind leaves of its forerunners' weight: the last 100 or so count.
_KEEP = 0.99
# A step counts as at most so many times its prediction: one stall must not set the prices.
_MAX_TIMES_PREDICTED = 16.0
# The prior weighs next to nothing, where steps say anything.
_PRIOR_WEIGHT = 0.0001


class SpeedEstimate(StepTimes):
    """A CostModel that learns. prior: initial prices; score_ms is that of a head row."""

    def __init__(self, prior: LinearCost = DEFAULT_PRIOR) -> None:
        super().__init__()
        given = (
            *(prior.fixed_ms, prior.token_ms, prior.score_ms),
            *(prior.position_ms, prior.read_ms),
        )
        # A price of nothing could never be learned.
        self._prior: Float64s = np.maximum(given, max(*given, 1e-6) * 1e-9)
        self._prices: Float64s = self._prior.copy()
        self._linear = prior
        # Of steps without and with rows of several tokens: sums of products, and of features.
        self._products: Float64s = np.zeros((2, _NUM_PRICES, _NUM_PRICES))
        self._sums: Float64s = np.zeros((2, _NUM_PRICES))

    @property
    def now(self) -> LinearCost:
        """The current prices; the same object until steps change them.

        Up to a few steps old once many are known.
        """
        if self._noted and (self.num_steps < _MANY or len(self._noted) >= _FEW):
            self._learn()
        return self._linear

    @property
    def latest(self) -> LinearCost:
        """The prices of the last fit, for what is decided in each step: once many steps are known,
        asking for them makes no fit, so that they are up to MAX_NOTED_STEPS steps old."""
        return self._linear if self.num_steps >= _MANY else self.now

    @property
    def fixed_ms(self) -> float:
        """See CostModel."""
        return self.now.fixed_ms

    def rows_ms(self, starts: Int32s, counts: Int32s, scored: Bools | None = None) -> Float64s:
        """See CostModel."""
        return self.now.rows_ms(starts, counts, scored)

    def row_ms(self, start: int, count: int, *, scored: bool = False) -> float:
        """See CostModel."""
        return self.now.row_ms(start, count, scored=scored)

    def max_tokens(self, start: int, budget_ms: float, *, scored: bool = False) -> int:
        """See CostModel."""
        return self.now.max_tokens(start, budget_ms, scored=scored)

    def step_ms(self, num_rows: float, positions: float) -> float:
        """Return the time of `num_rows` rows of one token each, with `positions` in all."""
        price = self.now
        each_ms = price.token_ms + price.score_ms
        position_ms = price.position_ms + price.read_ms
        return price.fixed_ms + num_rows * each_ms + positions * position_ms

    def span_ms(self, start: int, end: int) -> float:
        """Return what computing positions start .. end - 1 adds to steps."""
        price, tokens = self.now, end - start
        positions = tokens * start + tokens * (tokens + 1) / 2
        return tokens * price.token_ms + positions * price.position_ms

    def tokens_per_s(self, step_tokens: int) -> float:
        """Return the speed of prompts alone, in steps of `step_tokens` from depth 0 on."""
        step_ms = self.now.fixed_ms + self.span_ms(0, step_tokens)
        return 1000.0 * step_tokens / step_ms if step_ms > 0 else math.inf

    def _learn(self) -> None:
        """Take in the noted steps, all at once, and fit."""
        plans = [plan for plan, _, _ in self._noted]
        sizes = np.array([len(plan.slots) for plan in plans])
        firsts = np.cumsum(sizes) - sizes
        counts = np.concatenate([plan.counts for plan in plans]).astype(np.float64)
        depths = np.concatenate([plan.starts for plan in plans])
        features = np.ones((len(plans), _NUM_PRICES))
        features[:, 1] = np.add.reduceat(counts, firsts)
        features[:, 2] = [heads for _, heads, _ in self._noted]
        features[:, 3] = np.add.reduceat(counts * (depths + 0.5 * (counts + 1.0)), firsts)
        features[:, 4] = np.add.reduceat(counts + depths, firsts)
        for row, plan in enumerate(plans):
            if plan.layers is not None:
                features[row] += _layers_features(plan.layers)
        times_ms = np.array([ms for _, _, ms in self._noted])
        self._noted = []
        if not self._products.any():  # the first steps: the scale, by which all prices move
            self._prior *= _median(times_ms / (features @ self._prior))
            self._prices = self._prior.copy()
        # Within bounds, so that a step predicted to take next to no time outweighs no others.
        bounds = times_ms / _MAX_TIMES_PREDICTED, times_ms * _MAX_TIMES_PREDICTED
        predicted_ms = np.clip(features @ self._prices, *bounds)
        relative = times_ms / predicted_ms
        shares = features * self._prior / predicted_ms[:, None]
        has_prompt = features[:, 1] > sizes
        for kind, mask in enumerate((~has_prompt, has_prompt)):
            rows, targets = shares[mask], relative[mask]
            if len(rows):
                weights = _KEEP ** np.arange(len(rows))[::-1]
                left = _KEEP ** len(rows)
                weighted = rows * weights[:, None]
                self._products[kind] = left * self._products[kind] + weighted.T @ rows
                self._sums[kind] = left * self._sums[kind] + weighted.T @ targets
        self._prices = self._prior * self._fit()
        fixed_ms, token_ms, score_ms, position_ms, read_ms = self._prices.tolist()
        self._linear = LinearCost(
            fixed_ms=fixed_ms,
            token_ms=token_ms,
            position_ms=position_ms,
            score_ms=score_ms,
            read_ms=read_ms,
        )

    def _fit(self) -> Float64s:
        """Return prices as multiples of the prior's: least squares, none below 0."""
        products = self._products.sum(axis=0) + _PRIOR_WEIGHT * np.eye(_NUM_PRICES)
        sums = self._sums.sum(axis=0) + _PRIOR_WEIGHT
        free: NDArray[np.intp] = np.arange(_NUM_PRICES)
        while True:
            found = np.linalg.solve(products[np.ix_(free, free)], sums[free])
            if (found >= 0).all():
                multiples = np.zeros(_NUM_PRICES)
                multiples[free] = found
                return multiples
            free = free[found > 0]  # never empty: sums are positive, so some price is


def _median(values: Float64s) -> float:
    """Return the median. The first call of np.median imports numpy.ma, which takes 10 ms: as part
    of a step with drafts, it kept a small model from drafting for minutes."""
    ordered = np.sort(values).tolist()
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2.0


def _layers_features(layers: PartLayers) -> Float64s:
    """Return the features of layers: their share of a step with the chunk as only row."""
    count, depth = float(layers.count), float(layers.start)
    pairs = count * (depth + 0.5 * (count + 1.0))
    whole: Float64s = np.array([1.0, count, 0.0, pairs, count + depth])
    return layers.share * whole

"""What the adaptive control reaches in a batch in which a request begins in most steps, in computed
milliseconds: prompt lookup, and all but a token of each prompt in the prefix cache.

So hardly any step has neither drafts nor a new request. What drafts cost must be known all the
same, where a step takes longer with every position and drafts do not pay, and where they do.

`python -m tests.unit.speculative.test_busy_batch` prints more of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from quire.base.records import StepPlan
from quire.speculative.control import AdaptiveControl, Control, FixedControl
from tests.drawn import DRAWS_ALL
from tests.unit.speculative.priced_engine import MAX_DRAFTS, Engine, Load, Prices

BATCH, NUM_TOKENS = 16, 64
# Steps of a model of a billion parameters on two cores: beyond 16 positions each costs 6 ms.
DEAR = Prices(
    once_ms=1.0,
    row_ms=0.1,
    ask_ms=0.3,
    curve=(
        *((1, 60.0), (4, 66.0), (8, 80.0), (16, 100.5), (17, 109.0), (24, 150.0), (28, 178.0)),
        *((34, 215.0), (44, 274.0), (56, 340.0), (68, 420.0), (144, 880.0)),
    ),
)
# A position costs the more, the more there are: few drafts pay.
RISING = Prices(
    once_ms=0.3,
    row_ms=0.03,
    ask_ms=0.2,
    curve=((1, 25.3), (4, 28.5), (8, 30.0), (16, 34.5), (32, 48.0), (48, 70.0), (144, 220.0)),
)
FIXED = (0, 1, 2, 4)
# Mean lengths of series of right and wrong drafts, and of positions with and without any.
RIGHT, WRONG, FOUND, MISSING = 14.0, 1.4, 20.0, 8.6
# Steps until the control is judged, and of which it is.
WARM_UP_STEPS, STEPS = 32, 100
NUM_SEEDS = 60 if DRAWS_ALL else 8


class Machine(NamedTuple):
    """min_of_best, min_mean: shares of the best fixed number, of each draw and of their mean."""

    prices: Prices
    min_of_best: float
    min_mean: float


MACHINES = {"dear": Machine(DEAR, 0.95, 0.975), "rising": Machine(RISING, 0.87, 0.96)}


class Busy(Engine):
    """An engine of noisy steps that always has BATCH requests. quiet_ms: without noise."""

    def __init__(self, prices: Prices, control: Control | None, seed: int) -> None:
        self.quiet_ms, self._seed = 0.0, seed
        self._draws = np.random.default_rng(seed)
        load = Load(
            kind="lookup",
            batch=BATCH,
            num_requests=BATCH,
            num_tokens=NUM_TOKENS,
            acceptance=0.5,
            found=0.5,
            prompt_tokens=1,
            prices=prices,
        )
        super().__init__(load, control)

    def tokens_per_ms(self) -> float:
        """Return the speed after the first steps, without noise."""
        self._run(WARM_UP_STEPS)
        num_tokens, quiet_ms = self.num_tokens, self.quiet_ms
        self._run(STEPS)
        return (self.num_tokens - num_tokens) / (self.quiet_ms - quiet_ms)

    def _run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.scheduler._requests.sequences) < BATCH:
                rng = np.random.default_rng((self._seed, self._num_added))
                is_first = self._num_added < BATCH  # these end anywhere
                num = int(rng.integers(2, NUM_TOKENS)) if is_first else NUM_TOKENS
                self._add(replace(self.load, num_tokens=num), rng)
            self._turn()

    def _add(self, load: Load, rng: np.random.Generator) -> None:
        super()._add(load, rng)
        name = f"r{self._num_added}"
        length = len(self.right[name])
        self.right[name] = _series(rng, length, RIGHT, WRONG)
        self.found[name] = _series(rng, length, FOUND, MISSING)

    def _spend_step(self, plan: StepPlan) -> None:
        prices, num_drafts = self.load.prices, int(plan.draft_ids.size)
        num_rows = int(np.count_nonzero(plan.draft_counts)) if num_drafts else 0
        ms = prices.positions_ms(int(plan.counts.sum()))
        ms += (prices.once_ms + num_rows * prices.row_ms) * (num_rows > 0)
        self.quiet_ms += ms
        is_slow = self._draws.random() < 0.1
        noise = 0.5 * self._draws.random() if is_slow else 0.02 * abs(self._draws.normal())
        is_first = num_drafts > 0 and not self.num_drafts
        self.num_drafts += num_drafts
        self.now_ms += ms * (1.0 + noise) * (1.0 + 0.3 * is_first)


def _series(rng: np.random.Generator, length: int, mean: float, other: float) -> np.ndarray:
    """Return so many booleans, in series of such mean lengths."""
    found: list[bool] = []
    while len(found) < length:
        found += [True] * int(rng.geometric(1.0 / mean))
        found += [False] * int(rng.geometric(1.0 / other))
    return np.array(found[:length])


def shares_of_best(prices: Prices, num_seeds: int) -> list[float]:
    """Return the control's speed in each draw, by the mean one of the best fixed number."""
    best = max(
        np.mean(
            [
                Busy(prices, FixedControl(num) if num else None, seed).tokens_per_ms()
                for seed in range(num_seeds)
            ]
        )
        for num in FIXED
    )
    return [
        Busy(prices, AdaptiveControl(BATCH, MAX_DRAFTS), seed).tokens_per_ms() / float(best)
        for seed in range(num_seeds)
    ]


@pytest.mark.parametrize("name", MACHINES)
def test_the_control_reaches_the_best_fixed_number_while_requests_begin(name: str) -> None:
    prices, min_of_best, min_mean = MACHINES[name]
    shares = shares_of_best(prices, NUM_SEEDS)
    assert min(shares) >= min_of_best, shares
    assert np.mean(shares) >= min_mean, shares


def main() -> None:
    for name, machine in MACHINES.items():
        shares = np.array(shares_of_best(machine.prices, 60))
        low = int(np.count_nonzero(shares < machine.min_of_best))
        print(f"{name}: mean {shares.mean():.3f}, least {shares.min():.3f}, {low} too low")


if __name__ == "__main__":
    main()

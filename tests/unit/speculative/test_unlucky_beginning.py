"""What the adaptive control reaches soon after an unlucky beginning, in computed milliseconds.

Lookups as in answers that repeat a text: long series of right drafts, then a few wrong ones. Some
steps are much slower than others, and the first one with drafts takes twice as long. That must not
keep drafts short, or keep them out, for long after.

`python -m tests.unit.speculative.test_unlucky_beginning` prints more of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from quire.base.records import StepPlan
from quire.speculative.control import AdaptiveControl
from tests.drawn import DRAWS_ALL
from tests.unit.speculative.priced_engine import MAX_DRAFTS, Engine, Load, Prices

# Steps of a model of 0.6 billion parameters on two busy cores.
CURVE = (
    *((1, 68.0), (2, 70.0), (4, 74.0), (8, 81.0), (12, 89.0), (16, 97.0), (20, 104.0)),
    *((24, 114.0), (28, 125.0), (36, 150.0), (64, 230.0), (144, 470.0)),
)
PRICES = Prices(once_ms=1.0, row_ms=0.1, ask_ms=0.3, curve=CURVE)
FIXED = (0, 1, 2, 4, 8)
# Steps until the control is judged, and of which it is.
WARM_UP_STEPS, STEPS = 64, 120
# Shares of the speed of the best fixed number: of each draw, of which one in 200 has 0.896 and the
# next 0.914, and of the mean.
MIN_OF_BEST, MIN_MEAN = 0.88 if DRAWS_ALL else 0.9, 0.97
NUM_SEEDS = 200 if DRAWS_ALL else 24


class Traffic(NamedTuple):
    """right, wrong: mean lengths of the series of drafts that are so."""

    batch: int
    right: float
    wrong: float


TRAFFIC = [Traffic(4, 14.0, 1.4), Traffic(4, 4.0, 3.0), Traffic(1, 14.0, 1.4)]


class Unlucky(Engine):
    """An engine of noisy steps, of which the first with drafts takes twice as long.

    quiet_ms: what its steps would take without noise; num_steps: those without prompts.
    """

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self.traffic, self.num_steps, self.quiet_ms = traffic, 0, 0.0
        self._draws = np.random.default_rng(seed)
        load = Load(
            kind="lookup",
            batch=traffic.batch,
            num_requests=traffic.batch,
            num_tokens=(MAX_DRAFTS + 1) * (WARM_UP_STEPS + STEPS),
            acceptance=0.5,
            prices=PRICES,
        )
        super().__init__(load, AdaptiveControl(traffic.batch, MAX_DRAFTS))
        for _ in range(traffic.batch):
            self._add(load, self._draws)

    def _add(self, load: Load, rng: np.random.Generator) -> None:
        super()._add(load, rng)
        name, is_right = f"r{self._num_added}", True
        length, series = len(self.right[name]), list[bool]()
        while len(series) < length:
            mean = self.traffic.right if is_right else self.traffic.wrong
            series += [is_right] * int(rng.geometric(1.0 / mean))
            is_right = not is_right
        self.right[name] = np.array(series[:length])

    def _spend_step(self, plan: StepPlan) -> None:
        num_drafts = int(plan.draft_ids.size)
        num_rows = int(np.count_nonzero(plan.draft_counts)) if num_drafts else 0
        ms = PRICES.positions_ms(int(plan.counts.sum()))
        ms += (PRICES.once_ms + num_rows * PRICES.row_ms) * (num_rows > 0)
        self.quiet_ms += ms
        is_slow = self._draws.random() < 0.15
        noise = 0.6 * self._draws.random() if is_slow else 0.04 * abs(self._draws.normal())
        is_first = num_drafts > 0 and not self.num_drafts
        self.num_drafts += num_drafts
        self.num_steps += not plan.admissions
        self.now_ms += ms * (1.0 + noise) * (1.0 + is_first)

    def lengths(self) -> dict[str, int]:
        """Run until the next of WARM_UP_STEPS and STEPS; return how many tokens are known."""
        until = WARM_UP_STEPS if self.num_steps < WARM_UP_STEPS else WARM_UP_STEPS + STEPS
        while self.num_steps < until:
            self._turn()
        lengths = self.scheduler._batch.tokens.lengths
        return {name: int(lengths[slot]) for slot, name in self._slots.items()}

    def fixed_ms(self, num_drafts: int, begin: dict[str, int], end: dict[str, int]) -> float:
        """Return what the same tokens take with a fixed number of drafts, without noise."""
        num_rows = 0
        for name, at in begin.items():
            while at < end[name]:
                right = self.right[name][at : at + num_drafts]
                at += 1 + int(np.add.reduce(np.logical_and.accumulate(right)))
                num_rows += 1
        batch = self.traffic.batch
        ms = PRICES.positions_ms(batch * (1 + num_drafts))
        ms += (PRICES.once_ms + batch * PRICES.row_ms) * (num_drafts > 0)
        return ms * num_rows / batch


def share_of_best(traffic: Traffic, seed: int) -> float:
    """Return the control's speed after the first steps, by that of the best fixed number."""
    engine = Unlucky(traffic, seed)
    begin, began_ms = engine.lengths(), engine.quiet_ms
    end, ms = engine.lengths(), engine.quiet_ms - began_ms
    return min(engine.fixed_ms(num, begin, end) for num in FIXED) / ms


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_the_control_soon_reaches_the_best_fixed_number(traffic: Traffic) -> None:
    shares = [share_of_best(traffic, seed) for seed in range(NUM_SEEDS)]
    assert min(shares) >= MIN_OF_BEST, shares
    assert np.mean(shares) >= MIN_MEAN, shares


def main() -> None:
    for traffic in TRAFFIC:
        shares = np.array([share_of_best(traffic, seed) for seed in range(200)])
        low = int(np.count_nonzero(shares < MIN_OF_BEST))
        means = f"mean {shares.mean():.3f}, least {shares.min():.3f}"
        print(f"{traffic}: {means}, {low} below {MIN_OF_BEST}")


if __name__ == "__main__":
    main()

"""What the adaptive control costs, in computed milliseconds: against no drafts, and against the
best fixed number of drafts, by proposer, temperature, batch and length of answers. Where the best
number gains little, only the loss is bounded: one run differs from another by a percent or two.

Some cells run by default; all of them with more drawn cases (`make exact`), and
`python -m tests.unit.speculative.test_priced_loss [PART OF A NAME ...]` prints them.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from quire.speculative.control import AdaptiveControl, Control, FixedControl
from tests.drawn import DRAWS_ALL
from tests.unit.speculative.priced_engine import MAX_DRAFTS, PRICES, Engine, Load

# The share of drafts that are right at temperatures 0, 0.6 and 1.
ACCEPTANCE = {
    "draft": (0.49, 0.45, 0.31),
    "self": (0.53, 0.51, 0.4),
    "heads": (0.65, 0.49, 0.37),
    "lookup": (0.7, 0.4, 0.05),
}
SHORT, LONG = 64, 256  # tokens of an answer
BATCHES = (1, 4, 16, 64)
NUM_REQUESTS = {
    **{(SHORT, 1): 16, (SHORT, 4): 32, (SHORT, 16): 80, (SHORT, 64): 256},
    **{(LONG, 1): 16, (LONG, 4): 16, (LONG, 16): 48, (LONG, 64): 192},
}
FIXED = (1, 2, 4, 8)
MAX_LOST, MIN_OF_BEST = 0.025, 0.97
LITTLE_GAIN = 0.05
SEED = 5


class Cell(NamedTuple):
    """temperature: the place in ACCEPTANCE."""

    kind: str
    temperature: int
    batch: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind}/t{self.temperature}/b{self.batch}/{self.num_tokens}"

    @property
    def load(self) -> Load:
        return Load(
            kind=self.kind,
            batch=self.batch,
            num_requests=NUM_REQUESTS[self.num_tokens, self.batch],
            num_tokens=self.num_tokens,
            acceptance=ACCEPTANCE[self.kind][self.temperature],
            prices=PRICES[self.kind],
        )


class Costs(NamedTuple):
    """Milliseconds of a token, without drafts, with fixed numbers of them, and with the control."""

    plain: float
    fixed: dict[int, float]
    control: float
    engine: Engine

    @property
    def speedup(self) -> float:
        return self.plain / self.control

    @property
    def of_best(self) -> float:
        return min([self.plain, *self.fixed.values()]) / self.control

    @property
    def is_met(self) -> bool:
        """Whether the control loses little and, where that gains much, reaches the best number."""
        gain = self.plain / min([self.plain, *self.fixed.values()]) - 1.0
        is_best = gain <= LITTLE_GAIN or self.of_best >= MIN_OF_BEST
        return self.speedup >= 1.0 - MAX_LOST and is_best


ALL = [
    Cell(kind, place, batch, num_tokens)
    for kind in ACCEPTANCE
    for place in range(3)
    for batch in BATCHES
    for num_tokens in (SHORT, LONG)
]
# By default, with the fixed numbers that are the best there: where drafts pay, do not, and nearly
# do.
CHOSEN: dict[Cell, tuple[int, ...]] = {
    Cell("draft", 2, 16, SHORT): (),
    Cell("draft", 1, 4, SHORT): (),
    Cell("draft", 0, 1, SHORT): (),
    Cell("self", 0, 4, SHORT): (),
    Cell("heads", 0, 1, SHORT): (2,),
    Cell("heads", 1, 16, SHORT): (),
    Cell("lookup", 0, 4, SHORT): (4,),
    Cell("lookup", 2, 1, SHORT): (),
}


def costs_of(cell: Cell, fixed: tuple[int, ...] = FIXED) -> Costs:
    def token_ms(control: Control | None) -> tuple[float, Engine]:
        engine = Engine(cell.load, control)
        if isinstance(control, AdaptiveControl):  # it has met such requests before
            for number in range(2 if cell.num_tokens == SHORT else 1):
                engine.run(seed=SEED + 1 + number)
        return engine.run(seed=SEED), engine

    ms, engine = token_ms(AdaptiveControl(cell.batch, MAX_DRAFTS))
    of_fixed = {num: token_ms(FixedControl(num))[0] for num in fixed}
    return Costs(token_ms(None)[0], of_fixed, ms, engine)


@pytest.mark.parametrize("cell", ALL if DRAWS_ALL else CHOSEN, ids=lambda cell: cell.name)
def test_the_control_loses_little_and_reaches_the_best_fixed_number(cell: Cell) -> None:
    costs = costs_of(cell, FIXED if DRAWS_ALL else CHOSEN[cell])
    assert costs.is_met, (costs.speedup, costs.of_best)


def main() -> None:
    wanted = sys.argv[1:] or [""]
    for cell in ALL:
        if any(part in cell.name for part in wanted):
            costs = costs_of(cell)
            best, engine = min(costs.fixed, key=lambda num: costs.fixed[num]), costs.engine
            print(
                f"{cell.name}: {costs.speedup:.3f} of no drafts, {costs.of_best:.3f} of the best "
                f"(k = {best}: {costs.plain / costs.fixed[best]:.3f}); {engine.num_drafts} drafts, "
                f"{engine.num_passes} passes, {engine.num_caught_up} tokens caught up with, "
                f"{engine.num_asks} choices{' MISSED' * (not costs.is_met)}",
                flush=True,
            )


if __name__ == "__main__":
    main()

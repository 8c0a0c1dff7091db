"""What the adaptive control costs on machines where a step is no line by its positions, and where
batch and acceptance change: computed, under a fake clock with noise.

`python -m tests.unit.speculative.test_changed_traffic` prints more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from quire.scheduler.speculation.draft_prices import DraftedStep, DraftPrices
from quire.speculative.control import AdaptiveControl, Control, FixedControl
from tests.unit.speculative.priced_engine import MAX_DRAFTS, Engine, Load, Prices

# Medians of steps of a model of 0.6 billion parameters on two cores, by positions.
LARGE = Prices(
    once_ms=0.2,
    row_ms=0.02,
    curve=(
        *((1, 25.3), (2, 26.0), (3, 27.1), (4, 28.5), (5, 31.0), (8, 34.0), (9, 36.0), (12, 45.3)),
        *((16, 54.5), (20, 66.0), (32, 98.0), (36, 112.0), (48, 143.0), (144, 400.0)),
    ),
    noise=0.05,
)
# A small model: its steps take little more than the host's work for drafts.
SMALL = Prices(
    once_ms=0.12,
    row_ms=0.008,
    ask_ms=0.05,
    curve=((1, 0.3), (2, 0.31), (4, 0.34), (8, 0.4), (16, 0.52), (32, 0.8), (64, 1.4), (128, 2.6)),
    noise=0.05,
)
# One of which a step takes about as long as choosing drafts does.
TINY = Prices(
    once_ms=0.15,
    ask_ms=0.25,
    curve=((1, 0.3), (2, 0.42), (4, 0.5), (8, 0.62), (16, 0.8), (32, 1.3), (64, 2.4), (128, 4.6)),
    noise=0.05,
)
# One that is slower for some steps after drafts, as caches have what these need.
COLD = Prices(
    once_ms=0.35,
    row_ms=0.02,
    ask_ms=0.05,
    curve=((1, 0.35), (2, 0.42), (4, 0.55), (9, 0.65), (16, 0.85), (36, 1.5), (64, 2.4)),
    after_ms=(0.6, 0.28, 0.22, 0.2, 0.15, 0.1, 0.06),
    noise=0.05,
)
MACHINES = {"large": LARGE, "small": SMALL, "tiny": TINY, "cold": COLD}
NUM_SLOTS = 16
TOKENS = {1: 96, 4: 48, 16: 32}  # of an answer, by batch
FIXED = (1, 2, 4, 8)
MAX_LOST, MIN_OF_BEST = 0.02, 0.97
# A change of traffic costs so many milliseconds of large steps at most, against the best number.
MAX_CHANGE_MS = 600.0


class Traffic(NamedTuple):
    """best: the fixed numbers of drafts that are best. found: see Load."""

    batch: int
    acceptance: float
    best: tuple[int, ...] = ()
    num_waves: int = 3
    found: float = 1.0


def run(engine: Engine, traffic: Traffic, seed: int) -> float:
    """Return the milliseconds of a token."""
    return engine.run(
        seed=seed,
        batch=traffic.batch,
        num_requests=traffic.num_waves * traffic.batch,
        num_tokens=TOKENS[traffic.batch],
        acceptance=traffic.acceptance,
        found=traffic.found,
    )


def engine_of(machine: str, control: Control | None, max_tokens: int = 96) -> Engine:
    load = Load(
        kind="lookup",
        batch=NUM_SLOTS,
        num_requests=1,
        num_tokens=max_tokens,
        acceptance=0.5,
        prompt_tokens=4,  # the rest is in the prefix cache
        prices=MACHINES[machine],
    )
    return Engine(load, control)


@cache
def fixed_ms(machine: str, traffic: Traffic, num_drafts: int, num_runs: int) -> float:
    """Return the mean milliseconds of a token with a fixed number of drafts, or none."""
    control = FixedControl(num_drafts) if num_drafts else None
    engine = engine_of(machine, control)
    return sum(run(engine, traffic, seed) for seed in range(num_runs)) / num_runs


class Shares(NamedTuple):
    """The control's speed, by that without drafts and by that of the best fixed number; and how
    many milliseconds of a run the latter would save."""

    of_plain: float
    of_best: float
    lost_ms: float


def shares(
    machine: str,
    before: Sequence[Traffic],
    traffic: Traffic,
    num_runs: int,
    num_warm: int,
) -> Shares:
    """Return what the control reaches in `num_runs` runs, after other traffic and so many runs of
    the same."""
    engine = engine_of(machine, AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    for number, other in enumerate([*before, *[traffic] * num_warm]):
        run(engine, other, 100 + number)
    ms = sum(run(engine, traffic, seed) for seed in range(num_runs)) / num_runs
    known_ms = [fixed_ms(machine, traffic, num, num_runs) for num in (0, *traffic.best)]
    num_tokens = traffic.num_waves * traffic.batch * TOKENS[traffic.batch]
    return Shares(known_ms[0] / ms, min(known_ms) / ms, (ms - min(known_ms)) * num_tokens)


STEADY = [
    ("large", Traffic(1, 0.3, (1, 2))),
    ("large", Traffic(1, 0.7, (8,))),
    ("large", Traffic(4, 0.3, (1,))),
    ("large", Traffic(4, 0.9, (2, 4))),
    ("large", Traffic(16, 0.5)),
    ("small", Traffic(1, 0.1)),
    ("small", Traffic(1, 0.9, (8,))),
    ("small", Traffic(16, 0.5)),
    ("tiny", Traffic(1, 0.5)),
    ("tiny", Traffic(4, 0.5)),
    ("tiny", Traffic(4, 0.9, (4, 8))),
    ("cold", Traffic(1, 0.6, found=0.3)),
    ("cold", Traffic(1, 0.95, (8,), found=0.3)),
    ("cold", Traffic(4, 0.8, found=0.3)),
]


@pytest.mark.parametrize(("machine", "traffic"), STEADY)
def test_the_control_reaches_the_best_fixed_number_though_prices_are_no_line(
    machine: str, traffic: Traffic
) -> None:
    found = shares(machine, [], traffic, num_runs=3, num_warm=2)
    assert found.of_plain >= 1.0 - MAX_LOST, found
    assert found.of_best >= MIN_OF_BEST, found


# What one batch teaches must not mislead the next: prices, acceptance, and what was lost.
CHANGES = {
    "a larger batch of worse drafts": ([Traffic(1, 0.9)], Traffic(4, 0.1)),
    "a larger batch": ([Traffic(1, 0.3), Traffic(4, 0.1)], Traffic(4, 0.9, (2, 4))),
    "a smaller batch": ([Traffic(16, 0.1), Traffic(16, 0.1)], Traffic(1, 0.9, (8,))),
    "better drafts": ([Traffic(4, 0.05), Traffic(4, 0.05)], Traffic(4, 0.9, (2, 4))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_traffic_costs_less_than_a_second(change: str) -> None:
    before, traffic = CHANGES[change]
    after = shares("large", before, traffic, num_runs=1, num_warm=0)
    assert after.lost_ms <= MAX_CHANGE_MS, after
    settled = shares("large", before, traffic, num_runs=3, num_warm=1)
    assert settled.of_plain >= 1.0 - MAX_LOST, settled
    assert settled.of_best >= MIN_OF_BEST, settled


@pytest.mark.parametrize(("machine", "max_lost_ms"), [("large", MAX_CHANGE_MS), ("cold", 100.0)])
def test_drafts_end_soon_after_they_became_wrong(machine: str, max_lost_ms: float) -> None:
    """Against the best number for what follows, over six waves."""
    traffic = Traffic(1, 0.05, (1,), num_waves=6)
    after = shares(machine, 8 * [Traffic(1, 0.9)], traffic, num_runs=1, num_warm=0)
    assert after.lost_ms <= max_lost_ms, after


@pytest.mark.parametrize(
    ("machine", "batch", "num_tokens", "max_lost_ms"),
    [
        ("large", 1, 400, MAX_CHANGE_MS),
        ("small", 1, 4000, 100.0),
        ("tiny", 4, 4000, 400.0),
        ("cold", 1, 12000, 900.0),
        ("cold", 4, 4000, 400.0),
    ],
)
def test_drafts_begin_soon_after_they_became_right(
    machine: str, batch: int, num_tokens: int, max_lost_ms: float
) -> None:
    """In the middle of all answers, so that no request begins then: against the best number of
    each half. Where the host's work takes longer than a step, a trial comes every 0.7 s."""

    def ms(control: Control | None, acceptance: float, num: int, later: float | None) -> float:
        engine = engine_of(machine, control, num)
        each = {"batch": batch, "num_requests": batch, "num_tokens": num}
        engine.run(seed=1, acceptance=acceptance, deviation=0.0, later=later, **each)
        assert engine.num_tokens == batch * num
        return engine.now_ms

    found_ms = ms(AdaptiveControl(NUM_SLOTS, MAX_DRAFTS), 0.05, num_tokens, 0.95)
    half = num_tokens // 2
    of_best = ms(None, 0.05, half, None), ms(FixedControl(MAX_DRAFTS), 0.95, half, None)
    assert found_ms - sum(of_best) <= max_lost_ms, (found_ms, of_best)


class LinePrices(DraftPrices):
    """Prices as they were: so much by step, by row and by draft, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[int, int, float]] = []
        self._fit = np.zeros(3)

    def note(self, step: DraftedStep, ms: float) -> None:
        self._noted = [
            *self._noted[-29:],
            (step.num_rows, step.num_positions, ms - step.plain_ms),
        ]
        rows, positions, added = np.array(self._noted).T
        features = np.stack((np.ones(len(rows)), rows, positions - rows), axis=1)
        self._fit = np.maximum(np.linalg.lstsq(features, added, rcond=None)[0], 0.0)

    def added_ms(
        self, num_positions: int, num_drafts: int, plain_ms: float, slope_ms: float
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if not self._noted:
            return super().added_ms(num_positions, num_drafts, plain_ms, slope_ms)
        numbers = np.arange(num_drafts + 1, dtype=np.float64)
        once_ms, row_ms, draft_ms = self._fit.tolist()
        rows = np.minimum(numbers, num_positions)
        return (once_ms + row_ms * rows + draft_ms * numbers) * (numbers > 0)


def test_prices_on_a_line_fail_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scheduler.speculation.plain_steps.DraftPrices", LinePrices)
    after = shares("large", *CHANGES["a larger batch"], num_runs=1, num_warm=0)
    assert after.lost_ms > MAX_CHANGE_MS


def main() -> None:
    for machine in MACHINES:
        for batch in TOKENS:
            for acceptance in (0.05, 0.3, 0.5, 0.7, 0.9):
                traffic = Traffic(batch, acceptance, FIXED)
                print(machine, traffic, shares(machine, [], traffic, 4, 2), flush=True)
    for change, (before, traffic) in CHANGES.items():
        for num_warm in (0, 1, 2):
            print(change, num_warm, shares("large", before, traffic, 1, num_warm), flush=True)


if __name__ == "__main__":
    main()

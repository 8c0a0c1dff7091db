"""What the adaptive control costs where answers change between text that follows itself by chance
and text that repeats itself, under prompt lookup in a small model: computed, under a fake clock.

`python -m tests.unit.speculative.test_repetitive_answers` prints more of it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.speculative.control import AdaptiveControl, Control, FixedControl
from quire.speculative.ngram import NgramProposer
from quire.speculative.rests import NoRests
from tests.unit.speculative.priced_engine import FIRST_TOKEN, MAX_DRAFTS, Engine, Load
from tests.unit.speculative.test_changed_traffic import COLD, SMALL, TINY

Int32s = NDArray[np.int32]
MACHINES = {"small": SMALL, "tiny": TINY, "cold": COLD}
NUM_TOKENS, NUM_REQUESTS, NUM_WORDS = 128, 40, 60
# How likely the usual next word is while a text does not repeat itself; and tokens of a stretch of
# either kind, in the mean.
USUAL, STRETCH = 0.5, 30
FIXED = (4, 8)
# Machines, the share of stretches that repeat something, and the least that is reached of the best
# fixed number: in answers that are partly repetitive the choice by matches may surpass them all.
CASES = [("cold", 0.0, 0.98), ("cold", 0.7, 1.03), ("small", 0.7, 0.97)]


def text(share: float, rng: np.random.Generator, length: int) -> Int32s:
    """Draw a text: words that often have the same next one, and stretches that repeat what came
    before."""
    following = rng.permutation(NUM_WORDS)
    words = [int(rng.integers(NUM_WORDS))]
    while len(words) < length:
        num = int(rng.geometric(1.0 / STRETCH))
        if len(words) > STRETCH and rng.random() < share:
            period = int(rng.integers(6, STRETCH))
            for _ in range(num):
                words.append(words[-period])
        else:
            for is_usual in (rng.random(num) < USUAL).tolist():
                drawn = int(rng.integers(NUM_WORDS))
                words.append(int(following[words[-1]]) if is_usual else drawn)
    return (np.array(words[:length]) + FIRST_TOKEN).astype(np.int32)


def token_ms(machine: str, share: float, control: Control | None) -> float:
    """Return the milliseconds of a token."""
    load = Load(
        kind="ngram",
        batch=1,
        num_requests=NUM_REQUESTS,
        num_tokens=NUM_TOKENS,
        acceptance=0.0,
        prompt_tokens=4,
        prices=MACHINES[machine],
        text=lambda rng, length: text(share, rng, length),
    )
    engine = Engine(load, control)
    engine.run(seed=1, num_requests=8)
    return engine.run(seed=2)


@cache
def best_ms(machine: str, share: float) -> float:
    """Return the milliseconds of a token with the best fixed number of drafts, or none."""
    controls = [None, *(FixedControl(num, NoRests()) for num in FIXED)]
    return min(token_ms(machine, share, control) for control in controls)


def of_best(machine: str, share: float) -> float:
    """Return the control's speed by that of the best fixed number."""
    return best_ms(machine, share) / token_ms(machine, share, AdaptiveControl(1, MAX_DRAFTS))


@pytest.mark.parametrize(("machine", "share", "least"), CASES)
def test_repetition_within_an_answer_is_noticed_soon(
    machine: str, share: float, least: float
) -> None:
    assert of_best(machine, share) >= least


def test_a_control_that_knows_no_matches_fails_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, share, _ in CASES[1:]:
        best_ms(machine, share)  # of proposers that know them
    monkeypatch.setattr(NgramProposer, "knows_matches", False)
    for machine, share, least in CASES[1:]:
        assert of_best(machine, share) < least


def main() -> None:
    for machine in MACHINES:
        for share in (0.0, 0.3, 0.5, 0.7, 0.9):
            fixed_ms = [token_ms(machine, share, FixedControl(num, NoRests())) for num in FIXED]
            ms = token_ms(machine, share, None)
            gains = [round(ms / one_ms, 3) for one_ms in fixed_ms]
            print(machine, share, round(of_best(machine, share), 3), gains, flush=True)


if __name__ == "__main__":
    main()

"""What predictions cost where they are useless, and reach where they are right: computed, under a
fake clock. Answers are words that often have the same next one, so that a useless prediction, of
the same words in another order, is aligned with the answer again and again.

`python -m tests.unit.speculative.test_priced_predictions` prints more of it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.speculative.control import AdaptiveControl, Control, FixedControl
from quire.speculative.rests import NoRests
from tests.unit.speculative.priced_engine import FIRST_TOKEN, MAX_DRAFTS, Engine, Load
from tests.unit.speculative.test_changed_traffic import COLD, LARGE, SMALL, TINY

Int32s = NDArray[np.int32]
MACHINES = {"large": LARGE, "small": SMALL, "tiny": TINY, "cold": COLD}
NUM_TOKENS, NUM_REQUESTS, NUM_WORDS = 256, 24, 40
MAX_LOST, MIN_OF_BEST = 0.02, 0.97


def words(rng: np.random.Generator, length: int) -> Int32s:
    """Draw an answer."""
    return (FIRST_TOKEN + rng.integers(NUM_WORDS, size=length)).astype(np.int32)


def useless(rng: np.random.Generator, answer: Int32s) -> Int32s:
    """Draw a prediction that has nearly all pairs of words, and none of the answer's order."""
    return words(rng, 8 * NUM_WORDS * NUM_WORDS)


def right(rng: np.random.Generator, answer: Int32s) -> Int32s:
    """Return the answer with a word in 16 changed."""
    predicted = answer.copy()
    predicted[::16] = FIRST_TOKEN + NUM_WORDS
    return predicted


def token_ms(machine: str, batch: int, kind: str, control: Control | None) -> float:
    """Return the milliseconds of a token."""
    load = Load(
        kind="ngram",
        batch=batch,
        num_requests=NUM_REQUESTS,
        num_tokens=NUM_TOKENS,
        acceptance=0.0,
        prompt_tokens=4,
        prices=MACHINES[machine],
        text=words,
        predicted={"useless": useless, "right": right}[kind],
    )
    engine = Engine(load, control)
    engine.run(seed=1, num_requests=4 * batch)
    return engine.run(seed=2)


@cache
def plain_ms(machine: str, batch: int) -> float:
    return token_ms(machine, batch, "useless", None)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("machine", MACHINES)
def test_useless_predictions_cost_little(machine: str, batch: int) -> None:
    ms = token_ms(machine, batch, "useless", AdaptiveControl(batch, MAX_DRAFTS))
    assert plain_ms(machine, batch) / ms >= 1.0 - MAX_LOST


@pytest.mark.parametrize("machine", ["large", "small", "cold"])
def test_right_predictions_gain_as_much_as_the_best_fixed_number(machine: str) -> None:
    fixed = [token_ms(machine, 1, "right", FixedControl(num, NoRests())) for num in (4, 8)]
    ms = token_ms(machine, 1, "right", AdaptiveControl(1, MAX_DRAFTS))
    assert min(fixed) < plain_ms(machine, 1)
    assert min(fixed) / ms >= MIN_OF_BEST


def main() -> None:
    for machine in MACHINES:
        for batch in (1, 4):
            shares = {}
            for kind in ("useless", "right"):
                ms = token_ms(machine, batch, kind, AdaptiveControl(batch, MAX_DRAFTS))
                fixed = token_ms(machine, batch, kind, FixedControl(8, NoRests()))
                plain = token_ms(machine, batch, kind, None)
                shares[kind] = (round(plain / ms, 3), round(plain / fixed, 3))
            print(machine, batch, shares, flush=True)


if __name__ == "__main__":
    main()

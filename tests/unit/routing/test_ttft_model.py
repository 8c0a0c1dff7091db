"""What is learned of first tokens: against least squares, and from few, false and changing ones."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from quire.routing.ttft_model import MIN_SAMPLES, TTFTCosts, TTFTModel


def learned(samples: list[tuple[int, int, float]]) -> TTFTModel:
    model = TTFTModel()
    for sample in samples:
        model.note(*sample)
    return model


def test_costs_are_those_of_weighted_least_squares() -> None:
    drawn = Random(7)
    samples = [
        (new := drawn.randrange(4000), queued := drawn.randrange(9000),
         (0.02 + 1e-4 * new + 2e-4 * queued) * drawn.uniform(0.9, 1.1))
        for _ in range(400)
    ]  # fmt: skip
    new, queued, seconds = (np.array(one, float) for one in zip(*samples, strict=True))
    weight = (1 - 1 / 128) ** np.arange(len(new))[::-1] / (256 + new + queued) ** 2
    each = (weight * (new + queued) * seconds).sum() / (weight * (new + queued) ** 2).sum()
    rows = np.vstack([np.stack([np.ones_like(new), new, queued], 1), np.diag([1, 1024, 1024])])
    wanted = np.append(seconds, each * np.array([0, 1024, 1024]))
    weight = np.append(weight, 0.5 / np.array([256, 1280, 1280]) ** 2)
    scale = np.sqrt(weight)
    plain = np.linalg.lstsq(rows * scale[:, None], wanted * scale, rcond=None)[0]
    found = learned(samples).costs
    assert found is not None
    assert tuple(found) == pytest.approx(plain.tolist(), rel=1e-9)
    assert found.per_new_token == pytest.approx(1e-4, rel=0.1)
    assert found.per_queued_token == pytest.approx(2e-4, rel=0.1)


def test_queued_tokens_cost_as_much_as_new_ones_until_some_are_seen() -> None:
    costs = learned([(at, 0, 1e-3 * at) for at in range(100, 1100, 20)]).costs
    assert costs is not None
    assert costs.per_queued_token == pytest.approx(1e-3, rel=0.01)
    assert costs.seconds(500, 2000) == pytest.approx(2.5, rel=0.01)


def test_little_is_not_enough_to_predict_from() -> None:
    samples = [(100, 0, 0.1)] * (MIN_SAMPLES - 1)
    assert learned(samples).costs is None
    assert learned([*samples, (100, 0, 0.1)]).costs is not None
    assert learned([(0, 0, 0.1)] * 50).costs is None, "no tokens, no rate"
    assert learned([(10, 0, 0.0)] * 50).costs is None


def test_a_change_of_speed_is_followed() -> None:
    model = learned([(1000, 500, 0.15)] * 300)
    for _ in range(400):
        model.note(1000, 500, 1.5)
    costs = model.costs
    assert costs is not None
    assert costs.seconds(1000, 500) == pytest.approx(1.5, rel=0.1)


def test_a_stall_counts_as_a_long_wait_and_no_more() -> None:
    steady = [(at, 0, 1e-4 * at) for at in range(1000, 1100)]
    costs = learned([*steady, (1000, 0, 3600.0)]).costs
    assert costs is not None
    assert costs.seconds(1000, 0) < 0.15


@pytest.mark.parametrize("seed", range(4))
def test_no_samples_give_negative_or_wild_rates(seed: int) -> None:
    drawn, model = Random(seed), TTFTModel()
    for _ in range(300):
        sizes = [drawn.choice([0, 1, 10, 10**4, 2**31]) for _ in range(2)]
        model.note(*sizes, drawn.choice([0.0, 1e-9, 1.0, 1e6]))
        if (costs := model.costs) is not None:
            assert costs.fixed >= 0
            assert 0 < costs.per_new_token <= 16 * costs.per_queued_token
            assert 0 < costs.per_queued_token <= 16.000001 * costs.per_new_token


def test_the_same_samples_give_the_same_costs() -> None:
    samples = [(37 * at % 1000, 91 * at % 3000, 0.001 * (at % 70)) for at in range(200)]
    assert learned(samples).costs == learned(samples).costs
    assert isinstance(learned(samples).costs, TTFTCosts)

"""The noise is pinned, bounded and sufficiently random; masses add up exactly."""

from __future__ import annotations

import numpy as np
import pytest

from quire.sampling.noise import (
    MASS_UNIT,
    gumbel,
    hash_bits,
    mass,
    minus_log,
    row_key,
    uniform,
)

IDS = np.arange(1 << 18)
PINNED_BITS = [2805640959, 3104681294, 2543185390, 259727321]
PINNED_NOISE = [1060421081, 1081133622, 3210199514, 1061256896]  # bits of float32


def test_the_recipe_is_pinned() -> None:
    ids = np.array([0, 1, 2, 150_000])
    assert hash_bits(0, 0, 0, token_ids=ids).tolist() == PINNED_BITS
    noise = gumbel(2**53 - 111, 3, 4096, token_ids=ids)
    assert noise.view(np.uint32).tolist() == PINNED_NOISE
    assert row_key(-1, 0, 7) == row_key(2**64 - 1, 0, 7)


def test_extreme_bits_stay_within_zero_and_one() -> None:
    w = np.array([2.0**-33, 2.0**-24, 0.25, 0.29, 0.3, 0.5, 0.75, 1 - 2.0**-24], np.float32)
    noise = minus_log(minus_log(w, one_minus=True))
    expected = -np.log(-np.log1p(-w.astype(np.float64)))
    np.testing.assert_allclose(noise, expected, atol=2e-6, rtol=1e-6)
    values = uniform(1, 2, 3, token_ids=np.arange(1 << 21))
    assert values.min() >= 2.0**-33
    assert values.max() <= 1 - 2.0**-24


def test_noise_has_the_mean_and_spread_of_gumbel() -> None:
    noise = np.concatenate([gumbel(9, 0, p, token_ids=IDS) for p in range(16)]).astype(np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 4 * 1.2825 / np.sqrt(len(noise))
    assert abs(noise.var() - np.pi**2 / 6) < 0.01


def chi_square(counts: np.ndarray) -> float:
    """Return how many standard deviations counts lie from an even spread."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**62, 5, 900)])
@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_each_byte_of_the_bits_is_evenly_spread_over_ids(
    place: tuple[int, int, int], shift: int
) -> None:
    bits = hash_bits(*place, token_ids=IDS) >> np.uint32(shift)
    assert abs(chi_square(np.bincount(bits & np.uint32(0xFF), minlength=256))) < 5


@pytest.mark.parametrize("token_id", [0, 1, 77, 150_000])
def test_each_byte_is_evenly_spread_over_positions_streams_and_seeds(token_id: int) -> None:
    one = np.array([token_id])
    for axis in range(3):
        bits = np.array(
            [
                hash_bits(*(i if axis == a else 11 for a in range(3)), token_ids=one)[0]
                for i in range(8192)
            ]
        )
        for shift in (0, 8, 16, 24):
            counts = np.bincount((bits >> np.uint32(shift)) & np.uint32(0xFF), minlength=256)
            assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize(
    "other", [(5, 0, 101), (5, 1, 100), (6, 0, 100), (5, 100, 0), (5 + 2**32, 0, 100)]
)
def test_neighbouring_rows_are_independent(other: tuple[int, int, int]) -> None:
    first, second = (uniform(*place, token_ids=IDS) for place in ((5, 0, 100), other))
    for shift in (0, 1, 2, 64, 1000):  # against the other row's neighbouring ids too
        correlation = np.corrcoef(first, np.roll(second, shift))[0, 1]
        assert abs(correlation) < 5 / np.sqrt(len(IDS))
    cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
    assert abs(chi_square(np.bincount(cells, minlength=256))) < 5


def test_masses_add_up_the_same_in_any_order() -> None:
    draw = np.random.default_rng(3)
    values = mass((-np.abs(draw.standard_normal(1 << 18)) * 6).astype(np.float32))
    total = values.sum()
    assert (values / MASS_UNIT == np.round(values / MASS_UNIT)).all()
    assert np.cumsum(values)[-1] == total
    assert draw.permutation(values).sum() == total
    assert sum(chunk.sum() for chunk in np.split(values, 64)) == total


def test_mass_is_the_exponential() -> None:
    x = np.linspace(-30, 0, 10_001).astype(np.float32)
    np.testing.assert_allclose(mass(x), np.exp(x.astype(np.float64)), rtol=2e-6, atol=2.0**-34)
    assert mass(np.array([0.0, -np.inf, -1e30, -27.8], np.float32)).tolist() == [1, 0, 0, 0]

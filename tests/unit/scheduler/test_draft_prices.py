"""Prices of drafts: what steps with them take longer than plain ones."""

from __future__ import annotations

import numpy as np
import pytest

from quire.scheduler.speculation.draft_prices import DraftedStep, DraftPrices


def extra_ms(prices: DraftPrices, num_rows: int, drafts_ms: float) -> float:
    return prices.once_ms + num_rows * prices.row_ms + prices.scale * drafts_ms


def test_at_first_drafts_cost_what_the_cost_model_predicts() -> None:
    assert extra_ms(DraftPrices(), 4, 2.5) == 2.5


def test_the_parts_of_the_host_and_of_the_drafts_are_told_apart() -> None:
    prices, rng = DraftPrices(), np.random.default_rng(1)
    for _ in range(200):
        num_rows, num_drafts = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        plain_ms = 0.4 + 0.02 * num_rows
        step = DraftedStep(num_rows, plain_ms, 0.01 * num_drafts)
        noise = rng.uniform(0.95, 1.05)
        prices.note(step, (plain_ms + 0.2 + 0.01 * num_rows + 0.03 * num_drafts) * noise)
    assert prices.once_ms == pytest.approx(0.2, rel=0.2)
    assert prices.row_ms == pytest.approx(0.01, rel=0.9)
    assert prices.scale == pytest.approx(3.0, rel=0.1)


def test_one_kind_of_step_is_predicted_right_after_a_few() -> None:
    prices = DraftPrices()
    for _ in range(4):
        prices.note(DraftedStep(1, 0.4, 0.08), 0.9)
    assert extra_ms(prices, 1, 0.08) == pytest.approx(0.5, rel=0.05)


def test_prices_are_not_negative_and_a_stall_counts_little() -> None:
    prices = DraftPrices()
    for _ in range(20):
        prices.note(DraftedStep(1, 1.0, 0.2), 0.1)  # shorter than without drafts
    assert extra_ms(prices, 1, 0.2) == pytest.approx(0.0, abs=0.01)
    assert min(prices.once_ms, prices.row_ms, prices.scale) >= 0.0
    for _ in range(20):
        prices.note(DraftedStep(1, 1.0, 0.2), 1.2)
    prices.note(DraftedStep(1, 1.0, 0.2), 5000.0)
    for _ in range(7):
        prices.note(DraftedStep(1, 1.0, 0.2), 1.2)
    assert extra_ms(prices, 1, 0.2) < 0.5


def test_times_of_nothing_teach_nothing() -> None:
    prices = DraftPrices()
    prices.note(DraftedStep(1, 1.0, 0.2), 0.0)
    prices.note(DraftedStep(1, 0.0, 0.2), 1.0)
    assert extra_ms(prices, 1, 0.2) == 0.2


def test_a_high_price_fades_while_no_drafts_are_made() -> None:
    prices = DraftPrices()
    for _ in range(30):
        prices.note(DraftedStep(1, 1.0, 0.1), 4.0)
    assert extra_ms(prices, 1, 0.1) > 2.0
    for _ in range(64):
        prices.fade()
    assert extra_ms(prices, 1, 0.1) > 2.0  # not at once
    for _ in range(2000):
        prices.fade()
    assert extra_ms(prices, 1, 0.1) < 0.2

"""The step's budget: tokens, predicted milliseconds, and guaranteed progress."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.step_budget import StepBudget
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_row_costs_its_tokens_and_the_positions_they_attend_to() -> None:
    cost = LinearCost(fixed_ms=1.0, token_ms=0.5, position_ms=0.25)
    assert cost.rows_ms(ints(0, 4), ints(1, 3)).tolist() == [0.75, 1.5 + 0.25 * (5 + 6 + 7)]


@given(
    st.integers(0, 10_000),
    st.floats(0.001, 100.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.01),
)
def test_the_token_count_of_a_budget_fits_and_one_more_does_not(
    start: int, budget_ms: float, token_ms: float, position_ms: float
) -> None:
    cost = LinearCost(fixed_ms=0.0, token_ms=token_ms, position_ms=position_ms)
    most = cost.max_tokens(start, budget_ms)
    if most >= 1_000_000:
        return
    assert cost.rows_ms(ints(start), ints(most))[0] <= budget_ms * 1.000001
    assert cost.rows_ms(ints(start), ints(most + 1))[0] >= budget_ms * 0.999999


def test_without_budget_nothing_fits_and_without_cost_everything() -> None:
    cost = LinearCost(fixed_ms=0.0, token_ms=1.0, position_ms=0.0)
    assert cost.max_tokens(0, 0.0) == cost.max_tokens(0, -1.0) == 0
    for token_ms in (0.0, 5e-324):
        almost_free = LinearCost(fixed_ms=0.0, token_ms=token_ms, position_ms=0.0)
        assert almost_free.max_tokens(0, 1.0) > 10**9


def test_tokens_are_granted_in_order_until_they_are_spent() -> None:
    budget = StepBudget(10, 0.0, None)
    assert budget.allot(ints(0, 0, 0, 0), ints(1, 6, 6, 2)).tolist() == [1, 6, 3, 0]
    assert budget.spent
    assert budget.allot_one(0, 5) == 0


def test_returned_tokens_can_be_granted_again() -> None:
    cost = LinearCost(fixed_ms=0.0, token_ms=1.0, position_ms=0.0)
    budget = StepBudget(10, 8.0, cost)
    budget.allot(ints(0, 0), ints(3, 4))
    budget.give_back(ints(0), ints(4))
    assert (budget.tokens, budget.ms) == (7, 5.0)
    assert budget.allot_one(0, 9) == 5


def test_time_cuts_the_row_that_crosses_it_and_excludes_the_rest() -> None:
    cost = LinearCost(fixed_ms=1.0, token_ms=1.0, position_ms=0.0)
    budget = StepBudget(100, 6.0, cost)
    assert budget.allot(ints(0, 0, 0), ints(2, 8, 1)).tolist() == [2, 3, 0]
    assert budget.spent


@pytest.mark.parametrize("ms", [0.5, 1.0, 1.5])
def test_the_first_row_gets_a_token_however_little_time_is_left(ms: float) -> None:
    cost = LinearCost(fixed_ms=1.0, token_ms=1.0, position_ms=0.0)
    assert StepBudget(100, ms, cost).allot(ints(0, 0, 0), ints(0, 8, 1)).tolist() == [0, 1, 0]
    budget = StepBudget(100, ms, cost)
    assert not budget.spent
    assert budget.allot_one(0, 8) == 1
    assert budget.spent
    assert StepBudget(100, ms, cost).allot(ints(0), ints(0)).tolist() == [0]


def test_a_scored_token_also_costs_the_head() -> None:
    cost = LinearCost(fixed_ms=0.0, token_ms=1.0, position_ms=0.0, score_ms=3.0)
    scored = np.array([False, True, True])
    assert cost.rows_ms(ints(0, 0, 9), ints(2, 2, 1), scored).tolist() == [2.0, 8.0, 4.0]
    assert (cost.max_tokens(0, 9.0), cost.max_tokens(0, 9.0, scored=True)) == (9, 2)
    budget = StepBudget(100, 12.0, cost)
    assert budget.allot(ints(0, 0, 0), ints(2, 8, 1), scored).tolist() == [2, 2, 0]
    budget.give_back(ints(0), ints(2), np.array([True]))
    assert budget.ms == 10.0
    assert budget.allot_one(0, 8, scored=True) == 2
    assert budget.allot_one(0, 8) == 2


def test_a_step_budget_shortens_chunks_of_scored_prompts() -> None:
    cost = LinearCost(fixed_ms=0.0, token_ms=1.0, position_ms=0.0, score_ms=3.0)
    harness = Harness(Setup(max_num_batched_tokens=64, step_budget_ms=16.0), cost=cost)
    harness.add(make_request("a", range(20), max_tokens=4, prompt_logprobs=0))
    harness.drain()
    counts = [int(plan.counts[0]) for plan in harness.plans]
    assert counts == [4, 4, 4, 4, 4, 1, 1, 1]
    harness.check_end()


def test_a_step_budget_shortens_chunks_at_depth() -> None:
    cost = LinearCost(fixed_ms=0.0, token_ms=1.0, position_ms=0.1)
    harness = Harness(Setup(max_num_batched_tokens=64, step_budget_ms=12.0), cost=cost)
    harness.add(make_request("a", range(40), max_tokens=2))
    harness.drain()
    counts = [int(plan.counts[0]) for plan in harness.plans[:-1]]
    assert sum(counts) == 40
    assert counts[0] > counts[-2] >= 1
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    harness.check_end()


def test_a_row_costs_the_same_alone_and_in_a_batch() -> None:
    cost = LinearCost(fixed_ms=1.0, token_ms=0.3, position_ms=0.01, score_ms=0.7, read_ms=0.002)
    starts, counts = ints(0, 5, 9, 4000), ints(1, 7, 0, 300)
    for scored in (False, True):
        rows = cost.rows_ms(starts, counts, np.full(4, scored))
        each = zip(starts.tolist(), counts.tolist(), strict=True)
        ones = [cost.row_ms(start, count, scored=scored) for start, count in each]
        assert ones == pytest.approx(rows.tolist(), rel=1e-14)


def test_a_time_budget_without_tokens_grants_none() -> None:
    cost = LinearCost(fixed_ms=0.0, token_ms=1.0, position_ms=0.0)
    budget = StepBudget(2, 10.0, cost)
    assert budget.allot(ints(0), ints(2)).tolist() == [2]
    assert budget.allot(ints(5, 6), ints(1, 1)).tolist() == [0, 0]
    assert budget.ms == 8.0

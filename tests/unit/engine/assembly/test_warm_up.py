"""Warm-up and measured costs: representative steps, within the engine's limits."""

from __future__ import annotations

import pytest

from quire.base.clock import Clock
from quire.engine.assembly.warm_up import measure_cost, warm_up
from quire.runner.model_runner import ModelRunner
from quire.scheduler.limits import SchedulerLimits
from tests.unit.runner.scripted_executor import ScriptedExecutor


class CountingClock(Clock):
    """A clock that advances a millisecond on each read."""

    def __init__(self) -> None:
        self._now_ms = 0.0

    def now_ms(self) -> float:
        self._now_ms += 1.0
        return self._now_ms


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "num_blocks", "budget"),
    [(8, 512, 100, 512), (1, 2, 1, 1), (2, 16, 1, 2), (64, 64, 3, 64), (2, 16, 3, 3)],
)
def test_warm_up_stays_within_the_limits_however_small(
    max_num_seqs: int, max_model_len: int, num_blocks: int, budget: int
) -> None:
    executor = ScriptedExecutor()
    runner = ModelRunner(
        executor,
        num_slots=max_num_seqs,
        max_model_len=max_model_len,
        block_size=16,
        max_samples=64,
    )
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len
    )
    warm_up(runner, limits, num_blocks=num_blocks)
    measure_cost(runner, limits, num_blocks, CountingClock())
    assert executor.batches
    for batch in executor.batches:
        assert len(batch.token_ids) <= max(budget, max_num_seqs)
        assert batch.caches[0].kv_slots.max() < num_blocks * 16
        assert batch.positions.max() < max_model_len


def test_two_steps_warm_every_kind_of_sampling_and_several_rows() -> None:
    executor = ScriptedExecutor()
    runner = ModelRunner(executor, num_slots=8, max_model_len=512, block_size=16, max_samples=64)
    warm_up(
        runner,
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512),
        num_blocks=100,
    )
    assert [len(batch.seq_starts) - 1 for batch in executor.batches] == [3, 1]
    assert [len(batch.token_ids) for batch in executor.batches] == [30, 1]
    assert any(batch.history is not None for batch in executor.samples)
    assert any(batch.num_logprobs.max() > 0 for batch in executor.samples)


def test_a_uniform_clock_gives_a_fixed_cost_only() -> None:
    runner = ModelRunner(
        ScriptedExecutor(), num_slots=2, max_model_len=512, block_size=16, max_samples=64
    )
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=512)
    cost = measure_cost(runner, limits, 64, CountingClock())
    assert (cost.fixed_ms, cost.token_ms, cost.position_ms) == (1.0, 0.0, 0.0)


class HeadClock(Clock):
    """A clock that advances a millisecond for each row of the head."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        self._executor = executor

    def now_ms(self) -> float:
        return float(sum(count for _, count in self._executor.heads))


def test_the_cost_of_a_score_is_that_of_the_head() -> None:
    executor = ScriptedExecutor()
    runner = ModelRunner(executor, num_slots=2, max_model_len=512, block_size=16, max_samples=64)
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=200, max_model_len=512)
    cost = measure_cost(runner, limits, 64, HeadClock(executor))
    assert (cost.fixed_ms, cost.token_ms, cost.position_ms, cost.score_ms) == (1.0, 0.0, 0.0, 1.0)

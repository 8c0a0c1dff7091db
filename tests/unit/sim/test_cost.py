"""Costs of simulated steps: measured steps are reproduced, a roofline equals the counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.base.records import PartLayers
from quire.config.flags import engine_config
from quire.models.registry import build_program, open_model
from quire.program.cost import StepShape
from quire.program.tensors import DType
from quire.scheduler.cost.step_cost import LinearCost
from quire.sim.cost import LearnedCost, MeasuredCost, RooflineCost, interpolate, step_work
from quire.sim.machine import described_machine, ridge_step_tokens
from tests.models.cases_experts import QWEN3_MOE
from tests.tiny_models import write_tiny, write_tiny_llama
from tests.unit.sim.made import plan_of


def _measured() -> MeasuredCost:
    return MeasuredCost(
        chunk_ms=((1, 10.0), (16, 25.0), (64, 121.0)),
        rows_ms=((1, 11.0), (4, 20.0), (8, 30.0)),
        pair_ms=0.001,
        read_ms=((1, 0.02), (8, 0.01)),
        loop_ms=0.5,
    )


def test_learned_prices_count_tokens_scores_positions_reads_and_layers() -> None:
    prices = LinearCost(
        fixed_ms=1000.0, token_ms=100.0, score_ms=10.0, position_ms=1.0, read_ms=0.01
    )
    plan = plan_of((7, 1), (4, 2))
    assert plan.sample_counts.sum() == 2
    # rows attend to 8, and to 5 + 6 positions, and read 8 and 6
    expected = 1000.0 + 3 * 100.0 + 2 * 10.0 + (8 + 5 + 6) + 0.01 * (8 + 6)
    assert LearnedCost(prices).step_ms(plan) == pytest.approx(expected)
    layers = PartLayers(
        slot=0, start=4, count=2, store_from=4, first_layer=0, end_layer=1, num_layers=2
    )
    more = 0.5 * (1000.0 + 2 * 100.0 + (5 + 6) + 0.01 * 6)
    assert layers.share == 0.5
    with_part = LearnedCost(prices).step_ms(replace(plan, layers=layers))
    assert with_part == pytest.approx(expected + more)


def test_work_is_summed_separately_for_decode_rows_and_chunks() -> None:
    work = step_work(plan_of((7, 1), (100, 1), (32, 8), (0, 5)))
    assert (work.num_tokens, work.num_rows) == (15, 4)
    assert (work.single_positions, work.chunk_pairs) == (107, 256)
    steady = step_work(plan_of((7, 1), (100, 1)))
    assert (steady.num_tokens, steady.single_positions, steady.chunk_pairs) == (2, 107, 0)


def test_a_measured_step_costs_its_measurement() -> None:
    cost = _measured()
    assert cost.step_ms(plan_of((0, 1))) == pytest.approx(11.5)
    assert cost.step_ms(plan_of(*[(0, 1)] * 4)) == pytest.approx(20.5)
    assert cost.step_ms(plan_of((0, 16))) == pytest.approx(25 + 1 + 0.5)  # one decode row
    assert cost.step_ms(plan_of((0, 40))) == pytest.approx(73 + 1 + 0.5)  # halfway between


def test_depth_costs_by_decode_rows_and_by_chunks() -> None:
    cost = _measured()
    shallow, deep = plan_of((0, 1), (0, 16)), plan_of((200, 1), (64, 16))
    added_ms = 200 * (0.02 - 0.01 / 7) + 64 * 16 * 0.001
    assert cost.step_ms(deep) - cost.step_ms(shallow) == pytest.approx(added_ms)


def layers_of(start: int, count: int, share: tuple[int, int]) -> PartLayers:
    return PartLayers(
        slot=9,
        start=start,
        count=count,
        store_from=start,
        first_layer=0,
        end_layer=share[0],
        num_layers=share[1],
    )


def test_layers_cost_a_share_of_a_chunk() -> None:
    cost, rows = _measured(), plan_of((7, 1), (100, 1))
    beside = replace(rows, layers=layers_of(200, 40, (2, 8)))
    chunk_ms = 73 + 40 * 200 * 0.001
    assert cost.step_ms(beside) - cost.step_ms(rows) == pytest.approx(chunk_ms / 4)
    longer = replace(rows, layers=layers_of(0, 130, (8, 8)))
    assert cost.step_ms(longer) - cost.step_ms(rows) == pytest.approx(2 * 123, rel=0.02)


def test_costs_extrapolate_linearly_beyond_measurements() -> None:
    found = interpolate(((1, 10.0), (3, 14.0)), 7)
    assert found.tolist() == pytest.approx([10, 10, 12, 14, 16, 18, 20])
    assert _measured().step_ms(plan_of((0, 130))) == pytest.approx(2 * (121 + 2 + 1.5), rel=0.02)


def test_a_roofline_matches_the_programs_counts(tmp_path: Path) -> None:
    spec = open_model(write_tiny_llama(tmp_path, seed=1))
    program = build_program(spec, dtype=DType.F32, max_positions=512)
    shape = StepShape((1, 1, 30), (3, 90, 40), num_samples=3)
    counted = program.step_cost(shape)
    plan = plan_of((3, 1), (90, 1), (40, 30))

    def step_ms(*, gb_per_s: float, gflop_per_s: float) -> float:
        cost = RooflineCost(program, gb_per_s=gb_per_s, gflop_per_s=gflop_per_s, fixed_ms=2.0)
        return cost.step_ms(plan) - 2.0

    memory_ms = 1e3 * counted.memory_bytes / 1e9
    assert step_ms(gb_per_s=1, gflop_per_s=1e12) == pytest.approx(memory_ms, rel=1e-6)
    arithmetic_ms = 1e3 * (counted.product_ops + counted.attention_ops) / 1e9
    assert step_ms(gb_per_s=1e12, gflop_per_s=1) == pytest.approx(arithmetic_ms, rel=1e-6)
    layers = layers_of(40, 30, (1, 4))
    whole = RooflineCost(program, gb_per_s=1e12, gflop_per_s=1, fixed_ms=2.0)
    alone = program.step_cost(StepShape((30,), (40,), num_samples=0))
    alone_ms = 1e3 * (alone.product_ops + alone.attention_ops) / 1e9
    more_ms = whole.step_ms(replace(plan, layers=layers)) - whole.step_ms(plan)
    assert more_ms == pytest.approx(alone_ms / 4, rel=1e-6)


def test_a_described_machines_step_is_its_ridge_point() -> None:
    # 10 ms of weights and fixed time; 0.05 ms of arithmetic per token: equal at 200 tokens.
    assert ridge_step_tokens(LinearCost(fixed_ms=10.0, token_ms=0.05, position_ms=0.0)) == 256
    assert ridge_step_tokens(LinearCost(fixed_ms=10.0, token_ms=0.01, position_ms=0.0)) == 1024
    assert ridge_step_tokens(LinearCost(fixed_ms=10.0, token_ms=10.0, position_ms=0.0)) == 64
    assert ridge_step_tokens(LinearCost(fixed_ms=10.0, token_ms=0.0, position_ms=0.0)) == 8192


def test_more_arithmetic_for_the_same_memory_means_larger_steps() -> None:
    steps = [
        described_machine(
            engine_config({}), gb_per_s=1500.0, gflop_per_s=gflop_per_s, fixed_ms=0.0
        ).step_tokens
        for gflop_per_s in (100_000.0, 400_000.0, 1_600_000.0)
    ]
    assert steps[1] == 4 * steps[0]
    assert steps[2] == 4 * steps[1]


def test_a_roofline_reads_the_experts_that_a_steps_rows_choose(tmp_path: Path) -> None:
    size = {"vocab_size": 131, "max_position_embeddings": 512}
    spec = open_model(write_tiny(tmp_path, QWEN3_MOE | size, seed=1))
    program = build_program(spec, dtype=DType.F32, max_positions=512)
    for rows in (1, 2, 7, 60):
        plan = plan_of(*[(row, 1) for row in range(rows)])
        counted = program.step_cost(StepShape([1] * rows, range(rows), num_samples=rows))
        cost = RooflineCost(program, gb_per_s=1, gflop_per_s=1e12, fixed_ms=0.0)
        assert cost.step_ms(plan) == pytest.approx(counted.memory_bytes / 1e6, rel=1e-4)

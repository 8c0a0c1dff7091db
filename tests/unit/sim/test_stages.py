"""Stages of a pipeline in simulations: schedules computed by hand, bubbles, links and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.base.records import StepPlan
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.obs.timing import Goals
from quire.program.cost import StepShape
from quire.program.split import layers_of_stages, split
from quire.sim.clock import VirtualClock
from quire.sim.cost import RooflineCost
from quire.sim.machine import Machine, described_machine, planned_program
from quire.sim.run import simulate
from quire.sim.runner import PlannedOutputs, VirtualRunner
from quire.sim.summary import summary_of
from tests.unit.sim.made import DEFAULTS, config, machine, plan_of, request

RATES = {"gb_per_s": 10.0, "gflop_per_s": 100.0, "fixed_ms": 0.5}


class _Fixed:
    """A StepCost of one time for every step."""

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def step_ms(self, plan: StepPlan) -> float:
        return self._ms


def stages_of(*stages_ms: float) -> Machine:
    """Return a machine of stages that take fixed times."""
    stages = tuple(map(_Fixed, stages_ms))
    return replace(machine(), cost=_Fixed(sum(stages_ms)), stages=stages, num_layers=0)


def staged(stages: int = 2, **settings: object) -> EngineConfig:
    """Return an engine of stages."""
    return config(pipeline_parallel_size=stages, **settings)


def test_one_request_alone_waits_for_each_stage() -> None:
    run = simulate([request(0.0, 1, 3)], DEFAULTS, stages_of(3.0, 5.0), staged())
    # Each token takes both stages: the next one needs it.
    assert run.finished[0].first_token_ms == 8
    assert run.finished[0].last_token_ms == 24
    assert run.stats.steps_total == 3
    assert run.stage_busy_ms == (9, 15)
    # The last stage has a plan all the time, and waits for the rows of each for 3 ms.
    assert run.busy_ms == 24
    assert run.stats.stage_wait_ms_total == 9


def test_requests_are_divided_over_as_many_plans_as_stages() -> None:
    plans: list[StepPlan] = []
    requests = [request(0.0, 1, 4), request(0.0, 1, 4)]
    run = simulate(requests, DEFAULTS, stages_of(4.0, 4.0), staged(), on_plan=plans.append)
    # Stage 0 begins a plan at 0, 4, 8, ...; each ends 8 ms later. The prompts are in one plan and
    # so is the first token of both; then each plan has one of them:
    #   plan 1   0..4   4..8    both prompts
    #   plan 2   8..12 12..16   one token of the first
    #   plan 3  12..16 16..20   one token of the second
    #   plan 4  16..20 20..24   the first, ...
    assert [len(plan.slots) for plan in plans] == [2, 1, 1, 1, 1, 1, 1]
    assert [one.last_token_ms for one in run.finished] == [32, 36]
    assert run.end_ms == 36
    assert run.stage_busy_ms == (28, 28)
    assert run.stats.stage_wait_ms_total == 8  # for plan 1 and plan 2: no stage has other work
    assert run.busy_ms == 36


def test_the_slowest_stage_sets_the_pace_of_chunks() -> None:
    requests = [request(0.0, 32 * 6, 1)]
    defaults = replace(DEFAULTS, max_model_len=256)
    engine = staged(3, long_prompt_tokens=0)
    run = simulate(requests, defaults, stages_of(2.0, 5.0, 3.0), engine)
    # Six chunks: the first arrives at the second stage after 2 ms, which takes 5 ms for each; the
    # last stage adds 3 ms to the last one.
    assert run.stats.steps_total == 6
    assert run.finished[0].first_token_ms == 2 + 6 * 5 + 3
    assert run.stage_busy_ms == (12, 30, 18)
    # Of equal stages n chunks leave each idle for (S - 1) / (n + S - 1) of the time.
    equal = simulate(requests, defaults, stages_of(4.0, 4.0, 4.0), engine)
    assert equal.end_ms == 4 * (6 + 3 - 1)
    assert equal.stats.stage_wait_ms_total / equal.busy_ms == pytest.approx(2 / 8)


def test_one_plan_in_flight_leaves_the_other_stages_idle() -> None:
    requests = [request(0.0, 32 * 6, 1)]
    engine = staged(plans_in_flight=1)
    run = simulate(requests, DEFAULTS, stages_of(4.0, 4.0), engine)
    assert run.end_ms == 6 * 8
    assert run.stats.stage_wait_ms_total == 6 * 4


def test_a_plan_that_retires_a_slot_in_flight_follows_the_plans_before() -> None:
    """As the runner of a pipeline finishes them first."""
    plan = plan_of((0, 1))
    for retired, begun_ms in (([], 4.0), ([1], 4.0), ([0], 8.0)):
        clock = VirtualClock()
        stages = stages_of(4.0, 4.0).stages
        runner = VirtualRunner(clock, stages, PlannedOutputs({}, num_slots=2))
        first = runner.submit(plan)
        later = runner.submit(replace(plan, step=2, retired=np.array(retired, np.int32)))
        assert (first.until_ms, later.until_ms) == (8, begun_ms + 8)
        runner.collect(first)
        runner.collect(later)
        assert clock.now_ms() == begun_ms + 8


def test_preempted_requests_end_as_planned() -> None:
    requests = [request(0.0, 32, 60), request(0.0, 32, 60), request(3.0, 32, 40)]
    engine = staged(kv_cache_memory="160KiB", max_num_seqs=3)
    run = simulate(requests, DEFAULTS, stages_of(4.0, 4.0), engine)
    assert len(run.finished) == 3
    assert run.stats.preemptions_total > 0


def test_a_summary_has_the_share_of_each_stage_and_the_bubble() -> None:
    requests = [request(0.0, 1, 3)]
    run = simulate(requests, DEFAULTS, stages_of(3.0, 5.0), staged())
    found = summary_of(run, requests, Goals())["stages"]
    assert found["busy_share"] == pytest.approx([9 / 24, 15 / 24])
    assert found["bubble_share"] == pytest.approx(9 / 24)
    plain = simulate(requests, DEFAULTS, machine(), config())
    assert "stages" not in summary_of(plain, requests, Goals())


def test_a_stage_costs_its_own_layers_and_the_rows_it_receives() -> None:
    engine = engine_config({"pipeline_parallel_size": 2})
    found = described_machine(engine, **RATES, message_gb_per_s=0.001, message_us=70.0)
    program = planned_program(engine)
    first, last = split(program, 2)
    step, shape = plan_of((5, 1), (9, 1), (0, 1)), StepShape([1, 1, 1], [5, 9, 0])
    own_ms = [
        RooflineCost(part, gb_per_s=5.0, gflop_per_s=50.0, fixed_ms=0.5).step_ms(step)
        for part in (first, last)
    ]
    assert found.stages[0].step_ms(step) == pytest.approx(own_ms[0])
    received_bytes = last.segment_cost("trunk", shape).comm_bytes
    assert received_bytes == 3 * 4 * program.outputs["hidden"].width
    sent_ms = received_bytes / 0.001e6 + 0.070
    assert found.stages[1].step_ms(step) == pytest.approx(own_ms[1] + sent_ms)
    assert found.cost.step_ms(step) == pytest.approx(sum(own_ms) + sent_ms)
    linear = [
        RooflineCost(part, gb_per_s=5.0, gflop_per_s=50.0, fixed_ms=0.5).linear()
        for part in (first, last)
    ]
    assert found.linear.fixed_ms == pytest.approx(sum(one.fixed_ms for one in linear) + 0.070)
    assert found.linear.token_ms > sum(one.token_ms for one in linear)
    assert found.num_layers == 0
    assert found.about["stages"] == len(layers_of_stages(program, 2)) == 2
    one = described_machine(engine_config({}), **RATES)
    assert found.token_bytes == one.token_bytes


def test_ranks_inside_stages_share_the_machine() -> None:
    both = engine_config({"pipeline_parallel_size": 2, "tensor_parallel_size": 2})
    found = described_machine(both, **RATES)
    assert found.about["ranks"] == 4
    assert len(found.stages) == 2
    half = described_machine(engine_config({"pipeline_parallel_size": 2}), **RATES)
    step = plan_of(*((0, 1) for _ in range(4)))
    # Two stages of two ranks: each rank has a quarter of the rates and half of a stage's work.
    for ranked, whole in zip(found.stages, half.stages, strict=True):
        assert ranked.step_ms(step) == pytest.approx(whole.step_ms(step), rel=0.5)


def test_machines_and_engines_of_other_stages_are_rejected() -> None:
    with pytest.raises(SettingError, match="the simulated machine has 1 stage:"):
        simulate([request(0.0, 1, 1)], DEFAULTS, machine(), staged())
    with pytest.raises(SettingError, match="is 1 and the simulated machine has 2 stages"):
        simulate([request(0.0, 1, 1)], DEFAULTS, stages_of(1.0, 1.0), config())
    with pytest.raises(SettingError, match="message_gb_per_s is 0; it must be above 0"):
        described_machine(engine_config({"pipeline_parallel_size": 2}), **RATES, message_gb_per_s=0)
    with pytest.raises(SettingError, match="stage needs one"):
        described_machine(engine_config({"pipeline_parallel_size": 50}), **RATES)

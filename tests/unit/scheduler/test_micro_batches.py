"""MicroBatches: requests that generate are divided over the plans in flight of a pipeline, and each
gets the tokens it gets alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.records import StepPlan
from quire.scheduler.micro_batches import MicroBatches
from quire.scheduler.step_budget import CostModel, StepBudget
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup
from tests.unit.scheduler.test_properties import draw_setup, run_case


class Pipeline(Harness):
    """A harness that checks that no plan reads a token which a plan in flight samples."""

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        for other, *_ in self.out:
            sampled = other.slots[other.sample_counts > 0]
            stays = set(sampled.tolist()) - set(plan.retired.tolist())
            assert not stays & set(plan.slots.tolist())


def pipeline(stages: int, requests: int, **changes: int) -> Pipeline:
    """Return a harness with so many requests that generate."""
    setup = Setup(
        **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 200} | changes,  # type: ignore[arg-type]
        plans_in_flight=stages,
        micro_batches=stages,
        run_late=True,
    )
    harness = Pipeline(setup)
    for number in range(requests):
        harness.add(make_request(f"r{number}", [number, 2, 3], max_tokens=30))
    return harness


@pytest.mark.parametrize(("stages", "requests"), [(2, 6), (2, 7), (3, 8), (4, 8)])
def test_each_plan_has_its_share_of_the_requests_that_generate(stages: int, requests: int) -> None:
    harness = pipeline(stages, requests)
    for _ in range(3 * stages):  # until the prompts are computed
        harness.step()
    harness.plans.clear()
    for _ in range(2 * stages):
        harness.step()
        assert len(harness.out) == stages - 1  # and the one just collected
    sizes = [len(plan.slots) for plan in harness.plans]
    assert max(sizes) == -(-requests // stages)
    for first in range(len(sizes) - stages):
        rows = np.concatenate([p.slots for p in harness.plans[first : first + stages]])
        assert sorted(rows.tolist()) == list(range(requests))  # each request once
    harness.drain()
    harness.check_end()


def test_fewer_requests_than_stages_are_computed_one_by_one() -> None:
    harness = pipeline(3, 2)
    harness.drain()
    assert harness.max_in_flight == 2
    harness.check_end()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    harness = pipeline(3, 0, max_num_batched_tokens=8)
    harness.add(make_request("long", list(range(1, 11)) * 3, max_tokens=4))
    harness.step()
    assert [plan.starts.tolist() for plan in harness.plans] == [[0], [8], [16]]
    harness.drain()
    harness.check_end()


def test_beams_keep_their_rows_together() -> None:
    harness = pipeline(2, 4)
    beams = {"n": 4, "best_of": 4, "use_beam_search": True, "temperature": 0.0}
    for stream in range(4):
        numbers = {"max_tokens": 8, "stream": stream}
        harness.add(make_request(f"b#{stream}", [4, 5, 6], group="b", **numbers, **beams))
    harness.drain()
    harness.check_end()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False), num_operations=st.integers(0, 60))
def test_every_request_gets_the_tokens_it_gets_alone(random: Random, num_operations: int) -> None:
    drawn = draw_setup(random)
    stages = 2 + drawn.num_blocks % 3
    setup = replace(drawn, plans_in_flight=stages, micro_batches=stages, drafts_in_cache=False)
    run_case(random, setup, num_operations)


def test_a_plan_that_takes_all_requests_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MicroBatches, "begin_step", lambda self, step: None)
    harness = pipeline(2, 4)
    with pytest.raises(AssertionError):
        harness.drain()


def test_an_objective_between_tokens_is_divided_over_the_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds: list[float] = []
    bound = StepBudget.bound

    def watched(self: StepBudget, prompt_ms: float, long_ms: float, cost: CostModel) -> None:
        bounds.append(prompt_ms)
        bound(self, prompt_ms, long_ms, cost)

    monkeypatch.setattr(StepBudget, "bound", watched)
    harness = pipeline(2, 2, tpot_target_ms=1_000)
    for _ in range(4):
        harness.step()
    harness.add(make_request("long", [5] * 40, max_tokens=2))
    harness.drain()
    found = [ms for ms in bounds if ms < np.inf]
    assert found
    assert 400.0 < max(found) < 500.0

"""One Answer over stages: requests of drawn cases, computed by a pipeline of processes with as many
plans in flight, get bit for bit the tokens and log-probabilities of one process.

The processes of a model live over all its cases, which are those of test_ranks.py without layered
prefill; QUIRE_EXACT_STAGE_CASES=500 runs more of them. Stages of two ranks each and a pipeline of
three stages get some cases.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count

import pytest

from quire.base.records import StepPlan
from quire.config.proposer_kinds import COMPUTED
from quire.execute.native import NativeExecutor
from quire.program.ops import Add
from quire.program.program import Program
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.stage_executor import PipelineExecutor
from quire.runner.handle import Handle
from quire.runner.pipelined_runner import PipelinedRunner
from tests.conftest import SHOWN
from tests.exact.divided_models import (
    DividedModel,
    any_differs,
    compare_drafts,
    drafted_cases,
    drafts_alike,
)
from tests.exact.families import MAX_SHOWN, compare_layout
from tests.exact.rig import AloneRuns, Model
from tests.exact.test_ranks import with_few_processes
from tests.exact.workload import VOCAB_SIZE, Case, draw_case

NUM_MORE = int(os.environ.get("QUIRE_EXACT_STAGE_CASES", "0"))
GOALS = (
    *("preempted", "prefix_hit", "chunked", "forked", "structured", "accepted", "rejected"),
    *("saved", "fetched"),
)
# What a tier has in time depends on the machine: few cases may reach nothing of it.
SURE_GOALS = tuple(goal for goal in GOALS if goal != "fetched")
# Stages and the ranks of each, by their place in families.py.
LAYOUTS = {"PP 2": (2, 1), "PP 3": (3, 1), "TP 2 x PP 2": (2, 2)}


class CountingRunner(PipelinedRunner):
    """A PipelinedRunner that counts plans submitted while another was in flight."""

    overlapped = 0

    def submit(self, plan: StepPlan) -> Handle:
        """See PipelinedRunner."""
        step = super().submit(plan)
        CountingRunner.overlapped += len(self._out) > 1
        return step


def case_for_stages(number: int, num_models: int, stages: int) -> Case:
    """Return a case without what a pipeline refuses, and with a plan in flight for each stage."""
    case = draw_case(number, num_models=num_models, vocab_size=VOCAB_SIZE)
    settings = replace(
        case.settings,
        tier_in_host=False,
        plans_in_flight=stages,
        micro_batches=stages,
    )
    return replace(case, settings=settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_answer_as_one_process(
    wholes: dict[str, Model], alone: AloneRuns, layout: str, record_property: object
) -> None:
    stages, degree = LAYOUTS[layout]
    CountingRunner.overlapped = 0
    executor_class = PipelineExecutorClass(
        stages=stages, degree=degree, binds=False, poison=True, shares_blocks=True
    )
    reached = compare_layout(
        layout,
        wholes,
        lambda name: DividedModel(wholes[name], executor_class),
        lambda number: with_few_processes(case_for_stages(number, 1, stages)),
        GOALS,
        alone=alone,
        num_more=NUM_MORE if layout == "PP 2" else NUM_MORE // 4,
        runner_type=CountingRunner,
    )
    record_property(SHOWN, f"{layout}: {reached}")  # type: ignore[operator]
    assert CountingRunner.overlapped
    if layout != "PP 3":
        assert all(reached[goal] for goal in SURE_GOALS), reached


def test_what_computes_drafts_changes_no_answer(wholes: dict[str, Model]) -> None:
    made = PipelineExecutorClass(stages=2, degree=1, binds=False, poison=True, shares_blocks=True)
    whole = wholes["tied"]
    model = DividedModel(whole, made, draft_layers=3)  # of both stages
    cases = drafted_cases((case_for_stages(number, 1, 2) for number in count()), COMPUTED, 2)
    eagle = next(case for case in cases if case.settings.proposer == "eagle")
    assert drafts_alike(whole, model, eagle, runner_type=PipelinedRunner)
    lines, drafted = compare_drafts(model, cases, runner_type=PipelinedRunner)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(drafted[name] for name in COMPUTED), drafted


class WithoutTheSum(PipelineExecutorClass):
    """Stages that send the stream before what the last layer has left is added to it."""

    def programs(self, program: Program) -> list[Program]:
        return [self._planted(own) for own in super().programs(program)]

    def _planted(self, own: Program) -> Program:
        trunk = tuple(op for op in own.segments["trunk"] if not isinstance(op, Add))
        return replace(own, segments={**own.segments, "trunk": trunk})


class OutOfOrder(PipelinedRunner):
    """Compute the copies of blocks of a plan before the steps in flight."""

    def submit(self, plan: StepPlan) -> Handle:
        if len(plan.copy_from):
            executor = self.executor
            assert isinstance(executor, PipelineExecutor)
            NativeExecutor.copy_blocks(executor, plan.copy_to, plan.copy_from)
        return super().submit(plan)


@pytest.mark.parametrize("fault", ["sum", "copies"])
def test_a_fault_is_detected(wholes: dict[str, Model], fault: str) -> None:
    made = WithoutTheSum if fault == "sum" else PipelineExecutorClass
    runner = PipelinedRunner if fault == "sum" else OutOfOrder
    executor_class = made(stages=2, degree=1, binds=False, shares_blocks=True)
    model = DividedModel(wholes["llama"], executor_class)
    cases = (case_for_stages(7 * number, 1, 2) for number in range(40))
    assert any_differs(model, cases, runner_type=runner)

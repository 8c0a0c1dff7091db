"""One Answer over stages: requests of drawn cases, computed by a pipeline of processes with as many
plans in flight, get bit for bit the tokens and log-probabilities of one process.

The processes of a model live over all its cases, which are those of test_ranks.py without layered
prefill; QUIRE_EXACT_STAGE_CASES=500 runs more of them. Stages of two ranks each and a pipeline of
three stages get some cases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from quire.base.records import StepPlan
from quire.config.proposer_kinds import COMPUTED
from quire.execute.native import NativeExecutor
from quire.program.ops import Add
from quire.program.program import Program
from quire.program.tensors import DType
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.stage_executor import PipelineExecutor
from quire.runner.handle import Handle
from quire.runner.pipelined_runner import PipelinedRunner
from tests.conftest import SHOWN
from tests.exact.divided_models import (
    DividedModel,
    any_differs,
    compare_drafts,
    compare_with_one_process,
    drafted_cases,
    drafts_alike,
)
from tests.exact.rig import Model
from tests.exact.test_ranks import with_few_processes
from tests.exact.workload import VOCAB_SIZE, Case, draw_case
from tests.models.cases_experts import MIXTRAL, QWEN3_MOE
from tests.models.cases_gemma import GEMMA3
from tests.models.cases_qwen import QWEN3
from tests.tiny_models import write_tiny, write_tiny_llama

NUM_CASES = int(os.environ.get("QUIRE_EXACT_STAGE_CASES", "7"))
GOALS = (
    *("preempted", "prefix_hit", "chunked", "forked", "structured", "accepted", "rejected"),
    *("saved", "fetched"),
)
MAX_SHOWN = 10
SIZE = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Return models in one process, of three layers each."""
    root = tmp_path_factory.mktemp("stages")
    llama = write_tiny_llama(root / "llama", seed=25, hidden_size=68, num_hidden_layers=3, **HEADS)
    tied = write_tiny_llama(
        root / "tied",
        seed=26,
        dtype="bf16",
        tie_word_embeddings=True,
        num_hidden_layers=3,
        **HEADS,
    )
    qwen = write_tiny(root / "qwen", QWEN3 | SIZE | HEADS, seed=27)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma = write_tiny(
        root / "gemma", GEMMA3 | SIZE | HEADS | {"layer_types": kinds}, seed=28, dtype="bf16"
    )
    mixtral = write_tiny(root / "mixtral", MIXTRAL | SIZE | HEADS, seed=29)
    qwen_moe = write_tiny(root / "qwen_moe", QWEN3_MOE | SIZE | HEADS, seed=30)
    made = [
        Model(llama, DType.F32),
        Model(tied, DType.BF16),
        Model(qwen, DType.BF16),
        Model(gemma, DType.BF16),
        Model(tied, DType.BF16, "int4-g32", "int8"),
        Model(mixtral, DType.BF16),
        Model(qwen_moe, DType.BF16),
    ]
    yield made
    for model in made:
        model.close()


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


@pytest.mark.parametrize(
    ("stages", "degree", "models", "num_cases"),
    [
        (2, 1, slice(None), NUM_CASES),
        (3, 1, slice(0, 2), max(NUM_CASES // 4, 3)),
        (2, 2, slice(3, 6), max(NUM_CASES // 4, 3)),
    ],
    ids=["two stages", "three stages", "two stages of two ranks"],
)
def test_stages_answer_as_one_process(
    wholes: list[Model],
    stages: int,
    degree: int,
    models: slice,
    num_cases: int,
    record_property: object,
) -> None:
    CountingRunner.overlapped = 0
    executor_class = PipelineExecutorClass(
        stages=stages, degree=degree, binds=False, poison=True, shares_blocks=True
    )
    split = [DividedModel(whole, executor_class) for whole in wholes[models]]
    cases = (
        with_few_processes(case_for_stages(number, len(split), stages))
        for number in range(num_cases)
    )
    lines, reached = compare_with_one_process(split, cases, GOALS, runner_type=CountingRunner)
    reached["overlapped"] = CountingRunner.overlapped
    record_property(SHOWN, f"{stages} x {degree}: {num_cases} cases; {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert reached["overlapped"]
    if (stages, degree) == (2, 1):
        # What a tier has in time depends on the machine: few cases may reach nothing of it.
        assert all(reached[goal] for goal in GOALS if goal != "fetched" or num_cases > 7), reached


def test_what_computes_drafts_changes_no_answer(wholes: list[Model]) -> None:
    made = PipelineExecutorClass(stages=2, degree=1, binds=False, poison=True, shares_blocks=True)
    model = DividedModel(wholes[1], made, draft_layers=3)  # of both stages
    cases = drafted_cases((case_for_stages(number, 1, 2) for number in count()), COMPUTED, 2)
    eagle = next(case for case in cases if case.settings.proposer == "eagle")
    assert drafts_alike(wholes[1], model, eagle, runner_type=PipelinedRunner)
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
def test_a_fault_is_detected(wholes: list[Model], fault: str) -> None:
    made = WithoutTheSum if fault == "sum" else PipelineExecutorClass
    runner = PipelinedRunner if fault == "sum" else OutOfOrder
    model = DividedModel(wholes[0], made(stages=2, degree=1, binds=False, shares_blocks=True))
    cases = (case_for_stages(number * len(wholes), len(wholes), 2) for number in range(40))
    assert any_differs(model, cases, runner_type=runner)

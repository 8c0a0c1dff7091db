"""One Answer over ranks: requests of drawn cases, computed by several processes, get bit for bit
the tokens and log-probabilities of one process.

The processes of a model live over all its cases. Cases are those of test_one_answer.py, with disk
tiers; QUIRE_EXACT_RANK_CASES=500 runs more of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import pytest

from quire.config.proposer_kinds import COMPUTED, HEADS
from quire.program.comm_ops import AllGather
from quire.program.expert_parallel import ExpertPlan
from quire.program.expert_parallel import mixtures as mixtures_of
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.shared_pools import PoolShare
from tests.conftest import SHOWN
from tests.exact.divided_models import (
    DividedModel,
    any_differs,
    compare_drafts,
    compare_with_one_process,
    drafted_cases,
    drafts_alike,
)
from tests.exact.rig import AloneRuns, Model, differences, run_case
from tests.exact.workload import VOCAB_SIZE, Case, draw_case
from tests.models.cases_experts import MIXTRAL, QWEN3_MOE
from tests.models.cases_gemma import GEMMA3
from tests.models.cases_qwen import QWEN3
from tests.tiny_models import write_tiny, write_tiny_llama

NUM_CASES = int(os.environ.get("QUIRE_EXACT_RANK_CASES", "7"))
NUM_CASES_OF_FOUR = max(NUM_CASES // 6, 3)
NUM_DRAFTED = max(NUM_CASES // 3, 2)  # cases of each proposer that computes drafts
# Where there are fewer models than cases, two of the default cases reach nothing of their own.
FEWER_CASES = [number for number in range(NUM_CASES) if NUM_CASES > 7 or number not in (4, 5)]
GOALS = (
    *("preempted", "prefix_hit", "chunked", "layered", "structured", "accepted", "rejected"),
    *("saved", "fetched"),
)
MAX_SHOWN = 10
SIZE = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Return models in one process: odd widths, heads that divide by 2 and by 4."""
    root = tmp_path_factory.mktemp("ranks")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = write_tiny_llama(root / "llama", seed=15, hidden_size=68, **heads)
    tied = write_tiny_llama(root / "tied", seed=16, dtype="bf16", tie_word_embeddings=True, **heads)
    qwen = write_tiny(root / "qwen", QWEN3 | SIZE | heads, seed=17)
    gemma = write_tiny(
        root / "gemma",
        GEMMA3 | SIZE | heads | {"layer_types": ["sliding_attention", "full_attention"]},
        seed=18,
        dtype="bf16",
    )
    mixtral = write_tiny(root / "mixtral", MIXTRAL | SIZE | heads, seed=19)
    made = [
        Model(llama, DType.F32),
        Model(tied, DType.BF16),
        Model(qwen, DType.BF16),
        Model(gemma, DType.BF16),
        Model(llama, DType.F32, "int8", "int8"),
        Model(tied, DType.BF16, "int4-g32"),
        Model(mixtral, DType.BF16),
    ]
    yield made
    for model in made:
        model.close()


def ranks(whole: Model, degree: int, **more: int) -> DividedModel:
    """Return a model over ranks, with buffers full of NaN before each run. more: of
    DividedModel."""
    made = RankedExecutorClass(degree=degree, binds=False, poison=True, shares_blocks=True)
    return DividedModel(whole, made, **more)


def case_for_ranks(number: int, num_models: int) -> Case:
    """Return a case without what several ranks refuse."""
    case = draw_case(number, num_models=num_models, vocab_size=VOCAB_SIZE)
    return replace(case, settings=replace(case.settings, tier_in_host=False))


def without_tier(case: Case) -> Case:
    """Return a case without a tier: it holds whole blocks, which rank 0 has only of native ranks
    that share its memory."""
    return replace(case, settings=replace(case.settings, tier_blocks=0))


def with_few_processes(case: Case) -> Case:
    """Return a case with drafts of the first layers where heads draft: these need further
    processes."""
    settings = case.settings
    is_of_heads = settings.proposer in HEADS
    return replace(case, settings=replace(settings, proposer="self")) if is_of_heads else case


@pytest.mark.parametrize(("degree", "num_cases"), [(2, NUM_CASES), (4, NUM_CASES_OF_FOUR)])
def test_ranks_answer_as_one_process(
    wholes: list[Model], degree: int, num_cases: int, record_property: object
) -> None:
    # More ranks than cores wait for each other: fewer models of them.
    models = [ranks(whole, degree) for whole in (wholes if degree == 2 else wholes[-2:])]
    cases = (case_for_ranks(number, len(models)) for number in range(num_cases))
    lines, reached = compare_with_one_process(models, cases, GOALS)
    record_property(SHOWN, f"{degree} ranks: {num_cases} cases; {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    if degree == 2:
        assert all(reached.values()), reached


def test_what_computes_drafts_changes_no_answer(wholes: list[Model]) -> None:
    model = ranks(wholes[1], 2, draft_layers=2)
    cases = drafted_cases(map(case_for_one, count()), COMPUTED, NUM_DRAFTED)
    for kind in HEADS:  # they read the hidden states of one process
        case = next(one for one in cases if one.settings.proposer == kind)
        assert drafts_alike(wholes[1], model, case), kind
    lines, drafted = compare_drafts(model, cases)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(drafted[name] for name in COMPUTED), drafted


def case_for_one(number: int) -> Case:
    """Return a case for a single model."""
    return case_for_ranks(number, 1)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Return mixtures in one process: numbers of experts that 2 and 4 do not divide."""
    root = tmp_path_factory.mktemp("mixtures")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mixtral = write_tiny(
        root / "mixtral", MIXTRAL | SIZE | heads | {"num_local_experts": 7}, seed=21
    )
    qwen = write_tiny(root / "qwen", QWEN3_MOE | SIZE | heads, seed=22)
    made = [
        Model(mixtral, DType.BF16),
        Model(qwen, DType.F32),
        Model(qwen, DType.BF16, "int8"),
    ]
    yield made
    for model in made:
        model.close()


def distributed(whole: Model, degree: int, plan: ExpertPlan) -> DividedModel:
    """Return a mixture with its experts distributed over ranks."""
    made = RankedExecutorClass(
        degree=degree, experts=plan, binds=False, poison=True, shares_blocks=True
    )
    return DividedModel(whole, made)


def skewed(whole: Model) -> ExpertPlan:
    """Return a plan for a few experts that most rows choose, with copies of them."""
    loads = [
        [1000 // (1 + expert) for expert in range(op.routing.width)]
        for op in mixtures_of(whole.program)
    ]
    return ExpertPlan(loads=tuple(map(tuple, loads)), redundant=3)


@pytest.mark.parametrize(
    ("degree", "numbers"), [(2, FEWER_CASES), (4, range(NUM_CASES_OF_FOUR))], ids=["2", "4"]
)
def test_distributed_experts_answer_as_one_process(
    mixtures: list[Model], degree: int, numbers: Sequence[int], record_property: object
) -> None:
    models = [
        distributed(whole, degree, ExpertPlan() if number % 2 else skewed(whole))
        for number, whole in enumerate(mixtures if degree == 2 else mixtures[:2])
    ]
    cases = (case_for_ranks(number, len(models)) for number in numbers)
    lines, reached = compare_with_one_process(models, cases, GOALS)
    record_property(SHOWN, f"experts on {degree} ranks: {len(numbers)} cases; {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    if degree == 2:
        assert all(reached.values()), reached


def test_sums_in_the_order_of_ranks_depend_on_nothing_but_the_degree(wholes: list[Model]) -> None:
    alone, lines = AloneRuns(), []
    for whole in (wholes[4], wholes[6]):  # int8, and a mixture
        fast = RankedExecutorClass(
            degree=2, mode=TpMode.FAST, binds=False, poison=True, shares_blocks=True
        )
        model = DividedModel(whole, fast)
        model.name += " fast"
        try:
            for number in range(max(NUM_CASES // 6, 1)):
                case = case_for_ranks(number, 1)
                for request in case.requests:
                    alone.of(model, request)  # by the same ranks
                lines += differences(model, run_case(model, case, alone=alone), alone)
        finally:
            model.close()
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])


class _Faulty(RankedExecutorClass):
    """Ranks with a fault in one of their programs."""

    def change(self, op: AllGather, number: int) -> AllGather | None:
        """Return an exchange of the trunk as it is planted; None leaves it out."""
        raise NotImplementedError

    def programs(self, program: Program) -> list[Program]:
        return [self._planted(own) for own in super().programs(program)]

    def _planted(self, own: Program) -> Program:
        ops, number = [], 0
        for op in own.segments["trunk"]:
            changed = op
            if isinstance(op, AllGather):
                changed, number = self.change(op, number), number + 1
            if changed is not None:
                ops.append(changed)
        return replace(own, segments={**own.segments, "trunk": tuple(ops)})


class InAnotherOrder(_Faulty):
    """Exchange columns in units of one instead of 32, so that they arrive at other places."""

    def change(self, op: AllGather, number: int) -> AllGather | None:
        return replace(op, unit=1) if number == 3 else op


class Stale(_Faulty):
    """Leave one exchange out: the columns of others are those of an earlier step, or NaN."""

    def change(self, op: AllGather, number: int) -> AllGather | None:
        return None if number == 2 else op


class OtherExperts(RankedExecutorClass):
    """Rank 1 takes the weights of its last expert for those of its first, and the reverse."""

    def programs(self, program: Program) -> list[Program]:
        zero, one = super().programs(program)
        weights = dict(one.weights)
        for op in mixtures_of(one):
            down = weights[op.down]
            first, *middle, last = down.by_expert()
            parts = [*last.parts, *(p for w in middle for p in w.parts), *first.parts]
            weights[op.down] = replace(down, parts=tuple(parts))
        return [zero, replace(one, weights=weights)]


class OneShareForAll(RankedExecutorClass):
    """Blocks leave and enter the pool of rank 1 with the heads of rank 0."""

    def pool_shares(self, program: Program) -> list[PoolShare]:
        zero, one = super().pool_shares(program)
        return [replace(zero, heads=one.heads), one]


def test_a_fault_in_the_blocks_of_a_tier_is_detected(wholes: list[Model]) -> None:
    # Number 6 is the first that shows it.
    cases = (case_for_ranks(number * len(wholes), len(wholes)) for number in range(6, 60))
    with_tiers = (case for case in cases if case.settings.tier_blocks)
    executor_class = OneShareForAll(degree=2, binds=False, shares_blocks=True)
    assert any_differs(DividedModel(wholes[0], executor_class), with_tiers)


def test_experts_of_other_weights_are_detected(mixtures: list[Model]) -> None:
    executor_class = OtherExperts(degree=2, experts=ExpertPlan(), binds=False, shares_blocks=True)
    assert any_differs(DividedModel(mixtures[0], executor_class), [case_for_ranks(0, 1)])


@pytest.mark.parametrize("fault", [InAnotherOrder, Stale])
def test_a_fault_in_an_exchange_is_detected(wholes: list[Model], fault: type[_Faulty]) -> None:
    cases = (case_for_ranks(number * len(wholes), len(wholes)) for number in range(6))
    executor_class = fault(degree=2, binds=False, shares_blocks=True)
    assert any_differs(DividedModel(wholes[0], executor_class), cases)

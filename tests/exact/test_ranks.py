"""One Answer over ranks: requests of drawn cases, computed by several processes, get bit for bit
the tokens and log-probabilities of one process.

The processes of a model live over all its cases. Cases are those of test_one_answer.py, with disk
tiers, as families.py distributes them; QUIRE_EXACT_RANK_CASES=500 runs more of them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count

import pytest

from quire.config.proposer_kinds import COMPUTED
from quire.config.proposer_kinds import HEADS as DRAFT_HEADS
from quire.program.comm_ops import AllGather
from quire.program.expert_parallel import ExpertPlan
from quire.program.expert_parallel import mixtures as mixtures_of
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.shared_pools import PoolShare
from tests.conftest import SHOWN
from tests.exact.divided_models import (
    DividedModel,
    any_differs,
    compare_drafts,
    drafted_cases,
    drafts_alike,
)
from tests.exact.families import MAX_SHOWN, compare_layout
from tests.exact.rig import AloneRuns, Model, differences, run_case
from tests.exact.workload import VOCAB_SIZE, Case, draw_case

NUM_MORE = int(os.environ.get("QUIRE_EXACT_RANK_CASES", "0"))
NUM_DRAFTED = max(NUM_MORE // 3, 2)  # cases of each proposer that computes drafts
GOALS = (
    *("preempted", "prefix_hit", "chunked", "layered", "structured", "accepted", "rejected"),
    *("saved", "fetched"),
)
# Ranks, and whether whole experts are on them, by their place in families.py.
LAYOUTS = {"TP 2": (2, False), "TP 4": (4, False), "EP 2": (2, True), "EP 4": (4, True)}


def ranks(whole: Model, degree: int, **more: int) -> DividedModel:
    """Return a model over ranks, with buffers full of NaN before each run. more: of
    DividedModel."""
    made = RankedExecutorClass(degree=degree, binds=False, poison=True, shares_blocks=True)
    return DividedModel(whole, made, **more)


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
    is_of_heads = settings.proposer in DRAFT_HEADS
    return replace(case, settings=replace(settings, proposer="self")) if is_of_heads else case


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_answer_as_one_process(
    wholes: dict[str, Model], alone: AloneRuns, layout: str, record_property: object
) -> None:
    degree, has_whole_experts = LAYOUTS[layout]

    def divided(name: str) -> DividedModel:
        whole = wholes[name]
        if not has_whole_experts:
            return ranks(whole, degree)
        return distributed(whole, degree, ExpertPlan() if "int8" in name else skewed(whole))

    # Heads that draft need further processes of each model.
    few = (lambda case: case) if degree == 2 else with_few_processes
    reached = compare_layout(
        layout,
        wholes,
        divided,
        lambda number: few(case_for_ranks(number, 1)),
        GOALS,
        alone=alone,
        num_more=NUM_MORE if degree == 2 else NUM_MORE // 6,
    )
    record_property(SHOWN, f"{layout}: {reached}")  # type: ignore[operator]
    sure = [goal for goal in GOALS if degree == 2 or goal != "fetched"]  # a tier may be late
    if layout != "EP 4":
        assert all(reached[goal] for goal in sure), reached


def test_what_computes_drafts_changes_no_answer(wholes: dict[str, Model]) -> None:
    whole = wholes["tied"]
    model = ranks(whole, 2, draft_layers=2)
    cases = drafted_cases(map(case_for_one, count()), COMPUTED, NUM_DRAFTED)
    for kind in DRAFT_HEADS:  # they read the hidden states of one process
        case = next(one for one in cases if one.settings.proposer == kind)
        assert drafts_alike(whole, model, case), kind
    lines, drafted = compare_drafts(model, cases)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(drafted[name] for name in COMPUTED), drafted


def case_for_one(number: int) -> Case:
    """Return a case for a single model."""
    return case_for_ranks(number, 1)


def test_sums_in_the_order_of_ranks_depend_on_nothing_but_the_degree(
    wholes: dict[str, Model],
) -> None:
    alone, lines = AloneRuns(), []
    for whole in (wholes["llama int8"], wholes["mixtral"]):
        fast = RankedExecutorClass(
            degree=2, mode=TpMode.FAST, binds=False, poison=True, shares_blocks=True
        )
        model = DividedModel(whole, fast)
        model.name += " fast"
        try:
            for number in range(max(NUM_MORE // 6, 1)):
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


def test_a_fault_in_the_blocks_of_a_tier_is_detected(wholes: dict[str, Model]) -> None:
    # Number 42 is the first that shows it.
    cases = map(case_for_one, range(42, 420, 7))
    with_tiers = (case for case in cases if case.settings.tier_blocks)
    executor_class = OneShareForAll(degree=2, binds=False, shares_blocks=True)
    assert any_differs(DividedModel(wholes["llama"], executor_class), with_tiers)


def test_experts_of_other_weights_are_detected(wholes: dict[str, Model]) -> None:
    executor_class = OtherExperts(degree=2, experts=ExpertPlan(), binds=False, shares_blocks=True)
    assert any_differs(DividedModel(wholes["mixtral"], executor_class), [case_for_one(0)])


@pytest.mark.parametrize("fault", [InAnotherOrder, Stale])
def test_a_fault_in_an_exchange_is_detected(wholes: dict[str, Model], fault: type[_Faulty]) -> None:
    executor_class = fault(degree=2, binds=False, shares_blocks=True)
    assert any_differs(DividedModel(wholes["llama"], executor_class), map(case_for_one, range(6)))

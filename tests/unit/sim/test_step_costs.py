"""Costs counted by kinds of operations are exactly those of the program, of each of its ranks."""

from __future__ import annotations

from pathlib import Path

from quire.models.registry import build_program, open_model
from quire.program.cost import StepShape
from quire.program.expert_parallel import even_placement
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.shard import shard
from quire.program.tensors import DType
from quire.sim.step_costs import StepCosts
from tests.models.cases import CASES
from tests.models.test_ranks import degrees_of

STEPS = (
    StepShape([1], [0]),
    StepShape([1, 1, 1], [5, 300, 2000]),
    StepShape([400, 1], [700, 3], num_samples=1),
    StepShape([], []),
)
FAMILIES = ("mixtral", "gemma3_mqa", "qwen2_tied", "qwen3_mqa")


def check(program: Program) -> int:
    """Compare, and return how many costs were counted for the program's operations."""
    costs = StepCosts(program)
    for step in STEPS:
        for segment in program.segments:
            assert costs.segment_cost(segment, step) == program.segment_cost(segment, step)
        assert costs.step_cost(step) == program.step_cost(step)
    return sum(map(len, costs._alike.values()))


def test_costs_are_those_of_the_program(tmp_path: Path) -> None:
    for case in (case for case in CASES if case.name in FAMILIES):
        path = case.write(tmp_path / case.name)
        program = build_program(open_model(path), dtype=DType.BF16, max_positions=64)
        for precision in (program, quantize(program, "int8")):
            assert check(precision) < len([*precision.operations()])
        degree = degrees_of(program)[0]
        ranks = [shard(program, degree=degree, rank=rank) for rank in (0, 1)]
        if case.has_experts:
            placement = even_placement(program, degree)
            ranks += [
                shard(program, degree=degree, rank=rank, placement=placement) for rank in (0, 1)
            ]
        for rank in ranks:
            check(rank)

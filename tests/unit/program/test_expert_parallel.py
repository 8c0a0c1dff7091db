"""Placement of experts on ranks, and the rewrite: a rank's weights, costs by hand, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.models.registry import build_program, open_model
from quire.program.cost import StepShape
from quire.program.expert_ops import Experts
from quire.program.expert_parallel import (
    ExpertPlan,
    balance,
    even_placement,
    mixtures,
    placement_by_load,
)
from quire.program.program import Program
from quire.program.serialize import from_plain, to_plain
from quire.program.shard import shard
from quire.program.table import format_program
from quire.program.tensors import DType
from tests.models.cases_experts import MIXTRAL, QWEN2_MOE
from tests.tiny_models import write_tiny, write_tiny_llama

SIZES = {"vocab_size": 131, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def mixtral(folder: Path, experts: int = 5) -> Program:
    """Return a program of 2 layers, 60 wide, inner width 45, 2 experts chosen, bf16."""
    config = MIXTRAL | SIZES | HEADS | {"num_local_experts": experts}
    spec = open_model(write_tiny(folder, config, seed=1))
    return build_program(spec, dtype=DType.BF16, max_positions=64)


def counts(holders: tuple[int, ...], degree: int) -> list[int]:
    return [sum(mask >> rank & 1 for mask in holders) for rank in range(degree)]


@pytest.mark.parametrize(("experts", "degree"), [(5, 2), (6, 4), (8, 4), (4, 4)])
def test_even_placement_gives_each_expert_one_rank(
    tmp_path: Path, experts: int, degree: int
) -> None:
    placement = even_placement(mixtral(tmp_path, experts), degree)
    totals = np.zeros(degree, int)
    for holders in placement.holders.values():
        assert all(mask.bit_count() == 1 for mask in holders)
        found = counts(holders, degree)
        assert max(found) - min(found) <= 1
        assert min(found) >= 1
        totals += found
    assert totals.max() - totals.min() <= 1  # over two layers: the smaller shares take turns


def test_a_rank_has_its_experts_whole_and_the_rest_is_elsewhere(tmp_path: Path) -> None:
    program = mixtral(tmp_path)
    placement = even_placement(program, 2)
    sources: set[str] = set()
    for rank in range(2):
        own = shard(program, degree=2, rank=rank, placement=placement)
        for op in mixtures(own):
            gate_up, down = own.weights[op.gate_up], own.weights[op.down]
            assert gate_up.experts == down.experts == len(op.own_experts)
            assert (gate_up.expert_rows, down.expert_rows) == (2 * 45, 60)
            named = {part.source.split(".experts.")[1].split(".")[0] for part in gate_up.parts}
            assert named == set(map(str, op.own_experts))
        held = {part.source for weight in own.weights.values() for part in weight.parts}
        assert held.isdisjoint(own.elsewhere)
        assert own.source_shapes() == program.source_shapes()
        assert from_plain(json.loads(json.dumps(to_plain(own)))) == own
        sources |= held
    assert sources == set(program.source_shapes())


def test_costs_are_those_of_the_rank(tmp_path: Path) -> None:
    program, step = mixtral(tmp_path), StepShape([10], [0])
    placement = even_placement(program, 2)
    whole = next(mixtures(program)).cost(program, step)
    of_ranks = []
    for rank in range(2):
        own = shard(program, degree=2, rank=rank, placement=placement)
        op = next(mixtures(own))
        of_ranks.append(op.cost(own, step))
        held = len(op.own_experts)
        # Of 20 pairs those of the other rank's experts: this rank's columns in f32.
        assert of_ranks[-1].comm_bytes == 20 * (5 - held) / 5 * op.y.width * 4
    assert sum(one.product_ops for one in of_ranks) == whole.product_ops
    assert abs(sum(one.weight_bytes for one in of_ranks) - whole.weight_bytes) <= 1
    text = format_program(own, step)
    assert "all_to_all of outputs, rank 1 of 2" in text
    assert "experts 3-4" in text


def test_a_shared_expert_is_split_like_a_dense_layer(tmp_path: Path) -> None:
    config = QWEN2_MOE | SIZES | HEADS
    program = build_program(
        open_model(write_tiny(tmp_path, config, seed=1)), dtype=DType.F32, max_positions=64
    )
    own = shard(program, degree=2, rank=0, placement=even_placement(program, 2))
    ops = [op for op in own.segments["trunk"] if isinstance(op, Experts)]
    shared = [op for op in ops if op.routing.width == 1]
    assert len(shared) == 2
    assert all(not op.holders and own.weights[op.gate_up].expert_rows == 2 * 64 for op in shared)


def test_placement_by_load_gives_ranks_equal_work(tmp_path: Path) -> None:
    program = mixtral(tmp_path, experts=8)
    loads = [[90, 5, 80, 5, 5, 5, 5, 5], [1, 1, 1, 1, 97, 1, 97, 1]]
    even, by_load = even_placement(program, 2), placement_by_load(program, 2, loads)
    assert balance(loads, even, 2) < balance(loads, by_load, 2)
    for holders in by_load.holders.values():
        assert counts(holders, 2) == [4, 4]
    first, second = by_load.holders.values()
    assert first[0] != first[2]
    assert second[4] != second[6]


def test_redundant_copies_are_of_the_most_chosen_experts(tmp_path: Path) -> None:
    program = mixtral(tmp_path, experts=6)
    loads = [[1, 1, 500, 1, 1, 1], [1, 100, 1, 90, 1, 1]]
    placement = placement_by_load(program, 4, loads, redundant=2)
    first, second = placement.holders.values()
    assert first[2].bit_count() == 3
    assert [second[1].bit_count(), second[3].bit_count()] == [2, 2]
    for holders in (first, second):
        assert sorted(counts(holders, 4)) == [2, 2, 2, 2]
    plain = placement_by_load(program, 4, loads)
    assert balance(loads, plain, 4) < balance(loads, placement, 4) <= 1
    for rank in range(4):
        shard(program, degree=4, rank=rank, placement=placement)


def test_every_drawn_load_gives_a_whole_placement(tmp_path: Path) -> None:
    program, rng = mixtral(tmp_path, experts=7), np.random.default_rng(5)
    for number in range(60):
        loads = (rng.pareto(0.7, (2, 7)) * 10).astype(int).tolist()
        degree, redundant = (2, 4)[number % 2], number % 7
        placement = placement_by_load(program, degree, loads, redundant=redundant)
        for holders in placement.holders.values():
            assert all(0 < mask < 1 << degree for mask in holders)
            assert min(counts(holders, degree)) >= 1


def test_what_cannot_be_distributed_is_refused_by_name(tmp_path: Path) -> None:
    dense = build_program(
        open_model(write_tiny_llama(tmp_path / "llama")), dtype=DType.F32, max_positions=64
    )
    with pytest.raises(SettingError, match="has no mixture of experts; leave it out"):
        even_placement(dense, 2)
    program = mixtral(tmp_path / "m", experts=3)
    with pytest.raises(SettingError, match="layers of 3 experts, fewer than 4 ranks"):
        even_placement(program, 4)
    with pytest.raises(SettingError, match=r"1 layers of \[3\] experts; .* 2 layers of \[3\]"):
        placement_by_load(program, 2, [[1, 2, 3]])
    with pytest.raises(SettingError, match="num_redundant_experts is 4; 0 to 3 are allowed"):
        ExpertPlan(loads=((1, 2, 3), (1, 2, 3)), redundant=4).placement(program, 2)

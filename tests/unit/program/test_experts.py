"""Route and Experts in a program: contracts, costs by hand, printing, and quantization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.models.registry import build_program, open_model
from quire.program.cost import Cost, StepShape
from quire.program.declarations import Weight, WeightForm, WeightPart
from quire.program.expert_ops import Experts, Route, expected_experts
from quire.program.ops import Embed, Linear, Op
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.table import format_program
from quire.program.tensors import DType
from tests.models.cases_experts import QWEN2_MOE, QWEN3_MOE
from tests.tiny_models import write_tiny

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 60, 33, 19, 5, 2
SIZES = {"vocab_size": 131, "max_position_embeddings": 512}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """19 experts of inner width 33 over 60, 5 chosen, 2 layers, bf16."""
    spec = open_model(write_tiny(tmp_path, QWEN3_MOE | SIZES, seed=1))
    return build_program(spec, dtype=DType.BF16, max_positions=64)


def first(program: Program, kind: type[Op]) -> Op:
    return next(op for op in program.segments["trunk"] if isinstance(op, kind))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (Route, {"top_k": 20}, "top_k is 20; 1 to 19 experts can be chosen"),
        (Route, {"bias": "norm"}, "norm has 60 rows"),
        (Route, {"groups": 4, "top_groups": 1}, "19 experts are no multiple"),
        (Route, {"groups": 19, "top_groups": 0}, "top_groups is 0"),
        (Route, {"groups": 19, "top_groups": 3}, "3 groups hold fewer than 5 experts"),
        (Experts, {"top_k": 0}, "top_k is 0; there are 19 experts"),
        (Experts, {"gate_up": "layers.0.qkv"}, "layers.0.qkv has 0 experts, not 19"),
        (Experts, {"gate_up": "layers.0.experts.down"}, "not 2 per inner"),
        (Experts, {"down": "layers.0.experts.gate_up"}, "not 2 per inner"),
        (Linear, {"weight": "layers.0.experts.down"}, "has 19 experts; a linear takes none"),
    ],
)
def test_a_contradiction_is_refused_with_its_numbers(
    program: Program, kind: type[Op], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        replace(first(program, kind), **changes).check(program)


def test_a_row_multiplies_by_its_experts_only(program: Program) -> None:
    step = StepShape([3, 4], [0, 10])
    cost = first(program, Experts).cost(program, step)
    assert cost.product_ops == 2 * 7 * TOP_K * 3 * HIDDEN * INNER


def test_the_experts_that_rows_are_expected_to_choose_are_read(program: Program) -> None:
    op, expert_bytes = first(program, Experts), 3 * HIDDEN * INNER * 2
    assert op.cost(program, StepShape([1], [0])).weight_bytes == TOP_K * expert_bytes
    two = op.cost(program, StepShape([2], [0])).weight_bytes
    assert two == round((TOP_K + TOP_K * (1 - TOP_K / EXPERTS)) * expert_bytes)
    many = op.cost(program, StepShape([400], [0])).weight_bytes
    assert many == EXPERTS * expert_bytes
    assert op.cost(program, StepShape([0], [0])).weight_bytes == 0


def test_no_more_experts_are_expected_than_there_are() -> None:
    assert expected_experts(1, 8, 8) == 8
    assert [round(expected_experts(rows, 2, 8), 2) for rows in (1, 2, 4)] == [2, 3.5, 5.47]


def test_a_decode_step_reads_a_fraction_of_the_weights(program: Program) -> None:
    ops = [op for op in program.segments["trunk"] if not isinstance(op, Experts | Embed)]
    step = StepShape([1], [7])
    others = sum((op.cost(program, step) for op in ops), Cost()).weight_bytes
    experts = LAYERS * TOP_K * 3 * HIDDEN * INNER * 2
    embedded = first(program, Embed).cost(program, step).weight_bytes
    assert program.segment_cost("trunk", step).weight_bytes == others + experts + embedded


def test_the_table_shows_choice_and_axis(program: Program) -> None:
    text = format_program(program, StepShape([1], [0]))
    assert "5 of 19 softmax normalized" in text
    assert "5 of 19: layers.0.experts.gate_up [19 x 66 x 60] bf16, " in text
    assert "layers.0.experts.down [19 x 60 x 33] bf16 silu" in text


def test_layers_with_experts_are_folded_in_the_table(tmp_path: Path) -> None:
    config = QWEN3_MOE | SIZES | {"num_hidden_layers": 9}
    spec = open_model(write_tiny(tmp_path, config, seed=1))
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    text = format_program(program, StepShape([1], [0]))
    assert "layers.7.experts" not in text
    assert "in turn" in text


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    spec = open_model(write_tiny(tmp_path, QWEN2_MOE | SIZES, seed=1))
    plain = build_program(spec, dtype=DType.BF16, max_positions=64)
    made = quantize(plain, "int4-g32")
    kept = {name for name, weight in made.weights.items() if not weight.scheme}
    products = {name for name in kept if made.weights[name].form is WeightForm.MATRIX}
    routers = {f"layers.{layer}.{name}" for layer in (0, 1) for name in ("router", "shared.gate")}
    assert products == routers
    assert made.weights["layers.0.experts.down"].scheme == "int4-g32"
    named = quantize(plain, "int4-g32", keep=["*.router=int8"])
    assert named.weights["layers.1.router"].scheme == "int8"


def test_bytes_of_a_few_bits_are_those_that_a_step_reads(program: Program) -> None:
    step = StepShape([1], [0])
    plain = first(program, Experts).cost(program, step).weight_bytes
    quantized = quantize(program, "int8")
    assert first(quantized, Experts).cost(quantized, step).weight_bytes < 0.6 * plain


def _weight(rows: list[int], experts: int, **part: int) -> Weight:
    parts = tuple(WeightPart(str(i), f"part.{i}", n, **part) for i, n in enumerate(rows))
    return Weight("w", WeightForm.MATRIX, parts, 8, DType.F32, experts=experts)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (_weight([4, 4, 4], 2), "is not 2 experts of equal size"),
        (_weight([4, 2], 2), "is not 2 experts of equal size"),
        (_weight([4], 1, of_rows=8, stacked=3), "8 rows of 3 stacked experts"),
    ],
)
def test_parts_that_do_not_divide_are_refused(program: Program, weight: Weight, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(program, weights={**program.weights, "w": weight})


def test_the_parts_of_each_expert_are_its_own() -> None:
    weight = _weight([1, 3, 2, 2], 2)
    one, other = weight.by_expert()
    assert [part.source for part in one.parts] == ["part.0", "part.1"]
    assert [part.source for part in other.parts] == ["part.2", "part.3"]
    assert (weight.rows, weight.expert_rows, one.rows, one.experts) == (8, 4, 4, 0)

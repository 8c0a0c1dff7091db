"""The cost of a step, against counts made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.models.registry import build_program, open_model
from quire.program.cost import Cost, StepShape
from quire.program.ops import Attention, Embed, Linear, Op, SoftCap, StoreKV
from quire.program.program import Program
from quire.program.tensors import DType, Rows
from tests.cases import each_case
from tests.tiny_models import write_tiny, write_tiny_llama


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return hidden 60, 5 heads of 16 over 1, inner 97, vocabulary 307, 2 layers, untied, bf16."""
    spec = open_model(write_tiny_llama(tmp_path))
    return build_program(spec, dtype=DType.BF16, max_positions=512)


def by_kind(program: Program, kind: type[Op], step: StepShape) -> Cost:
    ops = [op for ops in program.segments.values() for op in ops if isinstance(op, kind)]
    return sum((op.cost(program, step) for op in ops), Cost())


def test_products_take_two_operations_per_weight_and_row(program: Program) -> None:
    step = StepShape([3, 4], [0, 10])
    per_layer = 60 * 112 + 80 * 60 + 60 * 194 + 97 * 60
    expected = 2 * 7 * 2 * per_layer + 2 * 2 * 60 * 307
    assert by_kind(program, Linear, step).product_ops == expected
    assert program.step_cost(step).product_ops == expected


def test_the_head_counts_sampled_rows_only(program: Program) -> None:
    none, all_rows = (StepShape([9], [0], num_samples=count) for count in (0, 9))
    assert program.segment_cost("head", none).product_ops == 0
    assert program.segment_cost("head", all_rows).product_ops == 9 * 2 * 60 * 307


def test_weights_are_read_once_for_any_number_of_rows(program: Program) -> None:
    one, many = StepShape([1], [0]), StepShape([100], [0])
    linear = by_kind(program, Linear, one).weight_bytes
    assert linear == by_kind(program, Linear, many).weight_bytes
    assert linear == 2 * (2 * (60 * 112 + 80 * 60 + 60 * 194 + 97 * 60) + 60 * 307)


def test_an_embedding_reads_its_rows_and_never_more_than_the_table(program: Program) -> None:
    assert by_kind(program, Embed, StepShape([5], [0])).weight_bytes == 5 * 60 * 2
    assert by_kind(program, Embed, StepShape([400], [0])).weight_bytes == 307 * 60 * 2


def test_positions_are_looked_up_like_tokens_and_a_cap_counts_each_logit(tmp_path: Path) -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 60, "n_head": 5,
        "n_layer": 1, "n_positions": 64, "vocab_size": 307,
    }  # fmt: skip
    spec = open_model(write_tiny(tmp_path / "gpt2", gpt2, seed=0))
    learned = build_program(spec, dtype=DType.BF16, max_positions=64)
    cost = by_kind(learned, Embed, StepShape([5], [0]))
    assert cost.weight_bytes == 2 * 5 * 60 * 2  # of tokens and of positions
    folder = write_tiny_llama(tmp_path / "llama")
    plain = open_model(folder)
    capped = replace(plain, head=replace(plain.head, soft_cap=30.0))
    program = build_program(capped, dtype=DType.BF16, max_positions=64)
    cost = by_kind(program, SoftCap, StepShape([9], [0], num_samples=2))
    assert cost.other_ops == 6 * 2 * 307
    assert cost.memory_bytes == 0


def test_attention_counts_pairs_of_a_row_and_a_visible_position(program: Program) -> None:
    step = StepShape([2, 1], [10, 0])
    pairs = (11 + 12) + 1
    cost = by_kind(program, Attention, step)
    assert cost.attention_ops == 2 * 4 * pairs * 5 * 16
    assert cost.kv_bytes == 2 * (12 + 1) * (2 * 16 * 2)


def test_stored_keys_and_values_count_once_a_token_and_layer(program: Program) -> None:
    cost = by_kind(program, StoreKV, StepShape([6], [3]))
    assert cost.kv_bytes == 6 * program.caches[0].token_bytes


def test_a_chunked_prompt_attends_to_as_much_as_a_whole_one() -> None:
    whole = StepShape([100], [0]).attended_positions(0)
    parts = [StepShape([count], [start]) for start, count in ((0, 33), (33, 1), (34, 66))]
    assert sum(part.attended_positions(0) for part in parts) == whole == 100 * 101 // 2


@each_case("window", [1, 7, 64, 500])
@each_case(("start", "count"), [(0, 1), (0, 100), (5, 3), (200, 90)])
def test_a_window_matches_the_count_by_hand(start: int, count: int, window: int) -> None:
    step = StepShape([count], [start])
    rows = range(start, start + count)
    assert step.attended_positions(window) == sum(min(p + 1, window) for p in rows)
    seen = {q for p in rows for q in range(max(0, p - window + 1), p + 1)}
    assert step.read_positions(window) == len(seen)


def test_a_sequence_without_rows_reads_nothing() -> None:
    step = StepShape([0, 2], [50, 0])
    assert step.read_positions(0) == 2
    assert step.attended_positions(0) == 3
    assert step.rows(Rows.TOKENS) == 2


def test_costs_of_segments_add_up_to_the_step(program: Program) -> None:
    step = StepShape([8, 1], [0, 77])
    total = program.segment_cost("trunk", step) + program.segment_cost("head", step)
    assert total == program.step_cost(step)
    assert total.operations == total.product_ops + total.attention_ops + total.other_ops
    assert total.memory_bytes == total.weight_bytes + total.kv_bytes
    assert min(total.other_ops, total.buffer_bytes) > 0


def test_invalid_counts_are_rejected() -> None:
    with pytest.raises(ValueError, match="1 counts and 2 starts"):
        StepShape([1], [0, 0])
    with pytest.raises(ValueError, match="negative"):
        StepShape([-1], [0])

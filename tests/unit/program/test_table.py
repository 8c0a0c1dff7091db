"""The printed program: every operation is shown, repeated layers are folded and counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.models.registry import build_program, open_model
from quire.program.cost import StepShape
from quire.program.program import Program
from quire.program.table import amount, format_program
from quire.program.tensors import DType
from tests.tiny_models import write_tiny, write_tiny_llama


def make(folder: Path, num_layers: int) -> Program:
    spec = open_model(write_tiny_llama(folder, num_hidden_layers=num_layers))
    return build_program(spec, dtype=DType.F32, max_positions=512)


def test_shapes_are_symbols_and_weights_are_named(tmp_path: Path) -> None:
    text = format_program(make(tmp_path, 1), StepShape([4], [100]))
    assert "T = 4 tokens of Q = 1 sequences at depth 100, S = 1 sampled rows" in text
    assert "[T x 112] f32" in text
    assert "layers.0.qkv [112 x 60] f32" in text
    assert "[S x 307] f32" in text
    assert "5 heads over 1 of 16 layer 0" in text


def test_properties_that_change_numbers_are_printed(tmp_path: Path) -> None:
    plain = open_model(write_tiny_llama(tmp_path))
    spec = replace(
        plain,
        attention=replace(plain.attention, windows=(16, 0), soft_cap=50.0, head_norms=True),
        head=replace(plain.head, soft_cap=30.0, scale=0.25),
    )
    program = build_program(spec, dtype=DType.F32, max_positions=512)
    text = format_program(program, StepShape([4], [100]), all_layers=True)
    for words in ("window 16 capped at 50", "by 0.25", "at 30", "rms each 16"):
        assert words in text, words
    assert text.count("window 16") == 1


def test_learned_positions_are_distinguished_from_tokens(tmp_path: Path) -> None:
    opt = {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 60,
        "ffn_dim": 97, "num_attention_heads": 5, "num_hidden_layers": 1, "vocab_size": 307,
        "word_embed_proj_dim": 60, "max_position_embeddings": 64, "do_layer_norm_before": True,
    }  # fmt: skip
    spec = open_model(write_tiny(tmp_path, opt, seed=0))
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    text = format_program(program, StepShape([4], [10]))
    assert "positions [64 x 60] bf16 by positions" in text


def test_all_layers_lists_each_operation_once(tmp_path: Path) -> None:
    program = make(tmp_path, 5)
    lines = format_program(program, StepShape([1], [0]), all_layers=True).splitlines()
    numbered = [line for line in lines if line.split(maxsplit=1)[:1] and line.split()[0].isdigit()]
    assert len(numbered) == sum(len(ops) for ops in program.segments.values())


def test_repeated_layers_are_folded_and_hidden_operations_counted(tmp_path: Path) -> None:
    text = format_program(make(tmp_path, 5), StepShape([1], [0]))
    assert "... the same 11 in turn, 43 more operations" in text
    assert "layers.0.down" in text
    assert "layers.3.down" not in text


def test_a_single_layer_is_printed_whole(tmp_path: Path) -> None:
    assert "in turn" not in format_program(make(tmp_path, 1), StepShape([1], [0]))


def test_totals_are_those_of_the_cost_model(tmp_path: Path) -> None:
    program, step = make(tmp_path, 3), StepShape([16, 1], [0, 200])
    cost = program.step_cost(step)
    text = format_program(program, step)
    assert f"step:    {amount(cost.operations)} operations" in text
    assert f"{amount(cost.memory_bytes, 'B')} from memory" in text
    assert f"{amount(program.weight_bytes, 'B')} (" in text
    assert "384 B a token" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 k"),
        (123456, "123 k"),
        (999_700, "1000 k"),
        (2.5e12, "2.5 T"),
    ],
)
def test_amounts_have_three_digits_and_a_prefix(number: float, text: str) -> None:
    assert amount(number) == text


def test_amounts_of_bytes_carry_their_unit() -> None:
    assert amount(5, "B") == "5 B"
    assert amount(1_040_128, "B") == "1.04 MB"

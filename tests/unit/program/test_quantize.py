"""The rewrite that sets the precision of products: which weights, by which rule, at what cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.models.registry import build_program, open_model
from quire.program.cost import StepShape
from quire.program.declarations import WeightForm
from quire.program.program import Program
from quire.program.quantize import precision_text, quantize
from quire.program.serialize import digest, from_plain, to_plain
from quire.program.table import format_program
from quire.program.tensors import DType
from quire.quant.scheme import SCHEMES
from tests.tiny_models import write_tiny_llama


def make(folder: Path, **changes: Any) -> Program:
    spec = open_model(write_tiny_llama(folder, **changes))
    return build_program(spec, dtype=DType.BF16, max_positions=512)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return hidden 60, 5 heads of 16 over 1, inner 97, vocabulary 307, 2 layers, untied, bf16."""
    return make(tmp_path)


def schemes(program: Program) -> dict[str, str]:
    return {
        name: weight.scheme
        for name, weight in program.weights.items()
        if weight.form is WeightForm.MATRIX
    }


def test_only_products_get_the_scheme(program: Program) -> None:
    made = quantize(program, "int8")
    assert set(schemes(made).values()) == {"int8"}
    others = [w for w in made.weights.values() if w.form is not WeightForm.MATRIX]
    assert others == [w for w in program.weights.values() if w.form is not WeightForm.MATRIX]
    assert made.segments == program.segments
    assert quantize(made, "none") == program


def test_the_head_of_an_int4_model_is_int8_unless_named(program: Program) -> None:
    assert schemes(quantize(program, "int4"))["head"] == "int8"
    assert schemes(quantize(program, "int4"))["layers.0.o"] == "int4-g32"
    assert schemes(quantize(program, "int4-g64", head="int4-g128"))["head"] == "int4-g128"
    assert schemes(quantize(program, "int4-g64", head="bf16"))["head"] == ""
    assert schemes(quantize(program, "int8"))["head"] == "int8"
    assert schemes(quantize(program, "none"))["head"] == ""
    assert schemes(quantize(program, "fp8-block"))["head"] == "fp8"
    assert schemes(quantize(program, "fp8-block"))["layers.0.o"] == "fp8-block"


def test_a_tied_embedding_is_the_head(tmp_path: Path) -> None:
    made = quantize(make(tmp_path, tie_word_embeddings=True), "int4-g128")
    assert schemes(made)["embed"] == "int8"


def test_rules_override_by_name_and_the_last_match_wins(program: Program) -> None:
    made = quantize(
        program, "int4-g64", keep=["layers.*=int8", "layers.0.*=bf16", "*.down=none", "head=int4"]
    )
    assert schemes(made) == {
        "layers.0.qkv": "",
        "layers.0.o": "",
        "layers.0.gate_up": "",
        "layers.0.down": "",
        "layers.1.qkv": "int8",
        "layers.1.o": "int8",
        "layers.1.gate_up": "int8",
        "layers.1.down": "",
        "head": "int4-g32",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"scheme": "int5"},
            r"quantization: 'int5' is not a precision; allowed: none, int8.*; bf16",
        ),
        ({"scheme": "f32"}, r"quantization: 'f32' is not a precision"),
        ({"scheme": "int8", "head": "q8"}, r"head_precision: 'q8' is not a precision"),
        ({"scheme": "int8", "keep": ["head"]}, r"keep: 'head' is not a rule"),
        ({"scheme": "int8", "keep": ["head=q8"]}, r"keep: 'q8' is not a precision"),
        (
            {"scheme": "int8", "keep": ["layers.7.*=none"]},
            r"keep: 'layers.7.\*' matches no product of this model; they are head, layers.0.qkv, ",
        ),
    ],
)
def test_an_invalid_rule_is_rejected_with_the_allowed_ones(
    program: Program, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        quantize(program, **arguments)


def test_the_program_knows_its_bytes(program: Program) -> None:
    made = quantize(program, "int4-g32", head="int8")
    step = StepShape([1], [0])
    columns = {60: 112 + 194, 80: 60, 97: 60}
    per_layer = sum(rows * SCHEMES["int4-g32"].row_bytes(k) for k, rows in columns.items())
    products = 2 * per_layer + 307 * (60 + 4)
    norms = 5 * 60 * 4
    assert made.step_cost(step).weight_bytes == products + norms + 60 * 2
    assert made.weight_bytes == products + norms + 307 * 60 * 2
    assert made.step_cost(step).product_ops == program.step_cost(step).product_ops


def test_a_tied_embedding_is_counted_in_its_own_bytes(tmp_path: Path) -> None:
    made = quantize(make(tmp_path, tie_word_embeddings=True), "int8")
    trunk_rows = StepShape([3], [0], num_samples=0)
    plain = quantize(made, "int8", head="none")
    less = plain.step_cost(trunk_rows).weight_bytes - made.step_cost(trunk_rows).weight_bytes
    assert less == 3 * (120 - 64)


def test_the_table_shows_precisions(program: Program) -> None:
    text = format_program(quantize(program, "int4-g32"), StepShape([1], [0]))
    assert "layers.0.qkv [112 x 60] int4-g32" in text
    assert "head [307 x 60] int8" in text
    assert "the same" in text
    mixed = quantize(program, "int4-g32", keep=["layers.1.qkv=int8"])
    assert "layers.1.qkv [112 x 60] int8" in format_program(mixed, StepShape([1], [0]))


def test_precisions_round_trip_and_are_in_the_digest(program: Program) -> None:
    made = [
        program,
        quantize(program, "int8"),
        quantize(program, "int4-g32"),
        quantize(program, "int4-g64"),
        quantize(program, "int4-g64-zp"),
        quantize(program, "int4-g32", head="none"),
        quantize(program, "int4-g32", keep=["layers.0.o=int8"]),
    ]
    assert len({digest(one) for one in made}) == len(made)
    for one in made:
        assert from_plain(json.loads(json.dumps(to_plain(one)))) == one


def test_an_unknown_scheme_or_one_on_a_vector_is_rejected(program: Program) -> None:
    for form, scheme in (("matrix", "int3"), ("vector", "int8"), ("table", "int8")):
        plain = to_plain(program)
        next(weight for weight in plain["weights"] if weight["form"] == form)["scheme"] = scheme
        with pytest.raises(ValueError, match=f"a {form} cannot be {scheme}"):
            from_plain(plain)


def test_a_program_summarizes_its_precision(program: Program) -> None:
    assert precision_text(program) == "none"
    assert precision_text(quantize(program, "int8")) == "int8"
    assert precision_text(quantize(program, "int4")) == "int4-g32 (head: int8)"
    mixed = quantize(program, "int8", keep=["layers.0.*=none"])
    assert precision_text(mixed) == "int8 (layers.0.qkv and 3 more: none)"

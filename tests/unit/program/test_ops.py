"""Operations check their own contract, and keep their views through rewrites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.models.registry import build_program, open_model
from quire.program.operation import schema
from quire.program.ops import (
    OPERATIONS,
    Activation,
    Add,
    Attention,
    Embed,
    GatherRows,
    Linear,
    Norm,
    Op,
    Rope,
    StoreKV,
)
from quire.program.program import Program
from quire.program.tensors import DType
from tests.tiny_models import write_tiny_llama


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return hidden 60, 5 heads of 16 over 1, inner 97, vocabulary 307, 2 layers, untied, f32."""
    spec = open_model(write_tiny_llama(tmp_path))
    return build_program(spec, dtype=DType.F32, max_positions=64)


def first(program: Program, kind: type[Op]) -> Op:
    return next(op for ops in program.segments.values() for op in ops if isinstance(op, kind))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (Embed, {"weight": "layers.0.down"}, "60 columns wide; 97 are meant"),
        (Norm, {"weight": None, "bias": "norm"}, "a bias and no weight"),
        (Norm, {"group": 7}, "60 columns are no multiple"),
        (Norm, {"group": 30}, "has 60 rows, not 30"),
        (Linear, {"weight": "layers.0.o"}, "60 columns wide; 80 are meant"),
        (Linear, {"weight": "norm"}, "is a vector, not a matrix"),
        (Linear, {"bias": "norm"}, "norm has 60 rows"),
        (Rope, {"heads": 4}, "80 columns wide; 64 are meant"),
        (Rope, {"rope": 1}, "rope is 1; 1 are declared"),
        (StoreKV, {"layer": 2}, "layer is 2; the cache has 2"),
        (Attention, {"kv_heads": 5}, "5 KV heads of 16; the cache has 1 of 16"),
        (Attention, {"heads": 4}, "80 columns wide; 64 are meant"),
    ],
    ids=str,
)
def test_a_contradiction_is_rejected_with_its_numbers(
    program: Program, kind: type[Op], changes: dict[str, object], message: str
) -> None:
    wrong = replace(first(program, kind), **changes)  # type: ignore[arg-type]
    assert set(wrong.weights) <= set(program.weights)
    with pytest.raises(ValueError, match=message):
        wrong.check(program)


def test_a_sum_of_two_widths_is_rejected(program: Program) -> None:
    x = first(program, Embed).outputs[0]
    with pytest.raises(ValueError, match="8 columns wide; 60 are meant"):
        Add(x=x, y=x.columns(0, 8)).check(program)


def test_a_program_names_the_invalid_operation(program: Program) -> None:
    trunk = tuple(
        replace(op, layer=9) if isinstance(op, StoreKV) and op.layer == 1 else op
        for op in program.segments["trunk"]
    )
    index = next(i for i, op in enumerate(trunk) if isinstance(op, StoreKV) and op.layer == 9)
    with pytest.raises(ValueError, match=rf"trunk\[{index}\] store_kv: layer is 9"):
        replace(program, segments={**program.segments, "trunk": trunk})


def test_views_are_changed_in_all_fields_of_an_operation(program: Program) -> None:
    buffers = [replace(buffer, name="other") for buffer in program.buffers]
    for ops in program.segments.values():
        for op in ops:
            moved = op.with_views(lambda view: replace(view, buffer=buffers[view.buffer.index]))
            views = (*moved.inputs, *moved.outputs)
            assert {view.buffer.name for view in views} == {"other"}
            assert moved.parameters == op.parameters
            assert [v.width for v in views] == [v.width for v in (*op.inputs, *op.outputs)]


def test_views_that_an_operation_reads_and_writes_are_its_view_fields() -> None:
    for operation in OPERATIONS.values():
        views = {name for name, kind in schema(operation).items() if kind.name == "view"}
        assert views == {*operation.reads, *operation.writes}, operation.kind


def test_a_norm_with_a_delta_also_writes_its_input(program: Program) -> None:
    norms = [op for op in program.segments["trunk"] if isinstance(op, Norm)]
    plain, summed = norms[0], norms[1]
    assert (plain.inputs, plain.outputs) == ((plain.x,), (plain.y,))
    assert summed.delta is not None
    assert (summed.inputs, summed.outputs) == ((summed.x, summed.delta), (summed.y, summed.x))


def test_gathered_rows_keep_their_dtype_and_both_halves_of_a_gate_have_one(
    program: Program,
) -> None:
    gather, gated = first(program, GatherRows), first(program, Activation)
    assert isinstance(gather, GatherRows)
    assert isinstance(gated, Activation)
    bf16 = replace(gather.y, buffer=replace(gather.y.buffer, dtype=DType.BF16))
    with pytest.raises(ValueError, match="y is bf16, x f32"):
        replace(gather, y=bf16).check(program)
    assert gated.up is not None
    rounded = replace(gated.up, buffer=replace(gated.up.buffer, dtype=DType.BF16))
    with pytest.raises(ValueError, match="up is bf16, gate f32"):
        replace(gated, up=rounded).check(program)


def test_an_undeclared_cache_group_is_rejected(program: Program) -> None:
    for kind in (StoreKV, Attention):
        wrong = replace(first(program, kind), cache=1)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="cache is 1; 1 are declared"):
            wrong.check(program)

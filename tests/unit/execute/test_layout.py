"""Buffers share an arena only when no operation needs both."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from quire.execute.executor import StepLimits
from quire.execute.layout import Layout, lay_out
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.taps import with_taps
from quire.program.tensors import DType
from tests.tiny_models import write_tiny_llama

LIMITS = StepLimits(max_tokens=33, max_samples=5, max_sequences=5)


@pytest.fixture(params=[DType.F32, DType.BF16], ids=str)
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    spec = open_model(write_tiny_llama(tmp_path, num_hidden_layers=4))
    return build_program(spec, dtype=request.param, max_positions=64)


def _overlap(layout: Layout, one: int, other: int) -> bool:
    a, b = layout.places[one], layout.places[other]
    return (
        a.offset_bytes < b.offset_bytes + b.num_bytes
        and b.offset_bytes < a.offset_bytes + a.num_bytes
    )


def test_a_value_still_to_be_read_is_never_overwritten(program: Program) -> None:
    layout = lay_out(program, LIMITS)
    # the content of an area, from iterating over the program twice
    last_writer: dict[int, int] = {}
    for segment in ("trunk", "head", "head"):
        for op in program.segments[segment]:
            for view in op.inputs:
                assert view.buffer.index in last_writer, f"{op.kind} reads {view}, overwritten"
            for view in op.outputs:
                index = view.buffer.index
                for other in [held for held in last_writer if held != index]:
                    if _overlap(layout, index, other):
                        del last_writer[other]
                last_writer[index] = index
    kept = {view.buffer.index for view in program.outputs.values()}
    assert kept <= set(last_writer)


def test_buffers_of_one_operation_do_not_overlap(program: Program) -> None:
    layout = lay_out(program, LIMITS)
    for op in itertools.chain(*program.segments.values()):
        buffers = {view.buffer.index for view in (*op.inputs, *op.outputs)}
        for one, other in itertools.combinations(sorted(buffers), 2):
            assert not _overlap(layout, one, other)


def test_rows_are_aligned_and_areas_lie_in_the_arena(program: Program) -> None:
    layout = lay_out(program, LIMITS)
    for buffer, place in zip(program.buffers, layout.places, strict=True):
        assert place.offset_bytes % 64 == 0
        assert place.stride * buffer.dtype.itemsize % 64 == 0
        assert place.stride >= buffer.width
        assert place.offset_bytes + place.num_bytes <= layout.arena_bytes


def test_taps_change_no_other_place(program: Program) -> None:
    """So that steps that compute none take no longer than without them."""
    layout, tapped = lay_out(program, LIMITS), lay_out(with_taps(program, [0, 2, 3]), LIMITS)
    assert tapped.places[:-1] == layout.places
    assert tapped.places[-1].offset_bytes == layout.arena_bytes


def test_layers_reuse_each_others_areas(tmp_path: Path, program: Program) -> None:
    spec = open_model(write_tiny_llama(tmp_path / "deep", num_hidden_layers=40))
    deep = build_program(spec, dtype=DType.F32, max_positions=64)
    shallow = lay_out(program, LIMITS).arena_bytes
    assert lay_out(deep, LIMITS).arena_bytes <= 2 * shallow  # f32 against bf16 at most

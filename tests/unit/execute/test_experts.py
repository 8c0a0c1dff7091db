"""Experts on executors: how they are packed, what memory they take, and which are too many."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from quire.base.errors import ModelError
from quire.base.log import Log
from quire.execute.executor import PART_TOKENS, ExecutorOptions, StepLimits
from quire.execute.layout import lay_out
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import expert_bytes
from quire.execute.packing import PANEL_ROWS, pack
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights.binding import Binding, bind
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import PackCache
from tests.gguf_convert import write_gguf_of
from tests.models.case import Case
from tests.models.cases_experts import QWEN3_MOE
from tests.models.generate import executor_of, sequence_batch

ROWS = StepLimits(max_tokens=8, max_samples=2, max_sequences=2)
CASE = Case("experts", seed=5, base=QWEN3_MOE)  # inner width 33: 66 and 60 rows an expert


def _opened(folder: Path) -> tuple[Program, Binding]:
    program = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    return program, bind(program, open_checkpoint(folder))


@pytest.mark.parametrize("is_stacked", [False, True], ids=["one tensor each", "stacked"])
def test_each_expert_begins_at_a_panel_and_has_its_own_rows(
    is_stacked: bool, tmp_path: Path
) -> None:
    folder = CASE.write(tmp_path / "checkpoint")
    where = write_gguf_of(folder, tmp_path / "m.gguf") if is_stacked else folder
    program, binding = _opened(where)
    packed = pack(program, binding, _native.Pool(2), None)
    source = open_checkpoint(folder)
    for name, products in (("gate_up", ("gate", "up")), ("down", ("down",))):
        weight = packed.weights[f"layers.1.experts.{name}"]
        declared = program.weights[f"layers.1.experts.{name}"]
        stride = -(-declared.expert_rows // PANEL_ROWS) * PANEL_ROWS
        assert weight.rows == 19 * stride
        for expert in (0, 7, 18):
            prefix = f"model.layers.1.mlp.experts.{expert}."
            rows = np.concatenate([source.read_f32(f"{prefix}{p}_proj.weight") for p in products])
            for row in (0, len(rows) // 2, len(rows) - 1):
                assert np.array_equal(weight.row(expert * stride + row), rows[row])
            padding = weight.row(expert * stride + len(rows))
            assert not np.any(padding), "rows that fill a panel are zero"


def test_scratch_memory_is_counted_for_the_largest_step_and_part(tmp_path: Path) -> None:
    program, _ = _opened(CASE.write(tmp_path))
    small, part, large = (
        expert_bytes(program, replace(ROWS, max_tokens=count))
        for count in (8, PART_TOKENS, 4 * PART_TOKENS)
    )
    assert 0 < small == part < large
    arena = lay_out(program, ROWS).arena_bytes
    assert NativeExecutor.memory_for(program, ROWS).step_bytes > arena + small
    dense, _ = _opened(Case("dense", {"mlp_only_layers": [0, 1]}, base=QWEN3_MOE).write(tmp_path))
    assert expert_bytes(dense, ROWS) == 0


def test_an_expert_of_a_step_is_read_once(tmp_path: Path) -> None:
    """At most top_k experts a row and layer, and never more than there are."""
    folder = CASE.write(tmp_path)
    executor = executor_of(open_model(folder), folder, kind="native")
    assert isinstance(executor, NativeExecutor)
    executor.run_trunk(sequence_batch(CASE.token_ids[:1], 0, 64))
    assert executor.experts_read == 2 * 5
    executor.run_trunk(sequence_batch(CASE.token_ids[1:], 1, 64))
    assert 2 * 5 < executor.experts_read - 2 * 5 <= 2 * 19


def test_more_experts_than_the_kernels_hold_are_refused_by_number(tmp_path: Path) -> None:
    count = _native.MAX_EXPERTS + 1
    case = Case("many", {"num_experts": count, "moe_intermediate_size": 2}, base=QWEN3_MOE)
    program, _ = _opened(case.write(tmp_path))
    with pytest.raises(ModelError, match=f"have {count} experts; at most {count - 1} are held"):
        NativeExecutor.check_program(program)


@pytest.mark.parametrize("scheme", ["none", "int8", "int4-g64"])
def test_executors_agree_on_quantized_experts(scheme: str, tmp_path: Path) -> None:
    folder = CASE.write(tmp_path)
    program, _ = _opened(folder)
    program = quantize(program, scheme)
    options = ExecutorOptions(limits=replace(ROWS, max_tokens=40, max_samples=40))
    batch, found = sequence_batch(CASE.token_ids, 0, 64), []
    for kind in (NativeExecutor, ReferenceExecutor):
        executor = kind(program, open_checkpoint(folder), options)
        executor.allocate_cache(5, 16)
        executor.run_trunk(batch)
        found.append(executor.run_head(batch, 0, 40).copy())
    error = np.abs(found[0] - found[1]).max(axis=1) / np.abs(found[1]).max(axis=1)
    assert np.median(error) < 1e-4


@pytest.mark.parametrize("scheme", ["none", "int4-g32"])
def test_packed_experts_are_mapped_from_a_file_as_they_were(scheme: str, tmp_path: Path) -> None:
    folder = CASE.write(tmp_path / "checkpoint")
    program, said = quantize(_opened(folder)[0], scheme), io.StringIO()
    cache = PackCache(tmp_path / "packed", Log("engine", said))
    batch, found = sequence_batch(CASE.token_ids[:8], 0, 64), []
    for _ in range(2):
        options = ExecutorOptions(limits=replace(ROWS, max_samples=8), pack_cache=cache)
        executor = NativeExecutor(program, open_checkpoint(folder), options)
        executor.allocate_cache(5, 16)
        executor.run_trunk(batch)
        found.append(executor.run_head(batch, 0, 8).copy())
    assert "packed weights are mapped" in said.getvalue()
    assert np.array_equal(found[0], found[1])

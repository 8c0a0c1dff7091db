"""Checks of executors on a program before loading: what they cannot hold, what they need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from quire.base.errors import ModelError, SettingError
from quire.execute.executor import PART_LIMITS, PART_TOKENS, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import int_row_bytes
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from tests.tiny_models import write_tiny_llama

ROWS = StepLimits(max_tokens=8, max_samples=2, max_sequences=2)


def _program(folder: Path, *, dtype: DType = DType.BF16, **changes: int) -> Program:
    write_tiny_llama(folder, **changes)
    return build_program(open_model(folder), dtype=dtype, max_positions=32)


def test_heads_wider_than_the_kernels_support_are_rejected_before_packing(tmp_path: Path) -> None:
    widest = _program(tmp_path / "widest", head_dim=_native.MAX_HEAD_DIM)
    NativeExecutor.check_program(widest)
    wider = _program(tmp_path / "wider", head_dim=_native.MAX_HEAD_DIM + 2)
    checkpoint = open_checkpoint(tmp_path / "widest")  # not even compared with the program
    with pytest.raises(ModelError, match=r"258 columns \(head_dim\); at most 256.*") as told:
        NativeExecutor(
            wider,
            checkpoint,
            ExecutorOptions(limits=StepLimits(max_tokens=1, max_samples=1, max_sequences=1)),
        )
    assert "--executor reference" in str(told.value)
    ReferenceExecutor.check_program(wider)


def test_everything_unsupported_is_listed(tmp_path: Path) -> None:
    program = _program(tmp_path, head_dim=300)
    wrong = replace(program, caches=program.caches * 2)
    with pytest.raises(ModelError) as told:
        NativeExecutor.check_program(wrong)
    for part in ("2 KV caches", "300 columns"):
        assert part in str(told.value)


@pytest.mark.parametrize("dtype", list(DType))
def test_the_reference_takes_f32_for_everything(tmp_path: Path, dtype: DType) -> None:
    program = _program(tmp_path, dtype=dtype)
    held = ReferenceExecutor.memory_for(program, ROWS)
    executor = ReferenceExecutor(
        program,
        open_checkpoint(tmp_path),
        ExecutorOptions(limits=StepLimits(max_tokens=8, max_samples=2, max_sequences=2)),
    )
    executor.allocate_cache(2, 16)
    assert held.weights_bytes == sum(values.nbytes for values in executor._weights.values())
    assert held.token_bytes * 32 == executor.block_bytes * 2
    apart = executor._new_buffers(PART_LIMITS.rows)
    buffers = sum(buffer.nbytes for buffer in (*executor._buffers, *apart))
    angles = 4 * 32 * sum(rope.rotary_dim for rope in program.ropes)
    assert held.step_bytes == buffers + angles


def test_the_native_executor_uses_the_programs_dtypes(tmp_path: Path) -> None:
    wide, narrow = (
        NativeExecutor.memory_for(_program(tmp_path, dtype=dtype), ROWS)
        for dtype in (DType.F32, DType.BF16)
    )
    assert wide.token_bytes == 2 * narrow.token_bytes
    assert narrow.weights_bytes < 0.6 * wide.weights_bytes
    assert narrow.step_bytes < wide.step_bytes
    executor = NativeExecutor(
        _program(tmp_path),
        open_checkpoint(tmp_path),
        ExecutorOptions(limits=StepLimits(max_tokens=1, max_samples=1, max_sequences=1)),
    )
    executor.allocate_cache(2, 16)
    assert np.asarray(executor._native.cache).nbytes == 32 * narrow.token_bytes


def test_integer_rows_of_a_layered_chunk_are_counted_if_steps_are_smaller(
    tmp_path: Path,
) -> None:
    int8 = quantize(_program(tmp_path), "int8")
    whole = [
        int_row_bytes(int8, replace(ROWS, max_tokens=num))
        for num in (8, PART_TOKENS, 2 * PART_TOKENS)
    ]
    assert whole == [whole[1], whole[1], 2 * whole[1]]
    assert whole[1] > 0


def test_a_full_step_is_larger_if_products_come_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for isa in _native.available_isas():
        monkeypatch.setenv("QUIRE_ISA", isa)
        assert NativeExecutor.full_step_tokens() == (256 if isa == "amx" else 128)
    monkeypatch.setenv("QUIRE_ISA", "z80")
    with pytest.raises(SettingError, match="z80"):
        NativeExecutor.full_step_tokens()

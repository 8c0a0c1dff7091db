"""with_pooling: final hidden rows without logits, in a segment that leaves the others unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.execute.executor import Executor, ExecutorOptions, PoolingExecutor, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.ops import Linear
from quire.program.pooling import with_pooling, without_pooling
from quire.program.program import Program
from quire.program.serialize import from_plain, to_plain
from quire.program.taps import with_taps
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from quire.weights.dtypes import from_bf16_bits
from tests.models.cases_gemma import GEMMA3
from tests.tiny_models import write_tiny, write_tiny_llama

NUM_TOKENS = 11
ROWS = np.array([0, 3, 4, 9, 10], np.int32)
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 131,
    "hidden_size": 48,
    "word_embed_proj_dim": 20,
    "ffn_dim": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "do_layer_norm_before": False,
}
SIZE = {"vocab_size": 307, "max_position_embeddings": 64, "num_hidden_layers": 2}
GEMMA = GEMMA3 | SIZE | {"layer_types": ["sliding_attention", "full_attention"]}


def batch() -> ForwardBatch:
    positions = np.arange(NUM_TOKENS, dtype=np.int32)
    return ForwardBatch(
        token_ids=positions * 7 % 100 + 2,
        positions=positions,
        rope_positions=positions,
        caches=(CacheRows(kv_slots=positions, block_tables=np.zeros((1, 1), np.int32)),),
        seq_starts=np.array([0, NUM_TOKENS], np.int32),
        sample_rows=ROWS,
    )


def open_both(folder: Path, program: Program) -> list[Executor]:
    limits = StepLimits(max_tokens=16, max_samples=8, max_sequences=1)
    checkpoint = open_checkpoint(folder)
    native = NativeExecutor(
        program, checkpoint, ExecutorOptions(limits=limits, num_threads=2), poison=True
    )
    executors = [native, ReferenceExecutor(program, checkpoint, ExecutorOptions(limits=limits))]
    for executor in executors:
        executor.allocate_cache(2, 16)
    return executors


def program_of(folder: Path, dtype: DType = DType.F32) -> Program:
    return build_program(open_model(folder), dtype=dtype, max_positions=64)


def pooled(executor: Executor, first: int, count: int) -> np.ndarray:
    assert isinstance(executor, PoolingExecutor)
    rows = executor.run_pool(batch(), first, count)
    return from_bf16_bits(rows) if rows.dtype == np.uint16 else rows.copy()


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("family", ["llama", "opt", "gemma"])
def test_pooled_rows_times_the_head_are_the_logits(
    tmp_path: Path, family: str, dtype: DType
) -> None:
    folder = tmp_path / family
    if family == "llama":
        write_tiny_llama(folder, seed=1)
    else:
        write_tiny(folder, {"opt": OPT, "gemma": GEMMA}[family], seed=1)
    plain = program_of(folder, dtype)
    program = with_pooling(plain)
    products = [op for op in plain.segments["head"] if isinstance(op, Linear)]
    head = products[-1]  # before it only OPT's projection
    native, reference = open_both(folder, program)
    seen = {}
    for executor in (native, reference):
        executor.run_trunk(batch())
        rows = pooled(executor, 0, len(ROWS))
        # A slice of the rows, and the head between them, change nothing.
        logits = executor.run_head(batch(), 0, len(ROWS)).copy()
        assert (pooled(executor, 2, 2) == rows[2:4]).all()
        assert (executor.run_head(batch(), 0, len(ROWS)) == logits).all()
        seen[executor.name] = rows, logits
    weight = reference._weights[head.weight]  # type: ignore[attr-defined]
    rows, logits = seen["reference"]
    is_capped = family == "gemma"
    if not is_capped:
        error = np.abs(rows @ np.asarray(weight).reshape(-1, rows.shape[1]).T - logits)
        assert error.max() < (1e-3 if dtype is DType.F32 else 0.2)
    spread = np.ptp(seen["reference"][0])
    allowed = 3e-6 if dtype is DType.F32 else 0.02
    assert np.abs(seen["native"][0] - seen["reference"][0]).max() <= allowed * spread


def test_trunk_and_head_stay_and_the_norm_is_kept_in_f32(tmp_path: Path) -> None:
    plain = program_of(write_tiny_llama(tmp_path / "m", seed=1), DType.BF16)
    program = with_pooling(plain)
    assert [*program.segments] == ["trunk", "pool", "head"]
    assert {name: program.segments[name] for name in plain.segments} == plain.segments
    assert program.buffers[: len(plain.buffers)] == plain.buffers
    assert program.weights == plain.weights
    assert program.outputs["pooled"].dtype is DType.F32
    assert not any(isinstance(op, Linear) for op in program.segments["pool"])
    assert from_plain(json.loads(json.dumps(to_plain(program)))) == program


def test_a_program_is_rewritten_once(tmp_path: Path) -> None:
    program = with_pooling(program_of(write_tiny_llama(tmp_path / "m", seed=1)))
    with pytest.raises(ValueError, match="'pool' already"):
        with_pooling(program)


def test_a_rewrite_can_be_taken_back_while_it_is_the_last(tmp_path: Path) -> None:
    plain = program_of(write_tiny_llama(tmp_path / "m", seed=1))
    assert without_pooling(plain) is plain
    assert without_pooling(with_pooling(plain)) == plain
    with pytest.raises(ValueError, match="rewritten after"):
        without_pooling(with_taps(with_pooling(plain), (0,)))

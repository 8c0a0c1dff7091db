"""Run an executor directly, without engine or scheduler, on one sequence.

For tests that compare executors. Blocks are assigned back to front and the prompt is fed in given
chunks, which exercises block tables and chunks a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.models.spec import ModelSpec
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint

BLOCK_SIZE = 16
EXECUTORS = ("reference", "native")


def open_executor(
    path: Path, *, kind: str = "reference", dtype: DType = DType.F32, max_tokens: int = 128
) -> Executor:
    """Return an executor of the model in `path`, with KV cache for the model's whole length.

    Memory that is read but was never written is NaN.
    """
    return executor_of(open_model(path), path, kind=kind, dtype=dtype, max_tokens=max_tokens)


def executor_of(
    spec: ModelSpec,
    path: Path,
    *,
    kind: str = "reference",
    dtype: DType = DType.F32,
    max_tokens: int = 128,
    served: int = 0,
) -> Executor:
    """Return an executor of `spec` with the weights in `path`, for `served` positions (0: all)."""
    max_positions = served or spec.max_positions
    program = build_program(spec, dtype=dtype, max_positions=max_positions)
    limits = StepLimits(max_tokens=max_tokens, max_samples=max_tokens, max_sequences=4)
    checkpoint = open_checkpoint(path)
    executor: Executor
    if kind == "native":
        executor = NativeExecutor(program, checkpoint, ExecutorOptions(limits=limits), poison=True)
    else:
        executor = ReferenceExecutor(program, checkpoint, ExecutorOptions(limits=limits))
    executor.allocate_cache(-(-max_positions // BLOCK_SIZE) + 1, BLOCK_SIZE)
    return executor


def sequence_batch(
    token_ids: Sequence[int], start: int, max_positions: int, block_size: int = BLOCK_SIZE
) -> ForwardBatch:
    """Return `token_ids` at positions from `start` of the only sequence; every row samples."""
    positions = np.arange(start, start + len(token_ids), dtype=np.int32)
    num_blocks = -(-max_positions // block_size)
    table = np.arange(num_blocks, 0, -1, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        rope_positions=positions,
        caches=(
            CacheRows(
                kv_slots=table[positions // block_size] * block_size + positions % block_size,
                block_tables=table[None, :].copy(),
            ),
        ),
        seq_starts=np.array([0, len(token_ids)], np.int32),
        sample_rows=np.arange(len(token_ids), dtype=np.int32),
    )


def logits_of(
    executor: Executor,
    token_ids: Sequence[int],
    *,
    max_positions: int,
    chunk: int = 128,
    block_size: int = BLOCK_SIZE,
) -> NDArray[np.float32]:
    """Return logits [len(token_ids), vocab] of every position, fed `chunk` tokens at a time."""
    rows = []
    for start in range(0, len(token_ids), chunk):
        batch = sequence_batch(token_ids[start : start + chunk], start, max_positions, block_size)
        executor.run_trunk(batch)
        rows.append(executor.run_head(batch, 0, len(batch.token_ids)).copy())
    return np.concatenate(rows)


def greedy(
    executor: Executor, prompt_ids: Sequence[int], num_tokens: int, *, max_positions: int
) -> list[int]:
    """Return the greedy continuation, one token a step."""
    ids = list(prompt_ids)
    logits = logits_of(executor, ids, max_positions=max_positions)
    for _ in range(num_tokens):
        ids.append(int(logits[-1].argmax()))
        batch = sequence_batch(ids[-1:], len(ids) - 1, max_positions)
        executor.run_trunk(batch)
        logits = executor.run_head(batch, 0, 1)
    return ids[len(prompt_ids) :]

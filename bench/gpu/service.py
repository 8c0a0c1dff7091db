"""Launches of a serving engine: models, precisions, caches and modes, in steps of all sizes.

Not a section of the check: it is only rehearsed (launches.py), so that everything an engine would
launch is compiled and inspected without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.gpu.batches import batch_of, columns_for
from bench.gpu.models import SHAPES, executor_of, program_of
from bench.gpu.stage import Stage
from quire.execute.gpu.executor import TorchExecutor
from quire.program.program import Program
from quire.sampling.batch import SampleBatch
from quire.sampling.parts import (
    LogitBias,
    NoiseKeys,
    Penalties,
    RaggedIds,
    TokenHistory,
    TokenMasks,
    Truncation,
)
from quire.sampling.scoring import ScoreBatch

# Weights, and KV; what is launched for one does not depend on the other.
KEPT = (
    *((precision, "auto") for precision in ("none", "fp8", "fp8-block", "int8")),
    *((precision, "auto") for precision in ("int4", "int4-g32", "int4-g128")),
    *(("none", kv) for kv in ("fp8", "int8")),
)
SEQUENCES, STEP_TOKENS, DEPTH = 256, 2048, 1000
CHUNKS = (2, 16, 17, 33, 65, 129, 300, STEP_TOKENS)


def service(stage: Stage) -> None:
    """Report each engine when it is done."""
    for name in SHAPES:
        for precision, kv in KEPT:
            if "num_experts" in SHAPES[name] and precision.startswith("fp8"):
                continue  # refused: blocks of scales would span experts
            program = program_of(stage, name, precision=precision, kv_cache_dtype=kv)
            for exact in (True, False):
                _serve(stage, program, exact=exact)
                stage.report(f"{name} {precision}, KV {kv}", "exact" if exact else "fast")


def _serve(stage: Stage, program: Program, *, exact: bool) -> None:
    columns = columns_for(DEPTH + STEP_TOKENS)
    executor = executor_of(
        stage,
        program,
        exact=exact,
        max_tokens=STEP_TOKENS,
        max_sequences=SEQUENCES,
        blocks=SEQUENCES * columns,
    )
    for size in executor.sizes.ones:
        _step(executor, program, [1] * size, columns)
    for chunk in CHUNKS:
        _step(executor, program, [chunk], columns)
        _step(executor, program, [1] * 7 + [max(chunk - 7, 1)], columns)
    for rows in (1, 7, SEQUENCES):
        _choose(executor, program, rows, columns)
    blocks = np.array([0, 3], np.int32)
    executor.copy_blocks(blocks, blocks + np.int32(1))
    rooms = [*executor.host_memory(2 * executor.block_bytes).reshape(2, -1)]
    executor.begin_moving(2)
    executor.export_blocks(blocks, rooms)()
    executor.import_blocks(blocks, rooms)
    executor.close()


def _step(executor: TorchExecutor, program: Program, counts: list[int], columns: int) -> None:
    starts = [DEPTH] * len(counts)
    sizes = {"columns": columns, "vocab_size": program.vocab_size}
    batch = batch_of(counts, starts, samples=True, **sizes)
    executor.run_trunk(batch, head_rows=len(counts))
    executor.run_head(batch, 0, len(counts))


def _choose(executor: TorchExecutor, program: Program, rows: int, columns: int) -> None:
    """Sample rows without parameters and rows with all that kernels support; score prompts."""
    sizes = {"columns": columns, "vocab_size": program.vocab_size}
    batch = batch_of([1] * rows, [DEPTH] * rows, samples=True, **sizes)
    slots = np.arange(rows, dtype=np.int32)
    for params in (_params(rows, program, asks=False), _params(rows, program, asks=True)):
        executor.run_trunk(batch, head_rows=rows)
        logits = executor.run_head(batch, 0, rows)
        executor.sample_later(logits, params, slots)()
        executor.sample(logits, params.completed(np.zeros(rows, np.int32)))
    for most in (0, 1, 5, 20):
        listed = np.arange(rows + 1, dtype=np.int32)
        ones = np.ones(rows, np.int32)
        executor.score(
            logits,
            ScoreBatch(
                targets=ones, num_top=ones * most, listed_starts=listed, listed_ids=listed[1:]
            ),
        )


def _params(rows: int, program: Program, *, asks: bool) -> SampleBatch:
    batch = SampleBatch(
        positions=np.full(rows, DEPTH, np.int32),
        temperature=np.full(rows, 0.8 if asks else 0.0, np.float32),
        noise=NoiseKeys(seeds=np.arange(rows, dtype=np.int64), streams=np.zeros(rows, np.int32)),
    )
    if not asks:
        return batch

    def floats(value: float) -> np.ndarray:
        return np.full(rows, value, np.float32)

    ids = np.arange(rows, dtype=np.int32)
    one_each = RaggedIds(np.arange(rows + 1, dtype=np.int32), ids)
    words = np.full((1, -(-program.vocab_size // 32)), 2**32 - 1, np.uint32)
    return replace(
        batch,
        truncation=Truncation(
            top_k=np.full(rows, 40, np.int32), top_p=floats(0.9), min_p=floats(0.05)
        ),
        penalties=Penalties(repetition=floats(1.1), presence=floats(0.1), frequency=floats(0.1)),
        history=TokenHistory(
            tokens=one_each, num_prompt_tokens=np.ones(rows, np.int32), late_slots=ids
        ),
        logit_bias=LogitBias(tokens=one_each, values=floats(1.0)),
        banned=one_each,
        masks=TokenMasks(rows=np.zeros(rows, np.int32), words=words),
        num_logprobs=np.full(rows, 5, np.int32),
    )

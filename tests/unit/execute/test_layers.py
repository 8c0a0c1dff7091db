"""Layered prefill in executors: bit for bit the keys and values of one run, with steps in
between.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.execute.executor import PART_TOKENS, ExecutorOptions, LayeredExecutor, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from tests.models.generate import sequence_batch
from tests.tiny_models import write_tiny_llama

LAYERS, BLOCK_SIZE, NUM_BLOCKS, POSITIONS = 5, 16, 48, 640
IDS = np.random.default_rng(5).integers(0, 307, 600).astype(np.int32).tolist()
CUTS = ([0, 5], [0, 1, 2, 3, 4, 5], [0, 2, 5], [0, 4, 5])
each_dtype = pytest.mark.parametrize("dtype", list(DType), ids=str)
Executor = NativeExecutor | ReferenceExecutor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    write_tiny_llama(folder, num_hidden_layers=LAYERS, max_position_embeddings=1024)
    return folder


def open_executor(
    kind: type[Any], folder: Path, dtype: DType, *, num_threads: int = 1, **more: Any
) -> Executor:
    spec = open_model(folder)
    executor: Executor = kind(
        build_program(spec, dtype=dtype, max_positions=1024),
        open_checkpoint(folder),
        ExecutorOptions(
            limits=StepLimits(max_tokens=96, max_samples=4, max_sequences=2),
            num_threads=num_threads,
        ),
        **more,
    )
    executor.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    return executor


def part(start: int, count: int) -> ForwardBatch:
    """Return positions start .. of IDS, which sample nothing."""
    batch = sequence_batch(IDS[start : start + count], start, POSITIONS)
    return replace(batch, sample_rows=batch.sample_rows[:0])


def others_step(executor: Executor) -> None:
    """Run a step of another request, in the pool's last block."""
    last = NUM_BLOCKS - 1
    batch = sequence_batch(IDS[7:12], 0, BLOCK_SIZE)  # in block 1
    elsewhere = replace(
        batch,
        caches=(
            CacheRows(
                kv_slots=batch.caches[0].kv_slots + np.int32((last - 1) * BLOCK_SIZE),
                block_tables=np.full((1, 1), last, np.int32),
            ),
        ),
    )
    executor.run_trunk(elsewhere, head_rows=1)
    executor.run_head(elsewhere, 0, 1)


def contents(executor: Executor, num_tokens: int) -> NDArray[np.uint8]:
    """Return all blocks of so many tokens."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    out = np.zeros((num_blocks, executor.block_bytes), np.uint8)
    for column in range(num_blocks):  # with blocks from the 40th down
        executor.export_block(POSITIONS // BLOCK_SIZE - column, out[column])
    return out


def run_in_steps(executor: Executor, end: int) -> None:
    for first in range(0, end, 96):
        executor.run_trunk(part(first, min(96, end - first)))


@each_dtype
@pytest.mark.parametrize("kind", [NativeExecutor, ReferenceExecutor])
def test_consecutive_layers_store_what_one_run_stores(
    folder: Path, kind: type[Any], dtype: DType
) -> None:
    whole = open_executor(kind, folder, dtype)
    run_in_steps(whole, 21 + 75)
    right = contents(whole, 96)
    for cuts in CUTS:
        executor = open_executor(kind, folder, dtype)
        assert isinstance(executor, LayeredExecutor)
        assert executor.num_layers == LAYERS
        run_in_steps(executor, 21)
        batch = part(21, 75)
        for first, end in pairwise(cuts):
            executor.run_layers(batch, first, end)
            others_step(executor)
        np.testing.assert_array_equal(contents(executor, 96), right, err_msg=str(cuts))


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("num_threads", [1, 2])
def test_native_layers_have_the_bits_of_steps_on_every_instruction_set(
    folder: Path, isa: str, num_threads: int
) -> None:
    for dtype in DType:
        whole, layered = (
            open_executor(
                NativeExecutor, folder, dtype, isa=isa, num_threads=num_threads, poison=True
            )
            for _ in range(2)
        )
        count = PART_TOKENS + 21
        run_in_steps(whole, count)
        run_in_steps(layered, 21)
        batch = part(21, PART_TOKENS)  # the largest allowed chunk
        for first in range(LAYERS):
            layered.run_layers(batch, first, first + 1)
            others_step(layered)
        np.testing.assert_array_equal(contents(layered, count), contents(whole, count))
        after = sequence_batch(IDS[count : count + 3], count, POSITIONS)
        logits = []
        for executor in (whole, layered):
            executor.run_trunk(after)
            logits.append(executor.run_head(after, 0, 3).copy())
        np.testing.assert_array_equal(logits[0], logits[1])


def test_a_restarted_chunk_drops_the_previous_one(folder: Path) -> None:
    whole = open_executor(NativeExecutor, folder, DType.BF16)
    run_in_steps(whole, 60)
    executor = open_executor(NativeExecutor, folder, DType.BF16, poison=True)
    executor.run_layers(part(0, 90), 0, 3)
    for first in range(LAYERS):
        executor.run_layers(part(0, 60), first, first + 1)
    # Positions 60 .. 63 of the last block belong to the dropped chunk.
    np.testing.assert_array_equal(contents(executor, 48), contents(whole, 48))


@pytest.mark.parametrize("kind", [NativeExecutor, ReferenceExecutor])
@pytest.mark.parametrize("layers", [(-1, 2), (2, 2), (3, 1), (0, LAYERS + 1)])
def test_nonexistent_layers_are_rejected(
    folder: Path, kind: type[Any], layers: tuple[int, int]
) -> None:
    executor = open_executor(kind, folder, DType.F32)
    with pytest.raises(ValueError, match=f"layers {layers[0]} to {layers[1]} of {LAYERS}"):
        executor.run_layers(part(0, 8), *layers)


def test_a_chunk_too_large_for_its_buffers_is_rejected(folder: Path) -> None:
    executor = open_executor(NativeExecutor, folder, DType.F32)
    with pytest.raises(ValueError, match=f"{PART_TOKENS + 1} rows; the buffers hold {PART_TOKENS}"):
        executor.run_layers(part(0, PART_TOKENS + 1), 0, 1)

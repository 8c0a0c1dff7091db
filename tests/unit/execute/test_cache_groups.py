"""A program with two cache groups equals one with a single group, with each layer in its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ModelError
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.cost import StepShape
from quire.program.ops import Attention, Op, StoreKV
from quire.program.program import Program
from quire.program.serialize import digest, from_plain, to_plain
from quire.program.table import format_program
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from tests.tiny_models import write_tiny_llama

BLOCK_SIZE, NUM_BLOCKS, LAYERS = 16, 6, 4
IDS = np.random.default_rng(1).integers(0, 307, 20).astype(np.int32)
OPTIONS = ExecutorOptions(limits=StepLimits(max_tokens=32, max_samples=32, max_sequences=1))


@pytest.fixture
def program(tmp_path: Path) -> Program:
    folder = write_tiny_llama(tmp_path, num_hidden_layers=LAYERS)
    return build_program(open_model(folder), dtype=DType.F32, max_positions=64)


def in_two_groups(program: Program) -> Program:
    """Return the same program with its odd layers in a second cache group."""

    def moved(op: Op) -> Op:
        if not isinstance(op, (StoreKV, Attention)):
            return op
        return replace(op, cache=op.layer % 2, layer=op.layer // 2)

    half = replace(program.caches[0], layers=LAYERS // 2)
    segments = {name: tuple(map(moved, ops)) for name, ops in program.segments.items()}
    return replace(program, caches=(half, half), segments=segments)


def logits(
    program: Program, folder: Path, tables: Sequence[Sequence[int]]
) -> tuple[np.ndarray, ReferenceExecutor]:
    """Return logits of IDS, all but the last token in a first step; tables: blocks by cache
    group.
    """
    executor = ReferenceExecutor(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    last = len(IDS) - 1
    for first, end in ((0, last), (last, last + 1)):
        at = np.arange(first, end, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=IDS[first:end],
            positions=at,
            rope_positions=at,
            caches=tuple(
                CacheRows(
                    kv_slots=np.array(table, np.int32)[at // BLOCK_SIZE] * BLOCK_SIZE
                    + at % BLOCK_SIZE,
                    block_tables=np.array([table], np.int32),
                )
                for table in tables
            ),
            seq_starts=np.array([0, len(at)], np.int32),
            sample_rows=np.array([len(at) - 1], np.int32),
        )
        executor.run_trunk(batch)
    return executor.run_head(batch, 0, 1).copy(), executor


def test_each_group_has_its_own_block_table(program: Program, tmp_path: Path) -> None:
    expected, one = logits(program, tmp_path, [(2, 5)])
    found, two = logits(in_two_groups(program), tmp_path, [(0, 3), (4, 1)])
    np.testing.assert_array_equal(found, expected)
    assert two.block_bytes == one.block_bytes


def test_blocks_move_and_are_copied_in_all_groups(program: Program, tmp_path: Path) -> None:
    _, executor = logits(in_two_groups(program), tmp_path, [(0, 3), (0, 3)])
    raw = np.zeros(executor.block_bytes, np.uint8)
    executor.export_block(0, raw)
    executor.import_block(1, raw)
    executor.copy_blocks(np.array([0], np.int32), np.array([2], np.int32))
    for block in (1, 2):
        again = np.zeros_like(raw)
        executor.export_block(block, again)
        np.testing.assert_array_equal(again, raw)
    assert raw.any()


def test_a_batch_must_have_rows_for_every_group(program: Program, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows of 1 caches; the program has 2"):
        logits(in_two_groups(program), tmp_path, [(0, 3)])


def test_the_cost_equals_that_of_one_group_and_the_digest_differs(program: Program) -> None:
    two, step = in_two_groups(program), StepShape([3], [10])
    assert two.step_cost(step) == program.step_cost(step)
    assert from_plain(to_plain(two)) == two
    assert digest(two) != digest(program)
    assert "layer 1 of cache 1" in format_program(two, step, all_layers=True)


def test_an_executor_of_one_group_rejects_two(program: Program) -> None:
    with pytest.raises(ModelError, match="2 KV caches; one is held"):
        NativeExecutor.check_program(in_two_groups(program))

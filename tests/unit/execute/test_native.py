"""The native executor as a whole: the Row Rule through all layers, poison, chunks, errors."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.base.errors import WorkerError
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from tests.tiny_models import write_tiny_llama

BLOCK_SIZE, COLUMNS = 16, 5
IDS = np.random.default_rng(2).integers(0, 307, 70).astype(np.int32)
each_dtype = pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=str)


def _open(
    folder: Path, dtype: DType, *, num_threads: int = 1, isa: str = "", poison: bool = False
) -> NativeExecutor:
    spec = open_model(folder)
    executor = NativeExecutor(
        build_program(spec, dtype=dtype, max_positions=128),
        open_checkpoint(folder),
        ExecutorOptions(
            limits=StepLimits(max_tokens=96, max_samples=96, max_sequences=4),
            num_threads=num_threads,
        ),
        isa=isa,
        poison=poison,
    )
    executor.allocate_cache(4 * COLUMNS, BLOCK_SIZE)
    return executor


def _batch(pieces: list[tuple[int, int, int]]) -> ForwardBatch:
    """Return pieces (sequence, first, last) of IDS; sequence s owns blocks s, 4 + s, 8 + s, ..."""
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in pieces])
    tables = np.array([[4 * c + s for c in range(COLUMNS)] for s, _, _ in pieces], np.int32)
    slots = np.concatenate(
        [
            table[np.arange(a, b) // BLOCK_SIZE] * BLOCK_SIZE + np.arange(a, b) % BLOCK_SIZE
            for table, (_, a, b) in zip(tables, pieces, strict=True)
        ]
    ).astype(np.int32)
    lengths = [b - a for _, a, b in pieces]
    return ForwardBatch(
        token_ids=IDS[positions],
        positions=positions,
        rope_positions=positions,
        caches=(CacheRows(kv_slots=slots, block_tables=tables),),
        seq_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        sample_rows=np.arange(len(positions), dtype=np.int32),
    )


def _logits(executor: NativeExecutor, pieces: list[tuple[int, int, int]]) -> NDArray[np.uint32]:
    batch = _batch(pieces)
    executor.run_trunk(batch)
    logits = executor.run_head(batch, 0, len(batch.token_ids))
    assert np.isfinite(logits).all()
    return logits.copy().view(np.uint32)


def _one_by_one(executor: NativeExecutor) -> NDArray[np.uint32]:
    return np.concatenate([_logits(executor, [(0, p, p + 1)]) for p in range(len(IDS))])


@each_dtype
@pytest.mark.parametrize("isa", _native.available_isas())
def test_logits_do_not_depend_on_chunks_other_rows_or_threads(
    tmp_path: Path, dtype: DType, isa: str
) -> None:
    folder = write_tiny_llama(tmp_path, seed=1)
    expected = _one_by_one(_open(folder, dtype, isa=isa))
    for num_threads in (1, 3):
        whole = _open(folder, dtype, num_threads=num_threads, isa=isa, poison=True)
        assert np.array_equal(_logits(whole, [(1, 0, 70)]), expected)
        mixed = _open(folder, dtype, num_threads=num_threads, isa=isa, poison=True)
        first = _logits(mixed, [(3, 0, 17), (0, 0, 40), (1, 0, 33)])
        assert np.array_equal(first[17:57], expected[:40])
        second = _logits(mixed, [(1, 33, 34), (3, 17, 70), (0, 40, 70)])
        assert np.array_equal(second[0], expected[33])
        assert np.array_equal(second[1:54], expected[17:])
        assert np.array_equal(second[54:], expected[40:])


@each_dtype
def test_the_head_runs_on_slices_of_the_sample_rows(tmp_path: Path, dtype: DType) -> None:
    executor = _open(write_tiny_llama(tmp_path), dtype, poison=True)
    batch = _batch([(0, 0, 30)])
    executor.run_trunk(batch)
    whole = executor.run_head(batch, 0, 30).copy()
    for first, count in ((29, 1), (0, 7), (7, 23)):
        np.testing.assert_array_equal(
            executor.run_head(batch, first, count), whole[first : first + count]
        )


def test_a_head_computed_with_the_trunk_belongs_to_its_batch(tmp_path: Path) -> None:
    executor = _open(write_tiny_llama(tmp_path), DType.F32, poison=True)
    batch, other = _batch([(0, 0, 30)]), _batch([(1, 3, 33)])
    executor.run_trunk(batch)
    expected = executor.run_head(batch, 0, 30).copy()
    for head_rows, first, count in ((30, 0, 30), (30, 0, 7), (7, 0, 30), (5, 5, 5)):
        executor.run_trunk(batch, head_rows=head_rows)
        found = executor.run_head(batch, first, count)
        np.testing.assert_array_equal(found, expected[first : first + count])
    executor.run_trunk(batch, head_rows=30)
    executor.run_trunk(other)
    of_other = executor.run_head(other, 0, 30).copy()
    executor.run_trunk(other, head_rows=30)
    np.testing.assert_array_equal(executor.run_head(other, 0, 30), of_other)
    assert not np.array_equal(of_other, expected)


def test_a_copied_block_gives_the_same_results(tmp_path: Path) -> None:
    executor = _open(write_tiny_llama(tmp_path), DType.BF16)
    expected = _one_by_one(executor)
    _logits(executor, [(2, 0, 40)])
    own = _batch([(2, 0, 40)]).caches[0].block_tables[0, :3]
    spare = _batch([(3, 0, 40)]).caches[0].block_tables[0, :3]
    executor.copy_blocks(own, spare)
    executor.copy_blocks(own[:0], spare[:0])
    assert np.array_equal(_logits(executor, [(3, 40, 41)])[0], expected[40])


def test_touching_unused_blocks_changes_no_other_block_and_no_answer(tmp_path: Path) -> None:
    executor = _open(write_tiny_llama(tmp_path), DType.BF16)
    expected = _one_by_one(executor)
    before, after = (np.empty(executor.block_bytes, np.uint8) for _ in range(2))
    executor.export_block(4, before)  # sequence 0's second
    for layer in range(executor.program.caches[0].layers):
        executor.touch_blocks(layer, 5, 4 * COLUMNS)
        executor.touch_blocks(layer, 1, 4)
    executor.export_block(4, after)
    assert before.any()
    assert np.array_equal(before, after)
    executor.export_block(3, after)
    assert not after.any()
    assert np.array_equal(_logits(executor, [(1, 0, 70)]), expected)


def test_progress_is_reported_to_the_last_byte(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    program = build_program(open_model(folder), dtype=DType.BF16, max_positions=64)
    seen: list[tuple[int, int]] = []
    NativeExecutor(
        program,
        open_checkpoint(folder),
        ExecutorOptions(
            limits=StepLimits(max_tokens=8, max_samples=8, max_sequences=2),
            num_threads=1,
            progress=lambda done, total: seen.append((done, total)),
        ),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (program.weight_bytes, program.weight_bytes)


def _run_often(executor: NativeExecutor, batch: ForwardBatch) -> None:
    for _ in range(100_000):
        executor.run_trunk(batch)


def test_an_aborted_step_is_a_worker_error_and_progress_is_observable(tmp_path: Path) -> None:
    executor = _open(write_tiny_llama(tmp_path), DType.F32)
    batch = _batch([(0, 0, 3)])
    executor.abort()  # nothing runs: the next step is not affected
    executor.run_trunk(batch)
    assert (done := executor.ops_done) > 10
    over = threading.Event()
    thread = threading.Thread(target=lambda: [executor.abort() for _ in iter(over.is_set, True)])
    thread.start()
    with pytest.raises(WorkerError, match="told to stop"):
        _run_often(executor, batch)
    over.set()
    thread.join()
    executor.run_trunk(batch)
    assert executor.ops_done > done
    executor.close()

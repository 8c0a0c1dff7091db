"""The reference executor: its own Row Rule, cache, rounding, and rejections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import CapacityError, WeightsError, WorkerError
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.builder import ProgramBuilder
from quire.program.declarations import CacheSpec, WeightPart
from quire.program.tensors import DType
from quire.sampling.batch import SampleBatch
from quire.sampling.parts import NoiseKeys
from quire.weights.checkpoint import open_checkpoint
from quire.weights.dtypes import round_to_bf16
from tests.models.generate import logits_of, sequence_batch
from tests.safetensors_writer import write_safetensors
from tests.tiny_models import write_tiny_llama

IDS = np.random.default_rng(5).integers(0, 307, 60).tolist()
LIMITS = StepLimits(max_tokens=64, max_samples=64, max_sequences=4)
OPTIONS = ExecutorOptions(limits=LIMITS)


def make(folder: Path, *, dtype: DType = DType.F32, **changes: Any) -> ReferenceExecutor:
    write_tiny_llama(folder, **changes)
    program = build_program(open_model(folder), dtype=dtype, max_positions=64)
    executor = ReferenceExecutor(program, open_checkpoint(folder), OPTIONS)
    executor.allocate_cache(16, 16)
    return executor


def joined(first: ForwardBatch, second: ForwardBatch) -> ForwardBatch:
    """Join two one-sequence batches into one step; the second's blocks are 8 further on."""
    (cache,), (other,) = first.caches, second.caches
    shifted = other.block_tables + 8
    slots = np.where(other.kv_slots >= 0, other.kv_slots + 8 * 16, -1)
    rows = len(first.token_ids)
    return ForwardBatch(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        positions=np.concatenate([first.positions, second.positions]),
        rope_positions=np.concatenate([first.rope_positions, second.rope_positions]),
        caches=(
            CacheRows(
                kv_slots=np.concatenate([cache.kv_slots, slots]).astype(np.int32),
                block_tables=np.concatenate([cache.block_tables, shifted]).astype(np.int32),
            ),
        ),
        seq_starts=np.array([0, rows, rows + len(second.token_ids)], np.int32),
        sample_rows=np.concatenate([first.sample_rows, second.sample_rows + rows]),
    )


@pytest.mark.parametrize("dtype", list(DType))
def test_a_sequence_has_the_same_logits_alone_and_beside_another(
    dtype: DType, tmp_path: Path
) -> None:
    alone = logits_of(make(tmp_path, dtype=dtype), IDS[:30], max_positions=64)
    executor = make(tmp_path, dtype=dtype)
    other = sequence_batch(IDS[30:47], 0, 64)
    both = joined(sequence_batch(IDS[:30], 0, 64), other)
    executor.run_trunk(both)
    assert np.array_equal(executor.run_head(both, 0, 30), alone)
    executor.run_trunk(joined(other, sequence_batch(IDS[:30], 0, 64)))
    assert np.array_equal(executor.run_head(both, 17, 30), alone)


def test_the_head_in_slices_equals_the_whole_head(tmp_path: Path) -> None:
    executor, batch = make(tmp_path), sequence_batch(IDS, 0, 64)
    executor.run_trunk(batch)
    whole = executor.run_head(batch, 0, 60).copy()
    slices = [executor.run_head(batch, first, 7).copy() for first in range(0, 56, 7)]
    assert np.array_equal(np.concatenate(slices), whole[:56])


def test_rows_without_a_slot_store_nothing_and_copied_blocks_are_equal(
    tmp_path: Path,
) -> None:
    executor, prompt, last = make(tmp_path), sequence_batch(IDS[:20], 0, 64), None
    executor.run_trunk(prompt)
    last = sequence_batch(IDS[20:21], 20, 64)
    (cache,) = last.caches
    silent = replace(last, caches=(replace(cache, kv_slots=np.full(1, -1, np.int32)),))
    before = executor._caches[0].keys.values.copy()
    executor.run_trunk(silent)
    assert np.array_equal(executor._caches[0].keys.values, before)
    executor.run_trunk(last)
    right = executor.run_head(last, 0, 1).copy()
    table = prompt.caches[0].block_tables[0]
    executor.copy_blocks(table[:2], np.array([9, 10], np.int32))
    moved = cache.block_tables.copy()
    moved[0, :2] = [9, 10]
    slots = np.array([10 * 16 + 4], np.int32)
    executor.run_trunk(replace(last, caches=(CacheRows(kv_slots=slots, block_tables=moved),)))
    assert np.array_equal(executor.run_head(last, 0, 1), right)


def test_stale_content_of_other_sequences_is_never_seen(tmp_path: Path) -> None:
    executor = make(tmp_path)
    right = logits_of(executor, IDS[:21], max_positions=64)
    executor._caches[0].keys.values.fill(np.nan)
    executor._caches[0].values.values.fill(np.nan)
    assert np.array_equal(logits_of(executor, IDS[:21], max_positions=64), right)


def test_bf16_rounds_weights_cache_and_activations_but_not_the_residual(
    tmp_path: Path,
) -> None:
    executor, batch = make(tmp_path, dtype=DType.BF16), sequence_batch(IDS[:20], 0, 64)
    executor.run_trunk(batch)
    executor.run_head(batch, 0, 20)
    keys, stored = executor._caches[0].keys.values, executor._caches[0].values.values
    for values in (keys, stored, executor._weights["layers.0.qkv"]):
        assert np.array_equal(round_to_bf16(values), values)
    for buffer in executor._program.buffers:
        held = executor._buffers[buffer.index][:20]
        assert np.array_equal(round_to_bf16(held), held) == (buffer.dtype is DType.BF16)


def test_steps_beyond_the_limits_are_rejected(tmp_path: Path) -> None:
    executor, batch = make(tmp_path), sequence_batch(IDS, 0, 64)
    with pytest.raises(ValueError, match="a step of 65 tokens; at most 64"):
        executor.run_trunk(replace(batch, token_ids=np.zeros(65, np.int32)))
    with pytest.raises(ValueError, match="a step of 65 samples; at most 64"):
        executor.run_head(batch, 0, 65)
    with pytest.raises(ValueError, match="num_threads is 0"):
        ReferenceExecutor(
            executor._program, open_checkpoint(tmp_path), replace(OPTIONS, num_threads=0)
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": [307, 0]}, r"token_ids\[0\] is 307; allowed are 0 to 306"),
        ({"token_ids": [0, -1]}, r"token_ids\[1\] is -1"),
        ({"positions": [0, 64]}, r"positions\[1\] is 64; allowed are 0 to 63"),
        ({"rope_positions": [-1, 0]}, r"rope_positions\[0\] is -1"),
        ({"kv_slots": [-2, 0]}, r"kv_slots\[0\] is -2; allowed are -1 to 255"),
        ({"kv_slots": [0]}, "kv_slots has 1 entries for 2 rows"),
        ({"sample_rows": [2]}, r"sample_rows\[0\] is 2"),
        ({"seq_starts": [0, 1]}, r"seq_starts \[0, 1\] do not span 2"),
        ({"seq_starts": [0, 2, 2]}, "1 block tables for 2 sequences"),
        ({"block_tables": [[-1, 0, 0, 0]]}, r"block_tables\[0\] is -1"),
        ({"block_tables": [[16, 0, 0, 0]]}, r"block_tables\[0\] is 16; allowed are 0 to 15"),
    ],
)
def test_out_of_range_batches_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    arrays = {name: np.array(values, np.int32) for name, values in changes.items()}
    batch = sequence_batch([1, 2], 0, 64)
    of_cache = {name: arrays.pop(name) for name in ("kv_slots", "block_tables") if name in arrays}
    batch = replace(batch, caches=(replace(batch.caches[0], **of_cache),), **arrays)
    with pytest.raises(ValueError, match=said):
        make(tmp_path).run_trunk(batch)


def test_a_run_without_a_cache_is_rejected(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    program = build_program(open_model(tmp_path), dtype=DType.F32, max_positions=64)
    executor = ReferenceExecutor(program, open_checkpoint(tmp_path), OPTIONS)
    with pytest.raises(ValueError, match="cache has not been allocated"):
        executor.run_trunk(sequence_batch([1, 2], 0, 64))


def test_a_cache_beyond_all_memory_is_rejected_with_its_size(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"need \d+ bytes, more than there is"):
        make(tmp_path).allocate_cache(2**45, 16)


def test_progress_reaches_the_bytes_of_all_weights(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    program = build_program(open_model(tmp_path), dtype=DType.BF16, max_positions=64)
    calls: list[tuple[int, int]] = []
    ReferenceExecutor(
        program,
        open_checkpoint(tmp_path),
        replace(OPTIONS, progress=lambda *call: calls.append(call)),
    )
    assert len(calls) == len(program.weights)
    assert calls == sorted(calls)
    assert calls[-1] == (program.weight_bytes, program.weight_bytes)


def test_a_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "one")
    write_tiny_llama(tmp_path / "other", hidden_size=64)
    program = build_program(open_model(tmp_path / "one"), dtype=DType.F32, max_positions=64)
    with pytest.raises(WeightsError, match=r"weights and config\.json disagree"):
        ReferenceExecutor(program, open_checkpoint(tmp_path / "other"), OPTIONS)


def test_it_samples_tokens_and_closes(tmp_path: Path) -> None:
    executor, batch = make(tmp_path), sequence_batch(IDS[:3], 0, 64)
    executor.run_trunk(batch)
    logits = executor.run_head(batch, 0, 3)
    best = logits.argmax(1)
    ints = np.zeros(3, np.int32)
    greedy = SampleBatch(
        positions=ints,
        temperature=np.zeros(3, np.float32),
        noise=NoiseKeys(seeds=ints.astype(np.int64), streams=ints),
    )
    assert np.array_equal(executor.sample(logits, greedy).token_ids, best)
    executor.close()
    with pytest.raises(WorkerError, match="closed"):
        executor.run_trunk(batch)


def test_operations_no_llama_uses_follow_their_contract(tmp_path: Path) -> None:
    """Layer norm, norm of each head, a weight offset, scale, and an activation without up."""
    rng = np.random.default_rng(8)
    vectors = {name: rng.standard_normal(8).astype(np.float32) for name in ("w", "b")}
    heads = {"h": rng.standard_normal(4).astype(np.float32)}
    table = rng.standard_normal((8, 8)).astype(np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"e": table, **vectors, **heads})
    p = ProgramBuilder("odd", dtype=DType.F32)
    p.cache(CacheSpec("paged", 1, 1, 4, DType.F32))
    x = p.embed(p.table("embed", WeightPart("e", "e", 8), 8))
    weight = p.vector("w", [WeightPart("w", "w", 8)], offset=1.0)
    y = p.norm(x, weight, eps=1e-3, form="layer", bias=p.vector("b", [WeightPart("b", "b", 8)]))
    p.norm_heads(y, p.vector("h", [WeightPart("h", "h", 4)]), eps=1e-3, head_dim=4)
    y = p.activation(p.scale(y, 0.5), form="relu")
    p.output("logits", p.begin_head(y))
    executor = ReferenceExecutor(
        p.build(vocab_size=8, max_positions=64), open_checkpoint(tmp_path), OPTIONS
    )
    executor.allocate_cache(8, 16)
    batch = sequence_batch([3, 7], 0, 64)
    executor.run_trunk(batch)
    found = executor.run_head(batch, 0, 2)

    rows = table[[3, 7]].astype(np.float64)
    centred = rows - rows.mean(1, keepdims=True)
    right = centred / np.sqrt(centred.var(1, keepdims=True) + 1e-3)
    right = (right * (vectors["w"] + 1) + vectors["b"]).reshape(2, 2, 4)
    right /= np.sqrt((right**2).mean(2, keepdims=True) + 1e-3)
    right = np.maximum((right * heads["h"]).reshape(2, 8) * 0.5, 0)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_operations_that_are_invalid_show_in_results_only(tmp_path: Path) -> None:
    """BLAS kernels raise the flag spuriously: their padding may hold a signalling NaN."""
    executor = make(tmp_path)
    norm = next(w for name, w in executor._weights.items() if "norm" in name)
    norm.fill(np.inf)  # the products after it have sums of infinities of both signs
    with np.errstate(invalid="raise"):
        logits = logits_of(executor, IDS[:5], max_positions=64)
    assert np.isnan(logits).any()

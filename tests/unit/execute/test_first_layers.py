"""Executors of a model's first layers: the model's weights and cache, and its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.native_first_layers import NativeFirstLayers
from quire.execute.reference import ReferenceExecutor
from quire.execute.reference_first_layers import ReferenceFirstLayers
from quire.models.registry import build_program, open_model
from quire.program.first_layers import first_layers
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint
from tests.models.generate import sequence_batch
from tests.tiny_models import write_tiny_llama

LIMITS = StepLimits(max_tokens=16, max_samples=4, max_sequences=4)
LAYERS, BLOCKS, BLOCK, MOST = 4, 4, 16, 48
PROMPT = [5, 6, 7, 8, 9, 10, 11]
PRECISIONS = [("none", "auto"), ("int8", "int8")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("first") / "m", num_hidden_layers=LAYERS)


def program_of(folder: Path, precision: str, kv_cache_dtype: str) -> Program:
    plain = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    return with_kv_cache_dtype(quantize(plain, precision), kv_cache_dtype)


def opened(kind: str, folder: Path, num: int, *precision: str) -> tuple[Any, Any]:
    """Return the executor of a model, with its cache, and that of its first `num` layers."""
    program = program_of(folder, *precision)
    options = ExecutorOptions(limits=LIMITS)
    if kind == "native":
        model: Any = NativeExecutor(program, open_checkpoint(folder), options, poison=True)
        short: Any = NativeFirstLayers(model, first_layers(program, num), LIMITS, poison=True)
    else:
        model = ReferenceExecutor(program, open_checkpoint(folder), options)
        short = ReferenceFirstLayers(model, first_layers(program, num), LIMITS)
    model.allocate_cache(BLOCKS, BLOCK)
    short.share_cache()
    return model, short


def layers_of(executor: Any) -> NDArray[np.uint8]:
    """Return the cache by layer."""
    if isinstance(executor, NativeExecutor):
        return np.array(executor._pool_bytes)
    (cache,) = executor._caches
    parts = [part for rows in (cache.keys, cache.values) for part in (rows.values, rows.scales)]
    return np.concatenate([part.reshape(LAYERS, -1) for part in parts], axis=1).copy()


@pytest.mark.parametrize("kind", ["native", "reference"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=" ".join)
def test_layers_store_what_the_model_stores_and_nothing_else(
    folder: Path, kind: str, precision: tuple[str, str]
) -> None:
    model, short = opened(kind, folder, 2, *precision)
    model.run_trunk(sequence_batch(PROMPT, 0, MOST))
    before = layers_of(model)
    token = sequence_batch([40], len(PROMPT), MOST)
    short.run_trunk(token, head_rows=1)
    short.run_head(token, 0, 1)
    drafted = layers_of(model)
    model.run_trunk(token)
    verified = layers_of(model)
    assert (drafted[:2] != before[:2]).any()
    assert np.array_equal(drafted[:2], verified[:2])
    assert np.array_equal(drafted[2:], before[2:])
    assert (verified[2:] != before[2:]).any()
    short.close()
    model.run_trunk(token)  # still open
    model.close()


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_all_layers_have_the_logits_of_the_model(folder: Path, kind: str) -> None:
    model, short = opened(kind, folder, LAYERS, *PRECISIONS[0])
    batch = sequence_batch(PROMPT[:4], 0, MOST)
    logits = []
    for executor in (model, short):
        executor.run_trunk(batch, head_rows=4)
        logits.append(executor.run_head(batch, 0, 4).copy())
    assert np.array_equal(*logits)
    assert short.weights_digest == model.weights_digest


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_there_is_no_second_cache(folder: Path, kind: str) -> None:
    _, short = opened(kind, folder, 1, *PRECISIONS[0])
    with pytest.raises(ValueError, match=r"first 1 of 4 layers has the cache of its model"):
        short.allocate_cache(BLOCKS, BLOCK)


def test_a_cache_that_was_not_allocated_cannot_be_shared(folder: Path) -> None:
    program = program_of(folder, *PRECISIONS[0])
    options = ExecutorOptions(limits=LIMITS)
    model = NativeExecutor(program, open_checkpoint(folder), options)
    short = NativeFirstLayers(model, first_layers(program, 1), LIMITS, num_threads=2)
    with pytest.raises(ValueError, match="1 layers of a cache of 0"):
        short.share_cache()
    assert short.pool is not model.pool

"""The cost of fp8 in quality: the built-in model on a story of its kind, against f32."""

from __future__ import annotations

import numpy as np
import pytest

from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.reference import ReferenceExecutor
from quire.models.model_folder import box_path
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint

STORY = (
    "Once upon a time there was a little dog named Max. Max liked to play in the park with his "
    "friend Lily. One day they found a big red ball under a tree. Lily wanted to take it home, but "
    "Max said it was not theirs. They looked around and saw a sad boy who had lost his ball."
)


def _logprobs(quantization: str, kv_cache_dtype: str) -> np.ndarray:
    """Return log-probabilities after each token of the story, computed in f32."""
    folder = box_path()
    ids = Tokenizer.load(folder).encode(STORY)
    plain = build_program(open_model(folder), dtype=DType.F32, max_positions=256)
    program = with_kv_cache_dtype(quantize(plain, quantization), kv_cache_dtype)
    count = len(ids)
    executor = ReferenceExecutor(
        program,
        open_checkpoint(folder),
        ExecutorOptions(limits=StepLimits(max_tokens=count, max_samples=count, max_sequences=1)),
    )
    executor.allocate_cache(16, 16)
    at = np.arange(count, dtype=np.int32)
    batch = ForwardBatch(
        token_ids=np.array(ids, np.int32),
        positions=at,
        rope_positions=at,
        caches=(CacheRows(kv_slots=at, block_tables=np.arange(16, dtype=np.int32)[None]),),
        seq_starts=np.array([0, count], np.int32),
        sample_rows=at,
    )
    executor.run_trunk(batch)
    logits = executor.run_head(batch, 0, count).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def right() -> np.ndarray:
    return _logprobs("none", "auto")


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "max_nats"),
    [("fp8", "auto", 0.01), ("fp8-block", "auto", 0.01), ("none", "fp8", 0.002)],
)
def test_fp8_diverges_little_from_f32(
    right: np.ndarray, quantization: str, kv_cache_dtype: str, max_nats: float
) -> None:
    found = _logprobs(quantization, kv_cache_dtype)
    nats = float((np.exp(right) * (right - found)).sum(axis=1).mean())
    assert 0 < nats < max_nats
    assert (found.argmax(axis=1) == right.argmax(axis=1)).mean() > 0.9

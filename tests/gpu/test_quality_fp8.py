"""The quality benchmark for fp8: the torch executor against the native one in f32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.quality import Setting, measure
from quire.program.tensors import DType
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu


def test_fp8_weights_diverge_more_than_fp8_kv(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 307, 60).tolist() for _ in range(2)]
    plain, fp8 = Setting(dtype=DType.F32), Setting(dtype=DType.F32, scheme="fp8")
    kept = Setting(dtype=DType.F32, kv_cache_dtype="fp8")
    rows = measure(write_tiny_llama(tmp_path), texts, [plain, fp8, kept])["settings"]
    assert [row["executor"] for row in rows] == ["native", "torch", "torch"]
    assert [row["setting"] for row in rows] == ["plain, f32", "fp8, f32", "plain KV fp8, f32"]
    assert rows[0]["kl_nats"] == 0
    assert 0 < rows[2]["kl_nats"] < rows[1]["kl_nats"] < 0.05
    assert rows[1]["same_likeliest"] > 0.8

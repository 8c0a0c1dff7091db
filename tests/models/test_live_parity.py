"""Logits against transformers, every row of every case (marked `parity`: needs torch)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.program.tensors import DType
from tests.models import cases_llama
from tests.models.case import Case
from tests.models.cases import CASES
from tests.models.generate import EXECUTORS, logits_of, open_executor
from tests.models.record import (
    bf16_error,
    margins,
    relative_error,
    same_tokens,
    transformers_logits,
)

pytestmark = pytest.mark.parity

F32_ERROR = 1e-4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_in_f32_matches_transformers(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = case.write(tmp_path)
    right = transformers_logits(folder, case.token_ids)
    sure = margins(right) > F32_ERROR
    for kind in EXECUTORS:
        executor = open_executor(folder, kind=kind)
        found = logits_of(executor, case.token_ids, max_positions=case.max_positions, chunk=37)
        assert relative_error(found, right) <= F32_ERROR, kind
        assert (found.argmax(1) == right.argmax(1))[sure].all(), kind


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.stored == "bf16"], ids=lambda case: case.name
)
def test_every_row_in_bf16_is_as_close_to_f32_as_in_transformers(
    case: Case, seed: int, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    case = replace(case, seed=case.seed + 100 * seed)
    folder = case.write(tmp_path)
    right = transformers_logits(folder, case.token_ids)
    rounded = transformers_logits(folder, case.token_ids, dtype="bfloat16")
    allowed = bf16_error(case, rounded, right)
    sure = margins(right) > allowed
    for kind in EXECUTORS:
        executor = open_executor(folder, kind=kind, dtype=DType.BF16)
        found = logits_of(executor, case.token_ids, max_positions=case.max_positions, chunk=37)
        assert bf16_error(case, found, right) <= allowed, kind
        assert same_tokens(case, (found.argmax(1) == right.argmax(1))[sure]), kind


def test_rope_frequencies_match_transformers_within_a_bit(tmp_path: Path) -> None:
    """Frequencies, then attention scale, of every Llama."""
    pytest.importorskip("torch")
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from quire.models.registry import open_model
    from quire.models.rope import rope_spec

    for case in cases_llama.CASES:
        spec = open_model(case.write(tmp_path / case.name))
        ours = rope_spec(spec.rotary.full, spec.attention.head_dim, 512)
        config = transformers.LlamaConfig.from_pretrained(tmp_path / case.name)
        theirs = LlamaRotaryEmbedding(config)
        np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq.numpy(), rtol=3e-7, atol=0)
        assert ours.attention_scale == pytest.approx(theirs.attention_scaling, rel=1e-12)

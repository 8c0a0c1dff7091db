"""Embeddings against transformers: hidden rows, last token and mean (marked `parity`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.base.rare_records import POOL_SCALE
from tests.models.test_saved_by_transformers import CLASSES

pytestmark = pytest.mark.parity

ARCHITECTURES = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM"),
    *("GPT2LMHeadModel", "OPTForCausalLM", "Olmo2ForCausalLM"),
)
F32_ERROR = 1e-5
PROMPTS = [np.random.default_rng(n).integers(3, 130, n).tolist() for n in (1, 5, 60)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("alone", [False, True])
def test_vectors_are_those_of_the_last_hidden_state(
    architecture: str, alone: bool, tmp_path: Path
) -> None:
    """alone: the decoder is saved without its head, as embedding models often are."""
    import torch
    import transformers

    config_class, sizes = CLASSES[architecture]
    torch.manual_seed(3)
    config: Any = getattr(transformers, config_class)(**{**sizes, "vocab_size": 512})
    whole = getattr(transformers, architecture)(config).eval()
    decoder = whole.base_model
    if architecture == "OPTForCausalLM" and alone:
        pytest.skip("OPTModel's tensors have a prefix of their own")
    (decoder if alone else whole).save_pretrained(tmp_path)
    with torch.no_grad():
        rows = [decoder(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]
    with _llm(tmp_path) as llm:
        for pooling, wanted in (
            ("last", [one[-1] for one in rows]),
            ("mean", [one.astype(np.float64).mean(axis=0) for one in rows]),
        ):
            found = _pooled(llm, pooling)
            for ids, one, other in zip(PROMPTS, found, wanted, strict=True):
                error = np.abs(one - other).max() / np.abs(other).max()
                assert error < F32_ERROR, (pooling, len(ids))


def _llm(folder: Path) -> LLM:
    from tests.tiny_models import write_tokenizer

    write_tokenizer(folder, vocab_size=512)
    return LLM(folder, convert="embed", dtype="f32", num_threads=1)


def _pooled(llm: LLM, pooling: str) -> list[np.ndarray]:
    sampling = SamplingParams(pooling=pooling, max_tokens=0)
    jobs = llm._jobs(PROMPTS, sampling, None, special_tokens=False)
    llm._run(jobs, False, "")
    found = []
    for job in jobs:
        last = job._last
        assert last is not None
        assert last.pooled is not None
        found.append(last.pooled.sums[0] / POOL_SCALE / last.pooled.counts[0])
    return found

"""LLM.embed: vectors are the same bits in every batch, chunking, preemption and thread count."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import InvalidParameter
from quire.base.rare_records import POOL_SCALE
from quire.engine.library.answers import Embedding
from quire.engine.output.embedding import similarity
from quire.models.pooling_files import plain_pooling
from tests.tiny_models import write_tiny_llama
from tests.unit.models.test_pooling_files import MODULES, files

SIZE = 60
RNG = np.random.default_rng(4)
SHARED = RNG.integers(2, 300, 40).tolist()
# Of several lengths, some with a common beginning, one of a single token, one repeated.
PROMPTS: list[list[int]] = [
    *([*SHARED, *RNG.integers(2, 300, count).tolist()] for count in (1, 7, 24, 88)),
    *(RNG.integers(2, 300, count).tolist() for count in (1, 2, 16, 31, 32, 33, 120)),
    SHARED,
    SHARED,
]
MEAN = {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a tiny model with sentence-transformers files. changes: see files()."""
    write_tiny_llama(folder, seed=6, max_position_embeddings=256)
    for name, content in files(**changes).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=["last", "mean"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pooling = MEAN if request.param == "mean" else {}
    prompts = {"default_prompt_name": "query"}
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_model(folder, pooling=pooling, prompts=prompts)


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[list[Embedding]]:
    """Return each prompt's vector, computed with no other and from no cache."""
    with LLM(model, enable_prefix_caching=False, num_threads=1) as llm:
        yield [llm.embed(prompt)[0] for prompt in PROMPTS]


def bits(embeddings: list[Embedding]) -> list[bytes]:
    assert [one.error for one in embeddings] == [None] * len(embeddings)
    return [one.embedding.tobytes() for one in embeddings if one.embedding is not None]


SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {"max_num_batched_tokens": 1024},
    "chunks of 8": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "two threads, small blocks": {"num_threads": 2, "block_size": 4},
    "few blocks, so that prompts are preempted": {
        "kv_cache_memory_bytes": 20 * 16 * 2 * 2 * 16 * 4,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
    },
    "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_vectors_do_not_depend_on_what_computes_them(
    model: Path, alone: list[Embedding], settings: str
) -> None:
    with LLM(model, **SETTINGS[settings]) as llm:
        assert bits(llm.embed(PROMPTS)) == bits(alone)
        again = llm.embed(PROMPTS)  # the cache holds all of them now
        assert bits(again) == bits(alone)
        uses_cache = SETTINGS[settings].get("enable_prefix_caching", True)
        is_last = llm.card.pooling is not None and llm.card.pooling.pooling == "last"
        found = [one.cached_tokens for one in again]
        # A mean needs every row, so what is cached is computed again.
        assert any(found) == (uses_cache and is_last)


def test_vectors_beside_generation_are_the_same(model: Path, alone: list[Embedding]) -> None:
    """One scheduler: answers keep their tokens, vectors their bits, and no row samples for them."""
    sampling = SamplingParams(max_tokens=24, seed=3, temperature=0.9)
    with LLM(model, max_num_batched_tokens=16, max_num_seqs=6) as llm:
        pooling = llm.card.pooling
        assert pooling is not None
        wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:5], sampling)]
        pooled = SamplingParams(pooling=pooling.pooling, max_tokens=0)
        mixed = [sampling] * 5 + [pooled] * len(PROMPTS)
        jobs = llm._jobs([*PROMPTS[:5], *PROMPTS], mixed, None, special_tokens=True)
        llm._run(jobs, False, "")
        assert [job.answer().outputs[0].token_ids for job in jobs[:5]] == wanted
        assert bits([job.embedding(pooling, None) for job in jobs[5:]]) == bits(alone)
        assert all(not job.answer().outputs[0].token_ids for job in jobs[5:])


def test_a_vector_is_made_as_the_files_say(model: Path) -> None:
    prompt = PROMPTS[2]
    with LLM(model) as llm:
        pooling = llm.card.pooling
        assert pooling is not None
        (job,) = llm._jobs(
            [prompt], SamplingParams(pooling="mean", max_tokens=0), None, special_tokens=True
        )
        llm._run([job], False, "")
        (last,) = llm._jobs(
            [prompt], SamplingParams(pooling="last", max_tokens=0), None, special_tokens=True
        )
        llm._run([last], False, "")
        sums = {"mean": job, "last": last}[pooling.pooling]._last
        assert sums is not None
        assert sums.pooled is not None
        row = sums.pooled.sums[0] / POOL_SCALE
        row /= len(prompt) if pooling.pooling == "mean" else 1
        (found,) = llm.embed(prompt)
        assert found.embedding is not None
        assert np.allclose(found.embedding, row / np.linalg.norm(row), atol=1e-6)
        # The default prompt precedes texts, and no token ids.
        text = llm.embed("abc")[0]
        whole = llm.embed("Instruct: find\nQuery:abc", prompt_name="")[0]
        assert bits([text]) == bits([whole])
        assert text.prompt_ids == whole.prompt_ids
        assert bits([text]) != bits(llm.embed("abc", prompt_name="document"))


def test_dimensions_are_cut_and_normalized_again_where_they_may_be(model: Path) -> None:
    with LLM(model, matryoshka_dimensions="8,16") as llm:
        (whole,), (cut,) = llm.embed(PROMPTS[3]), llm.embed(PROMPTS[3], dimensions=8)
        assert whole.embedding is not None
        assert cut.embedding is not None
        assert cut.embedding.shape == (8,)
        kept = whole.embedding[:8]
        assert np.allclose(cut.embedding, kept / np.linalg.norm(kept), atol=1e-6)
        assert bits(llm.embed(PROMPTS[3], dimensions=SIZE)) == bits([whole])
        for wrong in (0, 9, 61, True, "8"):
            with pytest.raises(InvalidParameter, match="8, 16, 60"):
                llm.embed(PROMPTS[3], dimensions=wrong)  # type: ignore[arg-type]
    with (
        LLM(model) as llm,
        pytest.raises(InvalidParameter, match='with matryoshka_dimensions="any" '),
    ):
        llm.embed(PROMPTS[3], dimensions=8)


def test_a_decoder_without_a_head_embeds_and_generates_nothing(tmp_path: Path) -> None:
    """As e5-mistral is stored: MistralModel, tensors without the prefix, no head."""
    from quire.weights.checkpoint import open_checkpoint
    from tests.safetensors_writer import write_safetensors

    whole = write_model(tmp_path / "whole", modules=MODULES[:2])
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    stored = open_checkpoint(whole)
    tensors = {
        name.removeprefix("model."): stored.read_f32(name)
        for name in stored.names
        if name != "lm_head.weight"
    }
    write_safetensors(bare / "model.safetensors", tensors)
    with LLM(whole) as llm:
        wanted = bits(llm.embed(PROMPTS))
    with LLM(bare) as llm:
        assert bits(llm.embed(PROMPTS)) == wanted
        assert not llm.card.generates
        scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
        for sampling in (SamplingParams(max_tokens=2), scored):
            with pytest.raises(InvalidParameter, match="writes no text"):
                llm.generate([[5, 6]], sampling)


def test_a_model_without_embeddings_says_what_to_do(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "plain", seed=6)
    with LLM(folder) as llm:
        with pytest.raises(InvalidParameter, match='start with convert="embed" to'):
            llm.embed([5, 6])
        with pytest.raises(InvalidParameter, match="--convert embed"):
            llm.generate([[5, 6]], SamplingParams(pooling="last", max_tokens=0))
    with LLM(folder, convert="embed") as llm:
        assert llm.card.pooling == plain_pooling(SIZE)
        (found,) = llm.embed([5, 6])
        assert found.embedding is not None
        assert found.embedding.shape == (SIZE,)
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_similarities() -> None:
    left, right = np.array([3, 4], np.float32), np.array([4, 3], np.float32)
    cosine = plain_pooling(2)
    assert similarity(left, right, cosine) == pytest.approx(0.96)
    assert similarity(left, 0 * right, cosine) == 0.0
    from dataclasses import replace

    assert similarity(left, right, replace(cosine, similarity="dot")) == 24.0

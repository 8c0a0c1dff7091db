"""Tensor parallelism of an engine: answers and fingerprint of one process; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.config.groups import ExecutorConfig
from quire.config.machine import num_usable_cores
from quire.engine.assembly import ranks
from tests.tiny_models import write_tiny_llama

needs_two_cores = pytest.mark.skipif(num_usable_cores() < 2, reason="two ranks need two cores")


@needs_two_cores
def test_two_ranks_answer_as_one_process() -> None:
    prompts = ["Once upon a time", "The cat sat on the", "One day"]
    sampling = [
        SamplingParams(max_tokens=12, seed=1, logprobs=3),
        SamplingParams(max_tokens=0, prompt_logprobs=1),
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.2, n=1),
    ]
    found = []
    for degree in (1, 2):
        llm = LLM(tensor_parallel_size=degree, num_threads=2, speculate="ngram")
        answers = llm.generate(prompts, sampling)
        outputs = [[(one.token_ids, one.logprobs) for one in answer.outputs] for answer in answers]
        found.append((outputs, list(answers[1].prompt_logprobs), llm.card.fingerprint))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"executor": "reference"}, "executor is reference: only the native executor"),
        ({"executor": "torch"}, "executor is torch: only the native executor"),
        ({"kv_tier_path": "tier"}, "holds the blocks of one process only"),
        ({"draft_model": "draft"}, "draft heads or the model.s first layers are asked"),
        ({"speculate": "eagle"}, "draft heads or the model.s first layers are asked"),
        ({"self_draft_layers": 1}, "draft heads or the model.s first layers are asked"),
        ({"num_threads": 1}, "num_threads is 1, which are divided over the ranks"),
    ],
)
def test_what_several_ranks_do_not_support_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        engine_config({"tensor_parallel_size": 2, **settings})


def test_embeddings_of_several_ranks_have_the_bits_of_one() -> None:
    found = []
    for degree in (1, 2):
        llm = LLM(tensor_parallel_size=degree, num_threads=2, convert="embed")
        found.append(
            [one.embedding.tobytes() for one in llm.embed(["A dog barks.", "Rain falls. " * 9])]
        )
        llm.close()
    assert found[0] == found[1]


def test_no_rank_and_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="tensor_parallel_size is 0"):
        ExecutorConfig(tensor_parallel_size=0)
    monkeypatch.setattr(ranks, "num_usable_cores", lambda: 3)
    assert ranks.ranked_class(ExecutorConfig(tensor_parallel_size=3)).degree == 3
    with pytest.raises(SettingError, match="may use 3 CPU cores; at most one rank per core"):
        ranks.ranked_class(ExecutorConfig(tensor_parallel_size=4))


@needs_two_cores
def test_a_degree_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with pytest.raises(SettingError, match=r"5 heads over 1 KV heads.*degrees work: 1, 5"):
        LLM(folder, tensor_parallel_size=2)

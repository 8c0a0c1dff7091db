"""Pipeline parallelism of an engine: answers and fingerprint of one process; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.flags import engine_config
from quire.config.machine import num_usable_cores
from quire.engine.assembly import ranks
from quire.ranks.pipeline_class import PipelineExecutorClass
from tests.tiny_models import write_tiny_llama

needs_two_cores = pytest.mark.skipif(num_usable_cores() < 2, reason="two ranks need two cores")


@needs_two_cores
def test_two_stages_answer_as_one_process() -> None:
    prompts = ["Once upon a time", "The cat sat on the", "One day", "Tom and Ben"]
    sampling = [
        SamplingParams(max_tokens=12, seed=1, logprobs=3),
        SamplingParams(max_tokens=0, prompt_logprobs=1),
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.2, n=1),
        SamplingParams(max_tokens=12, seed=2, structured_outputs={"regex": "[a-z ]+"}),
    ]
    found = []
    for stages in (1, 2):
        llm = LLM(pipeline_parallel_size=stages, num_threads=2, speculate="ngram")
        answers = llm.generate(prompts, sampling)
        outputs = [[(one.token_ids, one.logprobs) for one in answer.outputs] for answer in answers]
        found.append((outputs, list(answers[1].prompt_logprobs), llm.card.fingerprint))
        llm.close()
    assert found[0] == found[1]


@needs_two_cores
def test_embeddings_of_two_stages_have_the_bits_of_one_process() -> None:
    found = []
    for stages in (1, 2):
        llm = LLM(pipeline_parallel_size=stages, num_threads=2, convert="embed")
        found.append(
            [one.embedding.tobytes() for one in llm.embed(["A dog barks.", "Rain falls. " * 9])]
        )
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"executor": "reference"}, "pipeline_parallel_size is 2 and executor is reference"),
        ({"num_threads": 1}, "num_threads is 1, which are divided over the ranks"),
        (
            {"num_threads": 3, "tensor_parallel_size": 2},
            "tensor_parallel_size is 2 and pipeline_parallel_size is 2 and num_threads is 3",
        ),
    ],
)
def test_what_stages_do_not_support_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        engine_config({"pipeline_parallel_size": 2, **settings})


def test_no_stage_and_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="pipeline_parallel_size is 0"):
        ExecutorConfig(pipeline_parallel_size=0)
    monkeypatch.setattr(ranks, "num_usable_cores", lambda: 4)
    four = ExecutorConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    made = ranks.ranked_class(four)
    assert isinstance(made, PipelineExecutorClass)
    assert (made.degree, made.stages, made.num_ranks) == (2, 2, 4)
    with pytest.raises(SettingError, match=r"size is 3, 6 ranks together, and .* 4 CPU cores"):
        ranks.ranked_class(ExecutorConfig(tensor_parallel_size=2, pipeline_parallel_size=3))
    with pytest.raises(SettingError, match="pipeline_parallel_size is 5, and this process may"):
        ranks.ranked_class(ExecutorConfig(pipeline_parallel_size=5))


@needs_two_cores
def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, num_hidden_layers=1)
    with pytest.raises(SettingError, match="has 1 layers, of which each stage needs one: 1 to 1"):
        LLM(folder, pipeline_parallel_size=2)

"""Context parallelism in an engine: answers and fingerprint of one process, blocks of pieces, and
what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.flags import engine_config
from quire.config.groups import PIECE_TOKENS
from quire.config.machine import num_usable_cores
from quire.engine.assembly import ranks
from quire.program.declarations import PIECE_POSITIONS
from quire.ranks.pipeline_class import PipelineExecutorClass
from tests.tiny_models import write_tiny_llama

needs_two_cores = pytest.mark.skipif(num_usable_cores() < 2, reason="two ranks need two cores")


@needs_two_cores
def test_two_ranks_with_pieces_answer_as_one_process(tmp_path: Path) -> None:
    # Three heads, which two ranks of tensor parallelism could not divide.
    folder = write_tiny_llama(
        tmp_path,
        seed=8,
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    long = "Once upon a time there was a cat. " * 25
    prompts = [long, "One day", long + "The dog barked.", long[:200]]
    sampling = [
        SamplingParams(max_tokens=40, seed=1, logprobs=3),
        SamplingParams(max_tokens=8, seed=3, prompt_logprobs=1),
        SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.2),
        SamplingParams(max_tokens=12, seed=2, structured_outputs={"regex": "[a-z ]+"}),
    ]
    found = []
    for degree in (1, 2):
        llm = LLM(folder, context_parallel_size=degree, num_threads=2, speculate="ngram")
        answers = llm.generate(prompts, sampling)
        assert max(len(answer.prompt_token_ids) for answer in answers) > 2 * PIECE_TOKENS
        outputs = [[(one.token_ids, one.logprobs) for one in answer.outputs] for answer in answers]
        found.append((outputs, list(answers[1].prompt_logprobs), llm.card.fingerprint))
        assert llm.card.block_size == (16 if degree == 1 else 2 * PIECE_TOKENS)
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"executor": "reference"}, "context_parallel_size is 2 and executor is reference: only"),
        ({"num_threads": 1}, "num_threads is 1, which are divided over the ranks"),
        ({"block_size": 48}, "block_size is 48; ranks have whole pieces of 256 tokens, which 4"),
        (
            {"tensor_parallel_size": 2, "tp_mode": "fast"},
            "tp_mode is fast and context_parallel_size is 2, which keeps sums whole",
        ),
    ],
)
def test_what_ranks_with_pieces_do_not_support_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        engine_config({"context_parallel_size": 2, **settings})


def test_ranks_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PIECE_TOKENS == PIECE_POSITIONS
    with pytest.raises(SettingError, match="context_parallel_size is 0"):
        ExecutorConfig(context_parallel_size=0)
    monkeypatch.setattr(ranks, "num_usable_cores", lambda: 8)
    eight = ExecutorConfig(
        tensor_parallel_size=2, context_parallel_size=2, pipeline_parallel_size=2
    )
    made = ranks.ranked_class(eight, 32)
    assert isinstance(made, PipelineExecutorClass)
    assert (made.degree, made.context, made.stages, made.num_ranks) == (4, 2, 2, 8)
    assert made.block_size == 32
    with pytest.raises(SettingError, match=r"size is 3, 9 ranks together, and .* 8 CPU cores"):
        ranks.ranked_class(ExecutorConfig(tensor_parallel_size=3, context_parallel_size=3))


def test_the_allocator_has_a_piece_of_each_rank_in_a_block() -> None:
    config = engine_config({"context_parallel_size": 3, "block_size": 64})
    assert config.kv_block_tokens == 3 * PIECE_TOKENS
    assert engine_config({"block_size": 64}).kv_block_tokens == 64

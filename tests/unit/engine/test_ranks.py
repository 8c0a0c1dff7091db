"""Tensor parallelism of an engine: answers and fingerprint of one process; what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.engine_stats import EXPERT_TOKENS, EngineStats
from quire.base.errors import SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.flags import engine_config
from quire.config.machine import num_usable_cores
from quire.engine.assembly import ranks
from quire.engine.assembly.expert_loads import read_expert_loads
from quire.obs.engine_metrics import EngineCollector
from quire.speculative.control import AdaptiveControl
from tests.cases import each_case
from tests.models.cases_experts import QWEN3_MOE
from tests.tiny_models import write_tiny, write_tiny_llama

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


@each_case(
    ("settings", "words"),
    [
        ({"executor": "reference"}, "executor is reference: only the native executor"),
        ({"num_threads": 1}, "num_threads is 1, which are divided over the ranks"),
    ],
)
def test_what_several_ranks_do_not_support_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        engine_config({"tensor_parallel_size": 2, **settings})


@needs_two_cores
def test_what_drafts_beside_ranks_and_stages_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)

    async def answered(**settings: Any) -> tuple[Any, int]:
        async with AsyncLLM(num_threads=2, **settings) as llm:
            stream = llm.generate("Once upon a time", sampling)
            tokens = [(delta.token_ids, delta.logprobs) async for delta in stream]
            drafted = sum(llm.client.stats.draft_tokens_total)
            ids = [token_id for part, _ in tokens for token_id in part]
            return (ids, [one for _, part in tokens for one in part]), drafted

    alone, _ = asyncio.run(answered())
    for speculate, degrees in {
        "draft": ("pipeline", "context"),
        "eagle": ("pipeline", "context"),
        "self": ("tensor", "pipeline", "context"),
    }.items():
        for name in degrees:
            layout = {f"{name}_parallel_size": 2}
            answer, drafted = asyncio.run(answered(speculate=speculate, **layout))
            assert answer == alone, (speculate, name)
            assert drafted, (speculate, name)


@needs_two_cores
def test_a_degree_that_splits_sums_is_part_of_the_fingerprint() -> None:
    found = []
    for settings in (
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "tp_mode": "fast"},
    ):
        llm = LLM(num_threads=2, **settings)
        answer = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0.0))
        found.append((llm.card.fingerprint, len(answer[0].outputs[0].token_ids)))
        llm.close()
    assert found[0] == found[1] != found[2]
    assert found[2][1] == 8


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


async def _answers(
    folder: Path, prompts: list[list[int]], settings: dict[str, Any]
) -> tuple[list[list[int]], str, EngineStats]:
    """Return the tokens of all answers, the fingerprint, and the counters after them."""
    sampling = SamplingParams(max_tokens=12, seed=1)
    async with AsyncLLM(folder, num_threads=2, **settings) as llm:
        tokens = [
            [token async for delta in llm.generate(one, sampling) for token in delta.token_ids]
            for one in prompts
        ]
        return tokens, llm.client.card.fingerprint, llm.client.stats


@needs_two_cores
def test_distributed_experts_answer_as_one_process_and_are_placed_by_their_load(
    tmp_path: Path,
) -> None:
    config = QWEN3_MOE | {"vocab_size": 300, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_tiny(tmp_path / "m", config | heads, seed=3)
    metrics = tmp_path / "metrics.txt"
    prompts = [[1, 2, 3, 4, 5] * 5, [7, 8, 9] * 9]
    found, loads = [], []
    for settings in (
        {},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {
            **{"tensor_parallel_size": 2, "enable_expert_parallel": True},
            **{"expert_load_file": str(metrics), "num_redundant_experts": 2},
        },
    ):
        tokens, fingerprint, stats = asyncio.run(_answers(folder, prompts, settings))
        found.append((tokens, fingerprint))
        loads.append(stats.expert_tokens_total)
        families = EngineCollector(lambda stats=stats: stats).collect()
        (family,) = (one for one in families if one.name == EXPERT_TOKENS)
        metrics.write_text(
            "# HELP x\n"
            + "".join(
                f'{s.name}{{expert="{s.labels["expert"]}",layer="{s.labels["layer"]}"}} {s.value}\n'
                for s in family.samples
            )
        )
    assert found[0] == found[1] == found[2]
    assert loads[0] == loads[1] == loads[2] == read_expert_loads(str(metrics))
    tokens = 25 + 27 + 2 * 11
    assert [sum(of_layer) for of_layer in loads[0]] == [5 * tokens] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing\n", "has no quire_expert_tokens_total for the layers"),
        ('quire_expert_tokens_total{expert="0",layer="1"} 3.0\n', "from 0 on"),
        ('quire_expert_tokens_total{expert="1",layer="0"} 3.0\n', "some experts of layer 0"),
        ('quire_expert_tokens_total{expert="0",layer="0"} 1e999\n', "for the layers"),
        ('quire_expert_tokens_total{expert="0",layer="0"} NaN\n', "for the layers"),
        ('quire_expert_tokens_total{expert="-1",layer="0"} 4\n', "for the layers"),
    ],
)
def test_loads_that_are_no_models_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "metrics.txt"
    file.write_text(text)
    with pytest.raises(SettingError, match=words):
        read_expert_loads(str(file))
    with pytest.raises(SettingError, match="cannot be read"):
        read_expert_loads(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_expert_parallel": True}, "tensor_parallel_size is 1: experts are"),
        ({"expert_load_file": "x", "tensor_parallel_size": 2}, "without enable_expert_parallel"),
        (
            {"num_redundant_experts": 1, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            "num_redundant_experts is 1 without expert_load_file",
        ),
        ({"tp_mode": "fast"}, "tp_mode is fast and tensor_parallel_size is 1"),
        ({"tp_mode": "quick", "tensor_parallel_size": 2}, "tp_mode is .quick"),
        ({"num_redundant_experts": -1}, "num_redundant_experts is -1"),
        (
            {"expert_load_file": "", "tensor_parallel_size": 2, "enable_expert_parallel": True},
            "expert_load_file is empty",
        ),
    ],
)
def test_settings_of_experts_that_contradict_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        engine_config(settings)


@needs_two_cores
def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="has no mixture of experts"):
        LLM(tensor_parallel_size=2, enable_expert_parallel=True)


@needs_two_cores
def test_a_degree_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with pytest.raises(SettingError, match=r"5 heads over 1 KV heads.*degrees work: 1, 5"):
        LLM(folder, tensor_parallel_size=2)

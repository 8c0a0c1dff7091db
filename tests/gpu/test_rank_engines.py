"""Whole engines over ranks of CPU tensors: settings reach the ranks, and answers are those of one
process with the torch executor.

Knows no executor. tests/gpu/test_ranks.py compares drawn cases below the engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import AsyncLLM, SamplingParams
from quire.base.engine_stats import EngineStats
from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.engine.assembly import drafter, torch_choice
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.speculative.control import FixedControl
from quire.speculative.rests import NoRests
from tests.exact.workload import VOCAB_SIZE
from tests.models.cases_experts import QWEN3_MOE
from tests.tiny_models import write_tiny

pytestmark = pytest.mark.gpu

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZE = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128, "num_hidden_layers": 2}
PROMPTS = [[5 + number] * 3 + list(range(9, 42)) for number in range(4)]
SAMPLING = SamplingParams(temperature=0.7, seed=4, max_tokens=12, logprobs=2, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "executor": "torch",
    "device": "cpu",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 1 << 16,
    "num_threads": 2,
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with its tokenizer."""
    return write_tiny(tmp_path_factory.mktemp("moe"), QWEN3_MOE | SIZE | HEADS, seed=24)


async def answered(folder: Path, **settings: Any) -> tuple[Any, EngineStats]:
    """Return tokens, log-probabilities and the fingerprint, and the counters after them."""
    async with AsyncLLM(folder, **SETTINGS, **settings) as llm:
        found = []
        for prompt in PROMPTS:
            deltas = [delta async for delta in llm.generate(prompt, SAMPLING)]
            found.append([(delta.token_ids, delta.logprobs) for delta in deltas])
        joined = [
            ([one for ids, _ in parts for one in ids], [one for _, more in parts for one in more])
            for parts in found
        ]
        return (joined, llm.client.card.fingerprint), llm.client.stats


def test_whole_experts_drafts_and_a_tier_of_another_layout_change_no_answer(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine finds the blocks that one process has left."""
    monkeypatch.setattr(drafter, "AdaptiveControl", lambda *_: FixedControl(3, NoRests()))
    tier = {"kv_tier_path": str(tmp_path / "tier"), "kv_tier_fetch": "always"}
    alone, before = asyncio.run(answered(mixture, **tier))
    assert before.tier_saved_blocks_total
    ranks = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "speculate": "draft",
        "draft_model": str(mixture),
    }
    found, stats = asyncio.run(answered(mixture, **tier, **ranks))
    assert found == alone
    assert stats.tier_fetched_blocks_total
    assert sum(stats.draft_tokens_total)
    assert sum(map(sum, stats.expert_tokens_total))


def test_ray_has_no_gpus_for_ranks_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    card = TorchExecutorClass(torch.device("cuda", 0))
    monkeypatch.setattr(torch_choice, "torch_class", lambda config: card)
    asked = {
        "executor": "torch",
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
    }
    with pytest.raises(SettingError, match=r"ray, which places ranks by their CPUs.*torchrun"):
        torch_choice.torch_ranks(engine_config(asked))

"""Models of the exact tests: two tiny Llamas in both dtypes, and families with other attention.

The families are Mistral (sliding windows), Gemma 3 (windows by layer, two rope bases, head norms)
and Qwen3, and two mixtures of experts: Qwen2-MoE (with a shared expert) and Mixtral. Some run again
with int8 and int4 weights, and with a KV cache of another precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.program.tensors import DType
from quire.scheduler import step_budget
from quire.scheduler.prefill import layered
from tests.exact.families import whole_models
from tests.exact.rig import AloneRuns, Model
from tests.exact.workload import VOCAB_SIZE
from tests.models.cases_experts import MIXTRAL, QWEN2_MOE
from tests.models.cases_gemma import GEMMA3
from tests.models.cases_mistral import MISTRAL
from tests.models.cases_qwen import QWEN3
from tests.serve.preloaded import forked_children
from tests.tiny_models import write_tiny, write_tiny_llama


@pytest.fixture(scope="module", autouse=True)
def tiny_parts() -> Iterator[None]:
    """Enable layered prefill for the short prompts of the cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layered, "TILE_TOKENS", 1)
        patch.setattr(layered, "WORTH", 0.0)
        patch.setattr(step_budget, "MIN_PROMPT_TOKENS", 2)
        yield


@pytest.fixture(scope="module", autouse=True)
def preloaded_ranks() -> Iterator[None]:
    """Fork the processes of ranks from one that has their modules."""
    with forked_children():
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Return models: one KV head with odd widths, grouped heads tied and scaled, the families."""
    root = tmp_path_factory.mktemp("exact")
    odd = write_tiny_llama(root / "odd", seed=5)
    scaled = write_tiny_llama(
        root / "scaled",
        seed=6,
        dtype="bf16",
        num_hidden_layers=1,
        hidden_size=48,
        intermediate_size=72,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    size = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    # Windows of 37 and 13 end inside blocks; prompts and answers are longer than the windows.
    mistral = write_tiny(root / "mistral", MISTRAL | size, seed=7)
    gemma = write_tiny(
        root / "gemma",
        GEMMA3
        | size
        | {"num_hidden_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        seed=8,
        dtype="bf16",
    )
    qwen = write_tiny(root / "qwen", QWEN3 | size | {"num_hidden_layers": 2}, seed=9)
    qwen_moe = write_tiny(root / "qwen_moe", QWEN2_MOE | size, seed=10)
    mixtral = write_tiny(root / "mixtral", MIXTRAL | size, seed=11)
    llamas = [(folder, dtype) for folder in (odd, scaled) for dtype in (DType.F32, DType.BF16)]
    families = [
        (mistral, DType.F32),
        (mistral, DType.BF16),
        (gemma, DType.BF16),
        (qwen, DType.BF16),
    ]
    made = [Model(folder, dtype) for folder, dtype in (*llamas, *families)]
    made += [
        Model(odd, DType.F32, "int8"),
        # tied: the head is also the embedding table, so int8
        Model(scaled, DType.BF16, "int4-g32"),
        Model(qwen, DType.BF16, "int4-g64-zp"),
        Model(odd, DType.F32, kv_cache_dtype="int8"),
        Model(scaled, DType.BF16, "int8", "int8"),
        Model(gemma, DType.BF16, kv_cache_dtype="int8"),
        Model(odd, DType.F32, kv_cache_dtype="bf16"),
        Model(qwen_moe, DType.F32),
        Model(mixtral, DType.BF16),
        Model(mixtral, DType.F32, "int4-g32"),
    ]
    yield made
    for model in made:
        model.close()


@pytest.fixture(scope="session")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """Return the models of families.py in one process, by name."""
    with whole_models(tmp_path_factory.mktemp("families")) as made:
        yield made


@pytest.fixture(scope="session")
def alone() -> AloneRuns:
    """Cache the output of each request run alone, so that none runs alone twice."""
    return AloneRuns()


@pytest.fixture(autouse=True)
def _drafts_begin_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time few steps before the first drafts, as in long steps: cases are short."""
    monkeypatch.setattr("quire.scheduler.speculation.plain_steps.SETTLING_MS", 0.0)

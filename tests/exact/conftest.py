"""The models of the exact tests: two tiny shapes, each in both dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.program.ops import DType
from tests.exact.rig import AloneRuns, Model
from tests.tiny_models import write_tiny_llama

VOCAB_SIZE = 307


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """One KV head and odd widths; grouped heads, tied and with scaled angles."""
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
    made = [Model(folder, dtype) for folder in (odd, scaled) for dtype in (DType.F32, DType.BF16)]
    yield made
    for model in made:
        model.close()


@pytest.fixture(scope="session")
def alone() -> AloneRuns:
    """What requests get alone; no request is run alone twice."""
    return AloneRuns()

"""Rotary frequencies against transformers, kind by kind (marked `parity`: needs torch).

Where transformers recomputes them from each sequence's length, it gets a sequence of the served
length: there both must agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.models.registry import open_model
from quire.models.rope import rope_spec
from quire.models.spec import ModelSpec
from tests.models import cases_phi3
from tests.models.generate import EXECUTORS, executor_of, logits_of
from tests.models.record import relative_error, transformers_logits
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.parity

WITHIN_A_BIT = 3e-7  # and one for PyTorch, with a power that is sometimes off by one
LONG = [1.25, 2.5, 3.75, 5.0, 6.25, 7.5]
SHORT = [1.0, 1.01, 1.03, 1.1, 1.2, 1.4]


def written(folder: Path, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(tiny_config(**changes)))
    return open_model(folder)


def phi3(folder: Path, **changes: Any) -> ModelSpec:
    phi = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        "head_dim": None,
        "pad_token_id": 3,
    }
    return written(folder, **(phi | changes))


def agree(ours: Any, frequencies: Any, scale: float) -> None:
    np.testing.assert_allclose(ours.inv_freq, frequencies.numpy(), rtol=WITHIN_A_BIT, atol=0)
    assert ours.attention_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("length", [2, 64, 65, 512])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 80, "partial_rotary_factor": 0.75},
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": SHORT,
                "long_factor": LONG,
                "attention_factor": 1.5,
                "factor": 3.0,
            }
        },
    ],
    ids=["plain", "partial", "factors"],
)
def test_longrope_of_the_served_length_matches_a_sequence_of_that_length(
    changes: dict[str, Any], length: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    spec = phi3(tmp_path, **changes)
    theirs = Phi3RotaryEmbedding(Phi3Config.from_pretrained(tmp_path))
    theirs(torch.zeros(1), torch.arange(length)[None])
    assert spec.rotary is not None
    ours = rope_spec(spec.rotary.full, spec.attention.head_dim, length)
    agree(ours, theirs.inv_freq, theirs.attention_scaling)


@pytest.mark.parametrize("length", [1, 511, 512, 513, 700, 1100, 1280])
def test_dynamic_rope_of_the_served_length_matches_a_sequence_of_that_length(
    length: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = written(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.5})
    assert spec.max_positions == 1280
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    theirs(torch.zeros(1), torch.arange(length)[None])
    assert spec.rotary is not None
    agree(
        rope_spec(spec.rotary.full, spec.attention.head_dim, length),
        theirs.inv_freq,
        theirs.attention_scaling,
    )


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
def test_gemma_3_rotates_its_two_types_of_layers_as_transformers(
    scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    spec = written(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_act=None,
        mlp_bias=None,
        num_hidden_layers=7,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=scaling,
        sliding_window=16,
    )
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig.from_pretrained(tmp_path))
    assert spec.rotary is not None
    assert spec.rotary.windowed is not None
    everywhere = rope_spec(spec.rotary.full, spec.attention.head_dim, 512)
    agree(everywhere, theirs.full_attention_inv_freq, theirs.full_attention_attention_scaling)
    windowed = rope_spec(spec.rotary.windowed, spec.attention.head_dim, 512)
    agree(windowed, theirs.sliding_attention_inv_freq, theirs.sliding_attention_attention_scaling)


@pytest.mark.parametrize("kind", EXECUTORS)
def test_longrope_served_at_its_original_length_uses_the_short_list(
    kind: str, tmp_path: Path
) -> None:
    """The model has 512 positions; 64 are served, and each row matches transformers."""
    pytest.importorskip("torch")
    case = next(case for case in cases_phi3.CASES if case.name == "phi3_longrope_long")
    folder, token_ids = case.write(tmp_path), case.token_ids[:64]
    right = transformers_logits(folder, token_ids)
    for served, agrees in ((64, True), (65, False), (512, False)):
        executor = executor_of(open_model(folder), folder, kind=kind, served=served)
        found = logits_of(executor, token_ids, max_positions=64, chunk=37)
        error = relative_error(found, right)
        assert (error <= 1e-4) == agrees, served
        assert agrees or error > 0.01

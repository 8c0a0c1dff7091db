"""Mistral's configuration: published checkpoints open; unsupported settings are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program
from quire.program.ops import Attention
from quire.program.tensors import DType
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
MISTRAL_7B_V01: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_7B_V03 = MISTRAL_7B_V01 | {
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.42.0.dev0",
    "vocab_size": 32768,
}
MISTRAL_NEMO = MISTRAL_7B_V03 | {
    "_name_or_path": "mistralai/Mistral-Nemo-Base-2407",
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 128000,
    "num_hidden_layers": 40,
    "transformers_version": "4.43.3",
    "vocab_size": 131072,
}
MINISTRAL_8B = MISTRAL_7B_V03 | {
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "rope_theta": 100000000.0,
    "sliding_window": 32768,
    "transformers_version": "4.46.0.dev0",
    "vocab_size": 131072,
}
DEVSTRAL_SMALL = {
    key: value
    for key, value in MISTRAL_NEMO.items()
    if key not in ("_name_or_path", "rope_theta", "torch_dtype")
} | {
    "dtype": "bfloat16",
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "pad_token_id": 11,
    "rope_parameters": {"rope_theta": 1000000000.0, "rope_type": "default"},
    "transformers_version": "5.10.2",
    "unsloth_version": "2025.12.5",
}
GENERATION: dict[str, Any] = {
    "_from_model_config": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "transformers_version": "4.34.0.dev0",
}


@pytest.mark.parametrize(
    ("config", "windows", "head_dim", "theta"),
    [
        (MISTRAL_7B_V01, (4096,) * 32, 128, 1e4),
        (MISTRAL_7B_V03, (), 128, 1e6),
        (MISTRAL_NEMO, (), 128, 1e6),
        (MINISTRAL_8B, (32768,) * 36, 128, 1e8),
        (DEVSTRAL_SMALL, (), 128, 1e9),
    ],
    ids=["7b_v0.1", "7b_v0.3", "nemo", "ministral_8b", "devstral"],
)
def test_published_checkpoints_open(
    config: dict[str, Any], windows: tuple[int, ...], head_dim: int, theta: float, tmp_path: Path
) -> None:
    spec = opened(tmp_path, config, GENERATION)
    assert spec.attention.windows == windows
    assert spec.attention.head_dim == head_dim
    assert spec.rotary is not None
    assert spec.rotary.full.theta == theta
    assert (spec.dtype, spec.generation.eos_ids, spec.head.is_tied) == ("bf16", (2,), False)
    program = build_program(spec, dtype=DType.BF16, max_positions=4096)
    attention = [op for op in program.segments["trunk"] if isinstance(op, Attention)]
    assert tuple(op.window for op in attention) == (windows or (0,) * spec.num_layers)


def test_an_absent_window_is_the_default_one(tmp_path: Path) -> None:
    assert opened(tmp_path, MISTRAL_7B_V01, sliding_window=None).attention.windows == (4096,) * 32
    assert opened(tmp_path, MISTRAL_7B_V03).attention.windows == ()  # null is none


def test_a_ministral_has_windows_according_to_its_layer_types(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"] * 18
    config = MINISTRAL_8B | {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
    assert opened(tmp_path, config | {"layer_types": types}).attention.windows == (0, 32768) * 18
    assert opened(tmp_path, config).attention.windows == (32768,) * 36
    assert opened(tmp_path, config | {"sliding_window": None}).attention.windows == ()


def test_layer_types_equal_to_the_default_are_accepted(tmp_path: Path) -> None:
    windowed = opened(tmp_path, MISTRAL_7B_V01 | {"layer_types": ["sliding_attention"] * 32})
    assert windowed.attention.windows == (4096,) * 32
    plain = opened(tmp_path, MISTRAL_7B_V03 | {"layer_types": ["full_attention"] * 32})
    assert plain.attention.windows == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 0}, "sliding_window is 0; a whole number from 1"),
        ({"sliding_window": "4096"}, 'sliding_window is "4096"'),
        ({"layer_types": ["full_attention"] * 32}, "make it a MinistralForCausalLM"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"attention_bias": True}, "unknown key 'attention_bias'"),
        ({"model_type": "mixtral"}, "MistralForCausalLM needs 'mistral'"),
    ],
)
def test_unsupported_settings_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, MISTRAL_7B_V01, **changes)

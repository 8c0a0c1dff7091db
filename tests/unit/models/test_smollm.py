"""SmolLM 1, 2 and 3: published configurations open; unsupported settings are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program
from quire.program.ops import Rope
from quire.program.tensors import DType
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
SMOLLM2_135M_INSTRUCT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
SMOLLM_135M = SMOLLM2_135M_INSTRUCT | {
    "_name_or_path": "smollm-135M",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "rope_theta": 10000.0,
}
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
SMOLLM3_GENERATION: dict[str, Any] = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": 128012,
    "pad_token_id": 128004,
    "temperature": 0.6,
    "top_p": 0.95,
    "transformers_version": "4.54.0.dev0",
}


@pytest.mark.parametrize(
    ("config", "theta"), [(SMOLLM_135M, 1e4), (SMOLLM2_135M_INSTRUCT, 1e5)], ids=["1", "2"]
)
def test_smollm_1_and_2_are_llamas(config: dict[str, Any], theta: float, tmp_path: Path) -> None:
    spec = opened(tmp_path, config)
    assert (spec.architecture, spec.attention.head_dim, spec.head.is_tied) == (
        "LlamaForCausalLM",
        64,
        True,
    )
    assert spec.rotary is not None
    assert spec.rotary.full.theta == theta


def test_smollm_3_has_no_rope_in_every_fourth_layer(tmp_path: Path) -> None:
    spec = opened(tmp_path, SMOLLM3_3B, SMOLLM3_GENERATION)
    assert spec.rotary.unrotated_layers == frozenset(range(3, 36, 4))
    assert (spec.attention.head_dim, spec.head.is_tied, spec.attention.windows) == (128, True, ())
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    rotations = [op for op in program.segments["trunk"] if isinstance(op, Rope)]
    assert len(rotations) == 2 * 27


def test_smollm_3_with_yarn_has_the_context_of_its_card(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}
    assert opened(tmp_path, SMOLLM3_3B | {"rope_scaling": yarn}).max_positions == 131072


def test_the_interval_is_used_without_a_list(tmp_path: Path) -> None:
    spec = opened(tmp_path, SMOLLM3_3B, no_rope_layers=None, no_rope_layer_interval=12)
    assert spec.rotary.unrotated_layers == {11, 23, 35}
    spec = opened(tmp_path, SMOLLM3_3B, no_rope_layers=None, no_rope_layer_interval=None)
    assert spec.rotary.unrotated_layers == frozenset(range(3, 36, 4))


def test_theta_has_its_own_default(tmp_path: Path) -> None:
    spec = opened(tmp_path, SMOLLM3_3B, rope_theta=None)
    assert spec.rotary is not None
    assert spec.rotary.full.theta == 2e6


def test_windows_are_those_of_layers_without_rope_or_of_layer_types(tmp_path: Path) -> None:
    windowed = SMOLLM3_3B | {"use_sliding_window": True, "sliding_window": 512}
    spec = opened(tmp_path, windowed, layer_types=None)
    assert spec.attention.windows == (0, 0, 0, 512) * 9
    types = ["sliding_attention"] * 4 + ["full_attention"] * 32
    assert (
        opened(tmp_path, windowed | {"layer_types": types}).attention.windows
        == (512,) * 4 + (0,) * 32
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"no_rope_layers": [1, 0]}, "for each of num_hidden_layers 36"),
        ({"no_rope_layers": [2] * 36}, "a list of a 1 (rotated) or 0"),
        ({"no_rope_layers": [True] * 36}, "a list of a 1 (rotated) or 0"),
        ({"no_rope_layers": "1110"}, 'no_rope_layers is "1110"'),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ({"layer_types": ["sliding_attention"] * 36}, "no layer may have a window"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"odd": 1}, "unknown key 'odd'"),
    ],
)
def test_unsupported_settings_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, SMOLLM3_3B, **changes)

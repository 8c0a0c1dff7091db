"""StableLM's configurations: published checkpoints open; unsupported settings are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program
from quire.program.ops import Norm
from quire.program.tensors import DType
from tests.unit.models.config_folder import opened, refused

# Sizes as published, keys as in files of that time.
STABLELM_2_1_6B: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"],
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "model_type": "stablelm",
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.38.0",
    "use_cache": True,
    "use_qkv_bias": True,
    "vocab_size": 100352,
}
ZEPHYR_3B = STABLELM_2_1_6B | {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_heads": 32,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
    "use_qkv_bias": False,
    "vocab_size": 50304,
}


@pytest.mark.parametrize(
    ("config", "head_dim", "biased"),
    [(STABLELM_2_1_6B, 64, True), (ZEPHYR_3B, 80, False)],
    ids=["2-1.6b", "zephyr-3b"],
)
def test_published_checkpoints_open(
    config: dict[str, Any], head_dim: int, biased: bool, tmp_path: Path
) -> None:
    spec = opened(tmp_path, config)
    assert (spec.attention.head_dim, spec.attention.qkv_bias, spec.attention.output_bias) == (
        head_dim,
        biased,
        False,
    )
    assert (spec.norm.form, spec.norm.has_bias, spec.max_positions) == ("layer", True, 4096)
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    norms = [op for ops in program.segments.values() for op in ops if isinstance(op, Norm)]
    assert {op.form for op in norms} == {"layer"}
    assert {"model.layers.0.input_layernorm.bias", "model.norm.bias"} <= set(
        program.source_shapes()
    )
    assert ("layers.0.qkv.bias" in program.weights) == biased


def test_rope_covers_a_quarter_of_a_head_by_default(tmp_path: Path) -> None:
    quiet = {key: ZEPHYR_3B[key] for key in ZEPHYR_3B if key != "partial_rotary_factor"}
    spec = opened(tmp_path, quiet)
    assert spec == opened(tmp_path, ZEPHYR_3B)
    assert spec.rotary is not None
    assert spec.rotary.full.rotary_share == 0.25
    whole = opened(tmp_path, quiet, partial_rotary_factor=1.0)
    assert whole.rotary is not None
    assert whole.rotary.full.rotary_share == 1.0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("qk_layernorm", True, "norms on queries and keys are not supported"),
        ("use_parallel_residual", True, "halves side by side are not supported"),
        ("num_heads", 16, "num_heads is 16: it must agree with num_attention_heads"),
        ("head_dim", 80, "it is hidden_size / num_attention_heads"),
        ("rms_norm_eps", 1e-6, "unknown key 'rms_norm_eps'"),
        ("use_qkv_bias", "yes", "use_qkv_bias is"),
        ("model_type", "stablelm_epoch", "StableLmForCausalLM needs 'stablelm'"),
    ],
)
def test_unsupported_settings_are_rejected(key: str, value: Any, said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, ZEPHYR_3B, **{key: value})

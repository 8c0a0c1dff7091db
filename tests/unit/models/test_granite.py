"""Granite's configuration: published checkpoints open; unsupported settings are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program
from quire.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    GenerationSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSettings,
    RotarySpec,
)
from quire.program.ops import Scale
from quire.program.tensors import DType
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
GRANITE_2B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0",
    "use_cache": True,
    "vocab_size": 49159,
}
GRANITE_8B = GRANITE_2B | {
    "attention_multiplier": 0.0078125,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
}
GRANITE_GENERATION: dict[str, Any] = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "transformers_version": "4.49.0",
}


def test_granite_2b_is_a_llama_with_four_multipliers(tmp_path: Path) -> None:
    assert opened(tmp_path, GRANITE_2B, GRANITE_GENERATION) == ModelSpec(
        architecture="GraniteForCausalLM",
        vocab_size=49159,
        hidden_size=2048,
        mlp=MlpSpec(size=8192, activation="silu"),
        num_layers=40,
        attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.015625),
        norm=NormSpec(eps=1e-5),
        max_positions=131072,
        rotary=RotarySpec(full=RopeSettings(theta=1e7)),
        head=HeadSpec(is_tied=True, scale=0.125),
        dtype="bf16",
        generation=GenerationSpec(bos_ids=(0,), eos_ids=(0,)),
        embedding=EmbeddingSpec(scale=12.0),
        residual_scale=0.22,
    )


def test_granite_8b_scales_scores_and_logits_by_half_as_much(tmp_path: Path) -> None:
    spec = opened(tmp_path, GRANITE_8B, GRANITE_GENERATION)
    assert (spec.attention.scale, spec.head.scale, spec.attention.head_dim) == (
        0.0078125,
        0.0625,
        128,
    )


def test_absent_multipliers_are_one(tmp_path: Path) -> None:
    keys = ("attention", "embedding", "residual")
    absent: dict[str, Any] = {f"{key}_multiplier": None for key in keys}
    spec = opened(tmp_path, GRANITE_2B, logits_scaling=None, **absent)
    scales = (spec.attention.scale, spec.embedding.scale, spec.residual_scale, spec.head.scale)
    assert scales == (1.0, 1.0, 1.0, 1.0)
    program = build_program(spec, dtype=DType.F32, max_positions=10)
    assert not any(isinstance(op, Scale) for ops in program.segments.values() for op in ops)


def test_each_sublayer_is_scaled_before_it_is_added(tmp_path: Path) -> None:
    program = build_program(opened(tmp_path, GRANITE_2B), dtype=DType.F32, max_positions=10)
    trunk = [op.factor for op in program.segments["trunk"] if isinstance(op, Scale)]
    head = [op.factor for op in program.segments["head"] if isinstance(op, Scale)]
    assert trunk == [12.0] + [0.22] * 80
    assert head == [0.125]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logits_scaling", 0),
        ("logits_scaling", -8.0),
        ("attention_multiplier", "x"),
        ("embedding_multiplier", 1e300),
        ("residual_multiplier", True),
        ("num_local_experts", 32),
        ("position_embedding_type", "nope"),
        ("layer_types", ["mamba"]),
    ],
)
def test_other_values_and_keys_of_granites_with_experts_are_rejected(
    key: str, value: Any, tmp_path: Path
) -> None:
    assert key in refused(tmp_path, GRANITE_2B, **{key: value})

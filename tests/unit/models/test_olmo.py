"""OLMo 2's and 3's configurations: published checkpoints open; the rest is rejected by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program
from quire.models.spec import (
    AttentionSpec,
    GenerationSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSettings,
    RotarySpec,
)
from quire.program.ops import Norm
from quire.program.tensors import DType
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
OLMO_2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "use_cache": True,
    "vocab_size": 100352,
}
OLMO_2_7B_INSTRUCT = OLMO_2_7B | {
    "_name_or_path": "allenai/open_instruct_dev",
    "torch_dtype": "bfloat16",
    "use_cache": False,
}
OLMO_2_1B = OLMO_2_7B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
}
OLMO_2_GENERATION: dict[str, Any] = {
    "_from_model_config": True,
    "eos_token_id": 100257,
    "pad_token_id": 100277,
    "transformers_version": "4.47.0.dev0",
}
YARN: dict[str, Any] = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
OLMO_3_7B = OLMO_2_7B | {
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": YARN,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "vocab_size": 100278,
}
SCALED = RopeSettings(
    kind="yarn",
    theta=500_000.0,
    factor=8.0,
    original_max_positions=8192,
    attention_factor=1.2079441541679836,
)


def kinds(spec: ModelSpec, dtype: DType) -> list[str]:
    """Return the kinds of operations of a layer's first half, from its input to the sum."""
    ops = build_program(spec, dtype=dtype, max_positions=10).segments["trunk"]
    names = [op.kind for op in ops]
    return names[1 : names.index("add") + 1]


# ---- published checkpoints


def test_olmo_2_1b_is_without_biases_and_untied(tmp_path: Path) -> None:
    assert opened(tmp_path, OLMO_2_1B, OLMO_2_GENERATION) == ModelSpec(
        architecture="Olmo2ForCausalLM",
        vocab_size=100352,
        hidden_size=2048,
        mlp=MlpSpec(size=8192, activation="silu"),
        num_layers=16,
        attention=AttentionSpec(num_heads=16, num_kv_heads=16, head_dim=128),
        norm=NormSpec(eps=1e-6),
        max_positions=4096,
        rotary=RotarySpec(full=RopeSettings(theta=500_000.0)),
        head=HeadSpec(is_tied=False),
        dtype="f32",
        generation=GenerationSpec(bos_ids=(), eos_ids=(100257,)),
    )


@pytest.mark.parametrize(
    ("config", "dtype"), [(OLMO_2_7B, "f32"), (OLMO_2_7B_INSTRUCT, "bf16")], ids=["base", "chat"]
)
def test_olmo_2_7b_opens(config: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    spec = opened(tmp_path, config, OLMO_2_GENERATION)
    assert (spec.num_layers, spec.attention.head_dim, spec.attention.windows, spec.dtype) == (
        32,
        128,
        (),
        dtype,
    )


def test_olmo_3_7b_scales_rope_of_full_attention_layers(tmp_path: Path) -> None:
    spec = opened(tmp_path, OLMO_3_7B)
    assert spec.attention.windows == (4096, 4096, 4096, 0) * 8
    assert (spec.rotary.full, spec.rotary.windowed) == (SCALED, RopeSettings(theta=500_000.0))


def test_an_olmo_3_saved_by_transformers_5_is_equal(tmp_path: Path) -> None:
    plain = {"rope_theta": 500000, "rope_type": "default"}
    by_layer = {"full_attention": YARN | {"rope_theta": 500000}, "sliding_attention": plain}
    changes: dict[str, Any] = {"rope_scaling": None, "rope_theta": None}
    saved = opened(tmp_path, OLMO_3_7B, rope_parameters=by_layer, **changes)
    assert saved == opened(tmp_path, OLMO_3_7B)


def test_an_olmo_3_without_layer_types_has_full_attention_in_every_fourth_layer(
    tmp_path: Path,
) -> None:
    absent: dict[str, Any] = {"layer_types": None, "sliding_window": None}
    assert opened(tmp_path, OLMO_3_7B, **absent) == opened(tmp_path, OLMO_3_7B)


# ---- the forward pass


def test_the_input_of_a_product_is_the_rounded_residual_stream(tmp_path: Path) -> None:
    spec = opened(tmp_path, OLMO_2_1B)
    half = ["linear", "norm", "norm", "rope", "rope", "store_kv", "attention", "linear", "norm"]
    assert kinds(spec, DType.F32) == [*half, "add"]
    assert kinds(spec, DType.BF16) == ["copy", *half, "add"]


def test_queries_and_keys_are_normed_over_all_their_heads(tmp_path: Path) -> None:
    spec = opened(tmp_path, OLMO_2_1B, num_key_value_heads=4)
    program = build_program(spec, dtype=DType.BF16, max_positions=10)
    norms = [op for op in program.segments["trunk"] if isinstance(op, Norm)][:2]
    assert [op.inputs[0].width for op in norms] == [2048, 512]
    assert program.source_shapes()["model.layers.0.self_attn.k_norm.weight"] == (512,)


# ---- rejections


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_qkv", 8.0), ("mlp_bias", False), ("sliding_window", 4096), ("layer_types", ["x"])],
)
def test_settings_olmo_2_does_not_have_are_rejected(key: str, value: Any, tmp_path: Path) -> None:
    assert key in refused(tmp_path, OLMO_2_1B, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["sliding_attention"]),
        ("layer_types", ["chunked_attention"] * 32),
        ("sliding_window", None),
        ("sliding_window", 0),
        ("rope_local_base_freq", 1e4),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
)
def test_invalid_windows_and_rope_of_an_olmo_3_are_rejected(
    key: str, value: Any, tmp_path: Path
) -> None:
    assert key in refused(tmp_path, OLMO_3_7B, **{key: value})

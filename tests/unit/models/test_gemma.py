"""The Gemmas' configurations: published checkpoints open; unsupported settings are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.models.registry import build_program, open_model
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
from quire.program.ops import Attention, Norm, Rope, Scale
from quire.program.program import Program
from quire.program.tensors import DType
from tests.cases import each_case
from tests.unit.models.published_configs import (
    CODEGEMMA_2B,
    GEMMA_2_2B_IT,
    GEMMA_2_9B,
    GEMMA_2_GENERATION,
    GEMMA_3_1B_IT,
    GEMMA_3_270M,
    GEMMA_3_GENERATION,
)

LINEAR = {"rope_type": "linear", "factor": 8.0}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Return the spec of `config` with changes (None drops a key)."""
    changed = {key: value for key, value in (config | changes).items() if value is not None}
    return read_exactly(folder, changed)


def read_exactly(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(folder)


def refused(folder: Path, config: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, config, **changes)
    return str(caught.value)


def windows_of(program: Program) -> list[int]:
    return [op.window for op in program.segments["trunk"] if isinstance(op, Attention)]


# ---- published checkpoints


def test_codegemma_is_a_llama_with_scaled_embeddings_and_norms_around_one(tmp_path: Path) -> None:
    spec = read_exactly(tmp_path, CODEGEMMA_2B)
    assert (spec.mlp.activation, spec.head.is_tied, spec.attention.head_dim) == (
        "gelu_tanh",
        True,
        256,
    )
    assert (spec.norm.offset, spec.embedding.scale) == (1.0, 2048**0.5)
    assert (spec.attention.windows, spec.attention.soft_cap, spec.head.soft_cap) == ((), 0.0, 0.0)


def test_gemma_2_2b_has_caps_and_a_window_on_every_second_layer(tmp_path: Path) -> None:
    assert read_exactly(tmp_path, GEMMA_2_2B_IT) == ModelSpec(
        architecture="Gemma2ForCausalLM",
        vocab_size=256000,
        hidden_size=2304,
        mlp=MlpSpec(size=9216, activation="gelu_tanh"),
        num_layers=26,
        attention=AttentionSpec(
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            windows=(4096, 0) * 13,
            scale=0.0625,
            soft_cap=50.0,
        ),
        norm=NormSpec(eps=1e-6, offset=1.0),
        max_positions=8192,
        rotary=RotarySpec(full=RopeSettings()),
        head=HeadSpec(is_tied=True, soft_cap=30.0),
        dtype="bf16",
        generation=GenerationSpec(bos_ids=(2,), eos_ids=(1, 107)),
        embedding=EmbeddingSpec(scale=48.0),
    )


def test_gemma_2_9b_names_its_window_twice(tmp_path: Path) -> None:
    spec = read_exactly(tmp_path, GEMMA_2_9B)
    assert (spec.num_layers, spec.attention.windows[:3], spec.dtype) == (42, (4096, 0, 4096), "f32")


def test_gemma_3_1b_has_full_attention_in_every_sixth_layer(tmp_path: Path) -> None:
    spec = read_exactly(tmp_path, GEMMA_3_1B_IT)
    assert spec.attention.windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert (spec.rotary.full, spec.rotary.windowed) == (
        RopeSettings(theta=1e6),
        RopeSettings(theta=1e4),
    )
    assert (spec.attention.soft_cap, spec.head.soft_cap) == (0.0, 0.0)
    assert (spec.attention.num_kv_heads, spec.generation.eos_ids, spec.max_positions) == (
        1,
        (1, 106),
        32768,
    )


def test_gemma_3_270m_lists_its_layers(tmp_path: Path) -> None:
    spec = read_exactly(tmp_path, GEMMA_3_270M)
    assert spec.attention.windows == ((512,) * 5 + (0,)) * 3
    assert (spec.hidden_size, spec.attention.head_dim, spec.attention.scale) == (640, 256, 0.0625)


def test_a_gemma_3_written_by_transformers_5_is_equal(tmp_path: Path) -> None:
    parameters = {
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    old = {"rope_theta": None, "rope_local_base_freq": None, "torch_dtype": None}
    new = read(tmp_path, GEMMA_3_270M, rope_parameters=parameters, dtype="bfloat16", **old)
    assert new == read_exactly(tmp_path, GEMMA_3_270M)


@pytest.mark.parametrize(
    ("config", "generation", "eos_ids", "defaults"),
    [
        (GEMMA_2_2B_IT, GEMMA_2_GENERATION, (1, 107), {}),
        (GEMMA_3_1B_IT, GEMMA_3_GENERATION, (1, 106), {"top_k": 64, "top_p": 0.95}),
    ],
    ids=["gemma-2", "gemma-3"],
)
def test_the_published_defaults_for_sampling_are_honoured(
    config: dict[str, Any],
    generation: dict[str, Any],
    eos_ids: tuple[int, ...],
    defaults: dict[str, float],
    tmp_path: Path,
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = read_exactly(tmp_path, config)
    assert (spec.generation.eos_ids, spec.generation.defaults) == (eos_ids, defaults)


# ---- meaning of keys


def test_rope_scaling_applies_to_full_attention_layers_only(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_3_1B_IT, rope_scaling=LINEAR)
    assert spec.rotary.full == RopeSettings(kind="linear", theta=1e6, factor=8.0)
    assert spec.rotary.windowed == RopeSettings(theta=1e4)
    by_layer = {
        "full_attention": LINEAR | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4},
    }
    without = {"rope_theta": None, "rope_local_base_freq": None, "rope_scaling": None}
    spec = read(tmp_path, GEMMA_3_1B_IT, rope_parameters=by_layer, **without)
    assert spec.rotary.full == RopeSettings(kind="linear", theta=5e5, factor=8.0)
    assert spec.rotary.windowed == RopeSettings(kind="linear", theta=2e4, factor=2.0)
    half = {"full_attention": {"rope_type": "default"}}
    spec = read(tmp_path, GEMMA_3_1B_IT, rope_parameters=half, **without)
    assert (spec.rotary.full, spec.rotary.windowed) == (
        RopeSettings(theta=1e6),
        RopeSettings(theta=1e4),
    )


def test_absent_keys_have_the_defaults_of_transformers_and_null_caps_are_off(
    tmp_path: Path,
) -> None:
    optional = (
        "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "head_dim",
        "hidden_act", "hidden_activation", "query_pre_attn_scalar", "rope_theta",
    )  # fmt: skip
    assert read(tmp_path, GEMMA_2_2B_IT, **dict.fromkeys(optional)) == read_exactly(
        tmp_path, GEMMA_2_2B_IT
    )
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = read_exactly(tmp_path, GEMMA_2_2B_IT | caps)
    assert (spec.attention.soft_cap, spec.head.soft_cap) == (0.0, 0.0)
    optional = ("rope_local_base_freq", "rope_theta", "sliding_window_pattern", "head_dim")
    assert read(tmp_path, GEMMA_3_1B_IT, **dict.fromkeys(optional)) == read_exactly(
        tmp_path, GEMMA_3_1B_IT
    )


def test_layer_types_may_put_windows_anywhere(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    for config in (GEMMA_2_2B_IT, GEMMA_3_1B_IT):
        spec = read(tmp_path, config, num_hidden_layers=3, layer_types=types, sliding_window=7)
        assert spec.attention.windows == (0, 7, 7)
        program = build_program(spec, dtype=DType.F32, max_positions=100)
        assert windows_of(program) == [0, 7, 7]
    spec = read(tmp_path, GEMMA_3_1B_IT, layer_types=["full_attention"] * 26, sliding_window=None)
    assert spec.attention.windows == ()


def test_a_pattern_of_another_length_is_followed(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_3_1B_IT, num_hidden_layers=5, sliding_window_pattern=2)
    assert spec.attention.windows == (512, 0, 512, 0, 512)
    assert read(tmp_path, GEMMA_3_1B_IT, sliding_window_pattern=1).attention.windows == ()


def test_layers_with_a_window_have_their_own_rope_base(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_3_1B_IT, num_hidden_layers=6)
    trunk = build_program(spec, dtype=DType.F32, max_positions=64).segments["trunk"]
    ropes = [op.rope for op in trunk if isinstance(op, Rope)]
    assert ropes == [1, 1] * 5 + [0, 0]


def test_each_sublayer_has_a_norm_before_and_after_it(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_2_2B_IT, num_hidden_layers=1)
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    norms = [
        (op.weight, len(op.inputs)) for op in program.segments["trunk"] if isinstance(op, Norm)
    ]
    assert norms == [
        ("layers.0.input_layernorm", 1),
        ("layers.0.post_attention_layernorm", 1),
        ("layers.0.pre_feedforward_layernorm", 2),
        ("layers.0.post_feedforward_layernorm", 1),
    ]
    assert {program.weights[name].offset for name, _ in norms} == {1.0}


@pytest.mark.parametrize(("dtype", "factor"), [(DType.F32, 640**0.5), (DType.BF16, 25.25)])
def test_embeddings_are_scaled_by_a_factor_of_the_computing_dtype(
    dtype: DType, factor: float, tmp_path: Path
) -> None:
    spec = read_exactly(tmp_path, GEMMA_3_270M)
    trunk = build_program(spec, dtype=dtype, max_positions=64).segments["trunk"]
    (scale,) = (op for op in trunk if isinstance(op, Scale))
    assert scale.factor == pytest.approx(factor, rel=1e-7)


# ---- rejections


@each_case(
    ("config", "changes", "said"),
    [
        (CODEGEMMA_2B, {"hidden_act": "silu"}, 'hidden_act is "silu"; one of gelu_pytorch_tanh'),
        (CODEGEMMA_2B, {"hidden_activation": "relu"}, 'hidden_activation is "relu"'),
        (CODEGEMMA_2B, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (CODEGEMMA_2B, {"use_bidirectional_attention": True}, "a model that sees ahead"),
        (CODEGEMMA_2B, {"sliding_window": 9}, "unknown key 'sliding_window'"),
        (GEMMA_2_9B, {"sliding_window_size": 512}, "it must agree with sliding_window"),
        (GEMMA_2_9B, {"sliding_window": None}, "sliding_window is missing"),
        (GEMMA_2_9B, {"layer_types": ["full_attention"]}, "num_hidden_layers 42 entries"),
        (GEMMA_2_9B, {"layer_types": ["other"] * 42}, "each 'sliding_attention' or"),
        (GEMMA_2_9B, {"layer_types": [[]] * 42}, "each 'sliding_attention' or"),
        (GEMMA_2_9B, {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; a number"),
        (GEMMA_2_9B, {"final_logit_softcapping": "30"}, 'final_logit_softcapping is "30"'),
        (GEMMA_2_9B, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        (GEMMA_2_9B, {"auto_map": []}, "auto_map is []"),
        (GEMMA_2_9B, {"rope_local_base_freq": 1e4}, "unknown key 'rope_local_base_freq'"),
        (GEMMA_3_1B_IT, {"attn_logit_softcapping": 50.0}, "Gemma 3 has no cap on scores"),
        (GEMMA_3_1B_IT, {"_sliding_window_pattern": 5}, "it must agree with sliding_window_patt"),
        (GEMMA_3_1B_IT, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA_3_1B_IT, {"rope_parameters": LINEAR, "rope_theta": None}, "unknown key 'rope_type'"),
        (
            GEMMA_3_1B_IT,
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
            "rope_theta is 1e+06 at the top and 5 in full_attention",
        ),
        (
            GEMMA_3_1B_IT,
            {"rope_parameters": {}, "rope_scaling": LINEAR},
            "rope_scaling and rope_parameters are both given",
        ),
        (GEMMA_3_270M, {"use_bidirectional_attention": True}, "a model that sees ahead"),
        (GEMMA_3_270M, {"model_type": "gemma3"}, 'model_type is "gemma3"'),
    ],
)
def test_unsupported_settings_are_rejected(
    config: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, config, **changes)

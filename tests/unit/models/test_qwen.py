"""Qwen's configurations: published checkpoints open; unsupported settings are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program
from quire.program.ops import Embed, Linear, Norm, Rope
from quire.program.tensors import DType
from tests.cases import each_case
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
QWEN2_5_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_5_05B_GENERATION: dict[str, Any] = {
    "bos_token_id": 151643,
    "do_sample": False,
    "eos_token_id": 151643,
    "max_new_tokens": 2048,
    "transformers_version": "4.37.0",
}
QWEN2_5_7B_INSTRUCT: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2_5_7B_GENERATION: dict[str, Any] = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
QWEN3_GENERATION: dict[str, Any] = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def test_qwen_2_5_of_half_a_billion_opens(tmp_path: Path) -> None:
    spec = opened(tmp_path, QWEN2_5_05B, QWEN2_5_05B_GENERATION)
    assert (spec.attention.head_dim, spec.attention.num_kv_heads, spec.head.is_tied) == (
        64,
        2,
        True,
    )
    assert (spec.attention.qkv_bias, spec.attention.output_bias, spec.attention.head_norms) == (
        True,
        False,
        False,
    )
    assert (spec.attention.windows, spec.max_positions) == ((), 32768)
    assert spec.generation.defaults == {"temperature": 0.0, "max_new_tokens": 2048}
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    assert {"layers.0.qkv.bias", "layers.23.qkv.bias"} <= set(program.weights)
    assert "layers.0.o.bias" not in program.weights


def test_qwen_2_5_instruct_opens_with_and_without_yarn(tmp_path: Path) -> None:
    spec = opened(tmp_path, QWEN2_5_7B_INSTRUCT, QWEN2_5_7B_GENERATION)
    assert (spec.generation.eos_ids, spec.max_positions) == ((151645, 151643), 32768)
    assert spec.generation.defaults["repetition_penalty"] == 1.05
    long = opened(tmp_path, QWEN2_5_7B_INSTRUCT | {"rope_scaling": YARN})
    assert long.max_positions == 131072  # as stated on its card


@pytest.mark.parametrize("config", [QWEN3_06B, QWEN3_8B], ids=["0.6b", "8b"])
def test_qwen_3_opens(config: dict[str, Any], tmp_path: Path) -> None:
    spec = opened(tmp_path, config, QWEN3_GENERATION)
    assert (spec.attention.head_dim, spec.attention.qkv_bias, spec.attention.head_norms) == (
        128,
        False,
        True,
    )
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    kinds = [type(op) for op in program.segments["trunk"][:6]]
    assert kinds == [Embed, Norm, Linear, Norm, Norm, Rope]
    grouped = [op.group for op in program.segments["trunk"][:5] if isinstance(op, Norm)]
    assert grouped == [0, 128, 128]
    yarn = opened(tmp_path, config | {"rope_scaling": YARN | {"rope_type": "yarn"}})
    assert yarn.max_positions == 131072


def test_qwen_3_saved_by_a_newer_library_opens(tmp_path: Path) -> None:
    types = ["full_attention"] * 28
    newer = {key: value for key, value in QWEN3_06B.items() if key not in ("torch_dtype",)}
    newer |= {"dtype": "float16", "layer_types": types, "transformers_version": "4.57.6"}
    assert opened(tmp_path, newer).attention.windows == ()


@pytest.mark.parametrize("config", [QWEN2_5_7B_INSTRUCT, QWEN3_06B], ids=["2.5", "3"])
def test_windows_begin_at_a_layer_or_follow_layer_types(
    config: dict[str, Any], tmp_path: Path
) -> None:
    windowed = config | {"use_sliding_window": True, "sliding_window": 4096}
    spec = opened(tmp_path, windowed | {"max_window_layers": 21})
    assert spec.attention.windows == (0,) * 21 + (4096,) * 7
    assert opened(tmp_path, windowed | {"max_window_layers": 28}).attention.windows == ()
    types = ["sliding_attention", "full_attention"] * 14
    assert opened(tmp_path, windowed | {"layer_types": types}).attention.windows == (4096, 0) * 14
    assert opened(tmp_path, windowed | {"sliding_window": None}).attention.windows == ()


@each_case(
    ("config", "changes", "said"),
    [
        (
            QWEN2_5_7B_INSTRUCT,
            {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
            "attention in chunks, which the checkpoints for a million tokens use",
        ),
        (QWEN2_5_05B, {"use_mrope": True}, "angles of three axes are for pictures"),
        (QWEN2_5_05B, {"attention_bias": False}, "unknown key 'attention_bias'"),
        (QWEN2_5_05B, {"is_causal": False}, "unknown key 'is_causal'"),
        (QWEN2_5_05B, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (QWEN2_5_05B, {"use_sliding_window": 1}, "use_sliding_window is 1; true or false"),
        (QWEN3_06B, {"layer_types": ["sliding_attention"] * 28}, "no layer may have a window"),
        (QWEN3_06B, {"use_sliding_window": True, "sliding_window": -1}, "sliding_window is -1"),
        (QWEN3_06B, {"num_experts": 128}, "unknown key 'num_experts'"),
        (QWEN3_06B, {"model_type": "qwen2"}, "Qwen3ForCausalLM needs 'qwen3'"),
    ],
)
def test_unsupported_settings_are_rejected(
    config: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, config, **changes)

"""GPT-2's configuration: published checkpoints open; unsupported settings are rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.models.registry import build_program, open_model
from quire.models.spec import AttentionSpec, GenerationSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec
from quire.program.forms import NormForm
from quire.program.ops import Attention
from quire.program.tensors import DType
from tests.tiny_models import write_tiny
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
GPT2_GENERATION: dict[str, Any] = {
    "_from_model_config": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "transformers_version": "4.26.0.dev0",
}
DISTILGPT2 = GPT2 | {
    "_num_labels": 1,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "n_layer": 6,
}
GPT2_XL = GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}
# As transformers writes one today (a fine-tuned GPT-2).
SAVED_ANEW = GPT2 | {
    "add_cross_attention": False,
    "dtype": "float32",
    "n_inner": None,
    "pad_token_id": None,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "transformers_version": "5.0.0",
    "use_cache": True,
}
RINNA_MEDIUM = GPT2 | {
    "_name_or_path": "rinna/japanese-gpt2-medium",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "n_embd": 1024,
    "n_head": 16,
    "n_inner": 4096,
    "n_layer": 24,
    "scale_attn_weights": True,
    "transformers_version": "4.9.2",
    "use_cache": True,
    "vocab_size": 32000,
}


def tiny(**changes: Any) -> dict[str, Any]:
    """A config of three layers 30 wide."""
    return GPT2 | {
        "n_embd": 30,
        "n_head": 3,
        "n_layer": 3,
        "n_positions": 24,
        "vocab_size": 61,
        "bos_token_id": 0,
        "eos_token_id": 0,
    } | changes  # fmt: skip


# ---- published checkpoints


def test_gpt2_has_no_rope_and_1024_positions(tmp_path: Path) -> None:
    assert opened(tmp_path, GPT2, GPT2_GENERATION) == ModelSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=50257,
        hidden_size=768,
        mlp=MlpSpec(size=3072, activation="gelu_tanh", bias=True),
        num_layers=12,
        attention=AttentionSpec(
            num_heads=12, num_kv_heads=12, head_dim=64, qkv_bias=True, output_bias=True
        ),
        norm=NormSpec(eps=1e-5, form=NormForm.LAYER, has_bias=True),
        max_positions=1024,
        rotary=None,
        head=HeadSpec(is_tied=True),
        dtype="f32",
        generation=GenerationSpec(bos_ids=(50256,), eos_ids=(50256,)),
    )


def test_distilgpt2_has_half_the_layers(tmp_path: Path) -> None:
    spec = opened(tmp_path, DISTILGPT2, GPT2_GENERATION)
    assert replace(spec, num_layers=12) == opened(tmp_path, GPT2)
    assert spec.num_layers == 6


def test_gpt2_xl_has_25_heads_of_64(tmp_path: Path) -> None:
    spec = opened(tmp_path, GPT2_XL, GPT2_GENERATION)
    shape = (spec.num_layers, spec.attention.num_heads, spec.attention.head_dim, spec.mlp.size)
    assert shape == (48, 25, 64, 6400)


def test_a_gpt2_saved_by_transformers_5_is_equal(tmp_path: Path) -> None:
    assert opened(tmp_path, SAVED_ANEW) == opened(tmp_path, GPT2)


def test_a_japanese_gpt2_gives_its_inner_width(tmp_path: Path) -> None:
    spec = opened(tmp_path, RINNA_MEDIUM)
    assert (spec.mlp.size, spec.generation.bos_ids, spec.generation.eos_ids) == (4096, (1,), (2,))


# ---- meaning of keys


def test_attention_is_scaled_by_the_layer_if_configured(tmp_path: Path) -> None:
    spec = opened(tmp_path, tiny(scale_attn_by_inverse_layer_idx=True))
    program = build_program(spec, dtype=DType.F32, max_positions=24)
    scales = [op.scale for op in program.segments["trunk"] if isinstance(op, Attention)]
    assert scales == [10**-0.5, 10**-0.5 / 2, 10**-0.5 / 3]


def test_attention_can_be_left_unscaled(tmp_path: Path) -> None:
    assert opened(tmp_path, tiny(scale_attn_weights=False)).attention.scale == 1.0


def test_an_odd_head_width_is_accepted_without_rope(tmp_path: Path) -> None:
    assert opened(tmp_path, tiny(n_embd=33, n_head=3)).attention.head_dim == 11


def test_a_width_not_divisible_by_heads_is_rejected(tmp_path: Path) -> None:
    assert "n_embd is 31, not a multiple of n_head 3" in refused(tmp_path, tiny(n_embd=31))


@pytest.mark.parametrize("key", ["n_embd", "n_head", "n_layer", "n_positions", "vocab_size"])
def test_a_missing_number_is_named_as_in_gpt2(key: str, tmp_path: Path) -> None:
    assert f"{key} is missing" in refused(tmp_path, GPT2, **{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 1e4),
        ("num_key_value_heads", 2),
        ("head_dim", 64),
        ("hidden_size", 768),
        ("add_cross_attention", True),
        ("activation_function", "tanh"),
        ("n_inner", 0),
        ("scale_attn_weights", "yes"),
    ],
)
def test_settings_gpt2_does_not_have_are_rejected(key: str, value: Any, tmp_path: Path) -> None:
    assert key in refused(tmp_path, GPT2, **{key: value})


# ---- positions


def test_no_program_is_longer_than_the_learned_positions(tmp_path: Path) -> None:
    spec = opened(tmp_path, tiny())
    with pytest.raises(ConfigError, match="this model allows 1 to 24"):
        build_program(spec, dtype=DType.F32, max_positions=25)


def test_a_shorter_program_reads_the_same_tensors(tmp_path: Path) -> None:
    spec = open_model(write_tiny(tmp_path, tiny(), seed=1))
    short = build_program(spec, dtype=DType.F32, max_positions=7)
    assert short.source_shapes()["transformer.wpe.weight"] == (24, 30)


def test_products_are_stored_transposed(tmp_path: Path) -> None:
    shapes = build_program(
        opened(tmp_path, tiny()), dtype=DType.F32, max_positions=24
    ).source_shapes()
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (30, 90)
    assert shapes["transformer.h.0.attn.c_attn.bias"] == (90,)
    assert shapes["transformer.h.2.mlp.c_fc.weight"] == (30, 120)
    assert shapes["transformer.h.2.mlp.c_proj.weight"] == (120, 30)

"""StarCoder 2's configuration: a published checkpoint opens; the rest is rejected by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
from quire.program.forms import NormForm
from tests.unit.models.config_folder import opened, refused

# As published on the model hub.
STARCODER2_3B: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042195912175804,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}


def test_starcoder2_3b_has_layer_norms_biases_and_a_window(tmp_path: Path) -> None:
    assert opened(tmp_path, STARCODER2_3B) == ModelSpec(
        architecture="Starcoder2ForCausalLM",
        vocab_size=49152,
        hidden_size=3072,
        mlp=MlpSpec(size=12288, activation="gelu_tanh", bias=True),
        num_layers=30,
        attention=AttentionSpec(
            num_heads=24,
            num_kv_heads=2,
            head_dim=128,
            qkv_bias=True,
            output_bias=True,
            windows=(4096,) * 30,
        ),
        norm=NormSpec(eps=1e-5, form=NormForm.LAYER, has_bias=True),
        max_positions=16384,
        rotary=RotarySpec(full=RopeSettings(theta=999999.4420358813)),
        head=HeadSpec(is_tied=True),
        dtype="f32",
        generation=GenerationSpec(bos_ids=(0,), eos_ids=(0,)),
    )


@pytest.mark.parametrize("window", [None, 16384, 20000])
def test_a_window_longer_than_the_context_is_none(window: int | None, tmp_path: Path) -> None:
    assert opened(tmp_path, STARCODER2_3B, sliding_window=window).attention.windows == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_type", "rms_norm"), ("mlp_type", "gated"), ("rms_norm_eps", 1e-5), ("use_bias", 1)],
)
def test_settings_starcoder2_does_not_have_are_rejected(
    key: str, value: Any, tmp_path: Path
) -> None:
    assert key in refused(tmp_path, STARCODER2_3B, **{key: value})

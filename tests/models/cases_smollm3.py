"""Tiny SmolLM 3: layers without rope by list and by interval, with windows in those."""

from __future__ import annotations

from typing import Any

from tests.models.case import Case

SMOLLM3: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0,
    "no_rope_layer_interval": 4,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 21}
CASES = (
    Case("smollm3_interval", length=60, seed=61, base=SMOLLM3),
    Case("smollm3_list", {"no_rope_layers": [0, 1, 1, 0, 1]}, length=60, seed=62, base=SMOLLM3),
    Case(
        "smollm3_default_theta_untied",
        {"rope_theta": None, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
        seed=63,
        base=SMOLLM3,
    ),
    Case(
        "smollm3_windows",
        WINDOWED | {"no_rope_layers": [1, 0, 1, 0, 0]},
        length=110,
        seed=64,
        base=SMOLLM3,
    ),
    Case(
        "smollm3_biases",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
        seed=65,
        base=SMOLLM3,
    ),
    Case("smollm3_bf16", WINDOWED, length=110, seed=66, stored="bf16", base=SMOLLM3),
)

"""Tiny Qwens: biases of the second generation, head norms of the third, windows from a layer on."""

from __future__ import annotations

from typing import Any

from tests.models.case import Case

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 66,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_window_layers": 21,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "head_dim": 22,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 26,
    "hidden_size": 60,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 29}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
CASES = (
    Case("qwen2_tied", seed=41, base=QWEN2),
    Case(
        "qwen2_untied_mha",
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 6,
            "head_dim": None,
            "hidden_size": 84,
        },
        length=60,
        seed=42,
        base=QWEN2,
    ),
    Case("qwen2_windows", WINDOWED | {"max_window_layers": 1}, length=150, seed=43, base=QWEN2),
    Case("qwen2_layer_types", WINDOWED | {"layer_types": TYPES}, length=100, seed=44, base=QWEN2),
    Case("qwen2_yarn", {"rope_scaling": YARN}, length=200, seed=45, base=QWEN2),
    Case(
        "qwen2_bf16",
        WINDOWED | {"max_window_layers": 2},
        length=120,
        seed=46,
        stored="bf16",
        base=QWEN2,
    ),
    Case("qwen3_mqa", seed=51, base=QWEN3),
    Case(
        "qwen3_biases_untied",
        {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 5},
        length=60,
        seed=52,
        base=QWEN3,
    ),
    Case("qwen3_windows", WINDOWED | {"max_window_layers": 0}, length=150, seed=53, base=QWEN3),
    Case("qwen3_layer_types", WINDOWED | {"layer_types": TYPES}, length=100, seed=54, base=QWEN3),
    Case("qwen3_default_head_dim", {"head_dim": None}, seed=55, base=QWEN3),
    Case("qwen3_bf16", length=120, seed=156, stored="bf16", base=QWEN3),
)

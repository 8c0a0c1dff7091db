"""Tiny Mistrals: windows of odd lengths, shorter than a key group, of one position, or none.

Prompts are several windows long. Ministrals have a window in some layers only.
"""

from __future__ import annotations

from typing import Any

from tests.models.case import Case

MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 22,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 37,
    "tie_word_embeddings": False,
}
MINISTRAL = MISTRAL | {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CASES = (
    Case("mistral_window_37", length=200, seed=31, base=MISTRAL),
    Case("mistral_window_5", {"sliding_window": 5}, length=90, seed=32, base=MISTRAL),
    Case("mistral_window_1", {"sliding_window": 1}, length=60, seed=33, base=MISTRAL),
    Case("mistral_window_270", {"sliding_window": 270}, length=500, seed=34, base=MISTRAL),
    Case("mistral_no_window", {"num_key_value_heads": 1}, length=60, seed=35, base=MISTRAL),
    Case(
        "mistral_tied_theta",
        {
            "tie_word_embeddings": True,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "num_key_value_heads": 4,
            "hidden_size": 72,
            "head_dim": None,
        },
        length=130,
        seed=36,
        base=MISTRAL,
    ),
    Case("mistral_bf16", {"sliding_window": 19}, length=150, seed=37, stored="bf16", base=MISTRAL),
    Case("ministral_mixed_windows", length=150, seed=38, base=MINISTRAL),
    Case("ministral_bf16", length=150, seed=39, stored="bf16", base=MINISTRAL),
)

"""OLMo 2 and 3: norms after each sublayer and over whole queries; windows shorter than the
prompts.
"""

from __future__ import annotations

from tests.models.case import Case

BASE = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
OLMO3 = BASE | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "num_hidden_layers": 5,
    "rope_scaling": YARN,
    "sliding_window": 13,
}
BY_LAYER = {
    "full_attention": YARN | {"rope_theta": 70000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0},
}

CASES = (
    Case("olmo2_gqa", length=100, seed=81, base=BASE),
    Case(
        "olmo2_biases_tied",
        {
            "attention_bias": True,
            "head_dim": 16,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
        },
        length=60,
        seed=82,
        base=BASE,
    ),
    Case("olmo2_bf16", {"hidden_size": 72}, length=100, seed=83, stored="bf16", base=BASE),
    Case("olmo3_every_fourth", length=200, seed=84, base=OLMO3),
    Case(
        "olmo3_rope_parameters",
        {
            "layer_types": ["full_attention"] + ["sliding_attention"] * 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "rope_parameters": BY_LAYER,
            "rope_scaling": None,
            "rope_theta": None,
            "sliding_window": 29,
        },
        length=150,
        seed=85,
        base=OLMO3,
    ),
    Case("olmo3_bf16", length=120, seed=87, stored="bf16", base=OLMO3),
)

"""StableLM: layer norms, and rope on a part of each head, by default a quarter."""

from __future__ import annotations

from tests.models.case import Case

BASE = {
    "architectures": ["StableLmForCausalLM"],
    "model_type": "stablelm",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 120,
    "intermediate_size": 97,
    "layer_norm_eps": 1e-5,
    "num_attention_heads": 5,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "rope_theta": 10000.0,
    "use_qkv_bias": True,
}

CASES = (
    Case("stablelm_quarter", length=150, seed=111, base=BASE),
    Case(
        "stablelm_half_tied_mha",
        {
            "num_key_value_heads": 5,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
            "use_qkv_bias": False,
        },
        length=60,
        seed=112,
        base=BASE,
    ),
    Case(
        "stablelm_rope_parameters",
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 500.0,
                "factor": 2.0,
                "partial_rotary_factor": 0.75,
            },
        },
        length=60,
        seed=113,
        base=BASE,
    ),
    Case("stablelm_bf16", length=100, seed=114, stored="bf16", base=BASE),
)

"""Granite: four multipliers different from 1, with and without biases."""

from __future__ import annotations

from tests.models.case import Case

BASE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_multiplier": 0.11,
    "bos_token_id": 0,
    "embedding_multiplier": 3.3,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 66,
    "intermediate_size": 97,
    "logits_scaling": 7.0,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "residual_multiplier": 0.37,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}

CASES = (
    Case("granite_gqa_tied", length=200, seed=71, base=BASE),
    Case(
        "granite_biases_untied",
        {
            "attention_bias": True,
            "head_dim": None,
            "hidden_size": 60,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
        length=60,
        seed=72,
        base=BASE,
    ),
    Case(
        "granite_bf16",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
        length=100,
        seed=73,
        stored="bf16",
        base=BASE,
    ),
    Case(
        "granite_bf16_untied",
        {"mlp_bias": True, "num_key_value_heads": 6, "tie_word_embeddings": False},
        length=80,
        seed=74,
        stored="bf16",
        base=BASE,
    ),
)

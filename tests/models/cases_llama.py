"""Tiny Llamas: MHA, GQA and MQA; tied and untied heads; biases; rope scaling; activations; odd
sizes.

Each rope scaling is in its old and its new form, at lengths past the original one.
"""

from __future__ import annotations

from tests.models.case import Case

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES = (
    Case("mqa_untied"),
    Case("mha_untied", {"num_key_value_heads": 5, "head_dim": None}, seed=2),
    Case(
        "gqa_tied",
        {
            "hidden_size": 66,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 22,
            "tie_word_embeddings": True,
            "intermediate_size": 101,
        },
        seed=3,
    ),
    Case("biases", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 5}, seed=4),
    Case("long", {"num_hidden_layers": 3}, length=400, seed=5),
    Case("rope_linear", {"rope_scaling": {"type": "linear", "factor": 2.5}}, length=150, seed=6),
    Case(
        "rope_llama3",
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "head_dim": 32},
        length=300,
        seed=7,
    ),
    Case("rope_yarn", {"rope_scaling": YARN, "head_dim": 32}, length=200, seed=8),
    Case(
        "rope_yarn_mscale",
        {
            "rope_theta": None,
            "rope_parameters": YARN
            | {
                "rope_theta": 50000.0,
                "mscale": 1.3,
                "mscale_all_dim": 0.7,
                "truncate": False,
                "beta_fast": 24,
                "beta_slow": 2,
            },
            "head_dim": 32,
        },
        length=200,
        seed=9,
    ),
    Case(
        "rope_yarn_attention_factor",
        {"rope_scaling": YARN | {"attention_factor": 1.25}},
        length=100,
        seed=10,
    ),
    Case(
        "rope_parameters_llama3",
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
        length=300,
        seed=11,
    ),
    Case("gelu", {"hidden_act": "gelu"}, seed=12),
    Case("gelu_tanh", {"hidden_act": "gelu_pytorch_tanh"}, seed=13),
    Case("relu", {"hidden_act": "relu"}, seed=14),
    Case("stored_f16", seed=15, stored="f16"),
    Case("stored_bf16", {"num_hidden_layers": 4}, length=120, seed=16, stored="bf16"),
    Case(
        "stored_bf16_tied",
        {"tie_word_embeddings": True, "num_key_value_heads": 5, "rope_scaling": LLAMA3},
        length=200,
        seed=17,
        stored="bf16",
    ),
)

"""Tiny mixtures of experts: choices with and without normalized weights, dense layers between those
with experts, an expert that every token passes, inner widths that fill no panel."""

from __future__ import annotations

from typing import Any

from tests.models.case import Case

SIZES: dict[str, Any] = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
MIXTRAL = SIZES | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 45,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN2_MOE = SIZES | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 80,
    "intermediate_size": 97,
    "moe_intermediate_size": 37,
    "shared_expert_intermediate_size": 70,
    "num_experts": 12,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
}
QWEN3_MOE = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "intermediate_size": 97,
    "moe_intermediate_size": 33,
    "num_experts": 19,
    "num_experts_per_tok": 5,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
}
OLMOE = SIZES | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 80,
    "num_key_value_heads": 5,
    "intermediate_size": 41,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "clip_qkv": None,
}
DOTS1 = SIZES | {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "num_hidden_layers": 3,
    "intermediate_size": 97,
    "moe_intermediate_size": 35,
    "n_routed_experts": 24,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 6,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
}
CASES = (
    Case("mixtral", length=60, seed=301, base=MIXTRAL),
    Case("mixtral_window", {"sliding_window": 13}, length=60, seed=302, base=MIXTRAL),
    Case("mixtral_all_chosen", {"num_experts_per_tok": 8}, seed=303, base=MIXTRAL),
    Case("mixtral_bf16", length=100, seed=304, stored="bf16", base=MIXTRAL),
    Case("qwen2_moe", length=60, seed=311, base=QWEN2_MOE),
    Case(
        "qwen2_moe_dense_layers",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True},
        seed=312,
        base=QWEN2_MOE,
    ),
    Case("qwen2_moe_bf16", length=100, seed=313, stored="bf16", base=QWEN2_MOE),
    Case("qwen3_moe", length=60, seed=321, base=QWEN3_MOE),
    Case(
        "qwen3_moe_mlp_only",
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False},
        seed=322,
        base=QWEN3_MOE,
    ),
    Case(
        "qwen3_moe_many", {"num_experts": 130, "num_experts_per_tok": 8}, seed=323, base=QWEN3_MOE
    ),
    Case("qwen3_moe_bf16", length=100, seed=324, stored="bf16", base=QWEN3_MOE),
    Case("olmoe", length=60, seed=331, base=OLMOE),
    Case(
        "olmoe_gqa_normalized",
        {"num_key_value_heads": 1, "norm_topk_prob": True},
        seed=332,
        base=OLMOE,
    ),
    Case("dots1_groups", length=60, seed=341, base=DOTS1),
    Case(
        "dots1_windows",
        {
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 13,
            "max_window_layers": 1,
            "norm_topk_prob": False,
        },
        length=60,
        seed=342,
        base=DOTS1,
    ),
    Case("dots1_bf16", length=100, seed=345, stored="bf16", base=DOTS1),
    Case("olmoe_bf16", length=100, seed=333, stored="bf16", base=OLMOE),
)

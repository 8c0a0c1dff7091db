"""The Gemmas: scaled embeddings, norms around one, windows in every arrangement, effective soft
caps.

Windows are odd and much shorter than the prompts; head_dim is never hidden_size / heads; soft caps
are within the range of the random weights' scores and logits. One case has the 256 columns per head
of real models.
"""

from __future__ import annotations

from tests.models.case import Case

GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "pad_token_id": 3,
}
GEMMA2 = GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 24,
    "sliding_window": 13,
    "cache_implementation": "hybrid",
}
GEMMA3 = GEMMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 13,
}
UNTIED = {"tie_word_embeddings": False, "attention_bias": True}

CASES = (
    Case("gemma_mqa_tied", length=60, seed=41, base=GEMMA),
    Case("gemma_untied", UNTIED | {"num_key_value_heads": 5}, length=60, seed=42, base=GEMMA),
    Case("gemma_bf16", {"num_hidden_layers": 4}, length=100, seed=43, stored="bf16", base=GEMMA),
    Case("gemma2_caps", length=150, seed=44, base=GEMMA2),
    Case(
        "gemma2_untied",
        UNTIED
        | {
            "hidden_size": 66,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": 6.0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 29,
        },
        length=120,
        seed=45,
        base=GEMMA2,
    ),
    Case(
        "gemma2_default_caps",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 22},
        length=80,
        seed=46,
        base=GEMMA2,
    ),
    Case("gemma2_bf16", {"sliding_window": 37}, length=120, seed=47, stored="bf16", base=GEMMA2),
    Case("gemma3_mqa", length=150, seed=48, base=GEMMA3),
    Case(
        "gemma3_linear_wide_heads",
        {
            "hidden_size": 57,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "_sliding_window_pattern": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        length=120,
        seed=49,
        base=GEMMA3,
    ),
    Case(
        "gemma3_rope_parameters",
        UNTIED
        | {
            "num_hidden_layers": 5,
            "num_key_value_heads": 5,
            "final_logit_softcapping": 6.0,
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
            },
            "sliding_window": 35,
            "sliding_window_pattern": 2,
        },
        length=150,
        seed=50,
        base=GEMMA3,
    ),
    Case("gemma3_bf16", {"sliding_window": 37}, length=120, seed=51, stored="bf16", base=GEMMA3),
    Case(
        "gemma3_bf16_untied",
        UNTIED | {"num_hidden_layers": 6, "sliding_window_pattern": 3},
        length=120,
        seed=52,
        stored="bf16",
        base=GEMMA3,
    ),
)

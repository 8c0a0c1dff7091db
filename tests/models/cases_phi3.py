"""Phi-3: fused tensors, windows, longrope on both sides of the original length, partial rotation.

Original lengths are 64 to select the long list (sequences are longer) and the model's whole length
to select the short one. The name "su", which transformers no longer reads, is tested with the
readers.
"""

from __future__ import annotations

from tests.models.case import Case

BASE = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "original_max_position_embeddings": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "pad_token_id": 3,
}
SHORT_FACTORS = [1.0, 1.05, 1.1, 1.3, 1.6, 2.0]
LONG_FACTORS = [1.1, 1.8, 3.3, 6.0, 11.0, 20.5]
LONGROPE = {"type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}

CASES = (
    Case("phi3_mqa_window", {"head_dim": 16, "sliding_window": 21}, length=150, seed=31, base=BASE),
    Case(
        "phi3_longrope_long",
        {"num_key_value_heads": 5, "rope_scaling": LONGROPE},
        length=200,
        seed=32,
        base=BASE,
    ),
    Case(
        "phi3_longrope_short",
        {"original_max_position_embeddings": 512, "rope_scaling": LONGROPE | {"factor": 8.0}},
        length=200,
        seed=33,
        base=BASE,
    ),
    Case(
        "phi3_partial_tied",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
            "tie_word_embeddings": True,
            "sliding_window": 262144,
        },
        length=100,
        seed=34,
        base=BASE,
    ),
    Case(
        "phi3_rope_parameters",
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 50000.0,
                "short_factor": SHORT_FACTORS,
                "long_factor": LONG_FACTORS,
                "attention_factor": 1.4,
                "partial_rotary_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_window": 37,
        },
        length=150,
        seed=35,
        base=BASE,
    ),
    Case(
        "phi3_bf16",
        {"num_key_value_heads": 5, "rope_scaling": LONGROPE, "sliding_window": 50},
        length=130,
        seed=36,
        stored="bf16",
        base=BASE,
    ),
)

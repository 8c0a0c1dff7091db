"""OPT: pre- and post-norm, narrow embeddings, no optional tensors.

Prompts end at the last learned position, which is the table's last row.
"""

from __future__ import annotations

from tests.models.case import Case

BASE = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "ffn_dim": 101,
    "hidden_size": 66,
    "max_position_embeddings": 83,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "pad_token_id": 1,
}
AS_350M = {"do_layer_norm_before": False, "word_embed_proj_dim": 35}

CASES = (
    Case("opt_to_the_last_position", length=83, seed=61, base=BASE),
    Case("opt_350m", AS_350M, length=83, seed=62, base=BASE),
    Case(
        "opt_bare",
        {
            "activation_function": "gelu",
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "vocab_size": 97,
        },
        length=300,
        seed=63,
        base=BASE,
    ),
    Case(
        "opt_without_last_norm",
        {"_remove_final_layer_norm": True, "hidden_size": 65, "num_attention_heads": 5},
        length=60,
        seed=64,
        base=BASE,
    ),
    Case("opt_bf16", length=83, seed=65, stored="bf16", base=BASE),
    Case("opt_350m_bf16", AS_350M, length=83, seed=66, stored="bf16", base=BASE),
)

"""GPT-2: prompts that end at the last learned position, odd head widths, every option."""

from __future__ import annotations

from tests.models.case import Case

BASE = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": None,
    "n_embd": 55,
    "n_head": 5,
    "n_layer": 3,
    "n_positions": 83,
}

CASES = (
    Case("gpt2_to_the_last_position", length=83, seed=51, base=BASE),
    Case(
        "gpt2_scaled_by_layer",
        {
            "activation_function": "gelu",
            "n_inner": 77,
            "n_positions": 512,
            "reorder_and_upcast_attn": True,
            "scale_attn_by_inverse_layer_idx": True,
        },
        length=300,
        seed=52,
        base=BASE,
    ),
    Case(
        "gpt2_unscaled_untied",
        {
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-3,
            "n_head": 11,
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
            "vocab_size": 97,
        },
        length=60,
        seed=53,
        base=BASE,
    ),
    Case("gpt2_bf16", {"n_embd": 63, "n_head": 3}, length=83, seed=54, stored="bf16", base=BASE),
    Case(
        "gpt2_bf16_untied",
        {"n_inner": 101, "n_layer": 4, "n_positions": 150, "tie_word_embeddings": False},
        length=140,
        seed=55,
        stored="bf16",
        base=BASE,
    ),
)

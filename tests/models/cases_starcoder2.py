"""StarCoder 2: layer norms and biases with rope, windows shorter than the prompts."""

from __future__ import annotations

from tests.models.case import Case

BASE = {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 60,
    "intermediate_size": 97,
    "norm_epsilon": 1e-5,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "sliding_window": 21,
    "use_bias": True,
}

CASES = (
    Case("starcoder2_window", length=150, seed=101, base=BASE),
    Case(
        "starcoder2_unbiased_untied",
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_bias": False,
        },
        length=60,
        seed=102,
        base=BASE,
    ),
    Case("starcoder2_bf16", {"hidden_size": 72}, length=100, seed=103, stored="bf16", base=BASE),
)

"""config.json of Llama checkpoints with their published shapes, and directories that hold one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
LLAMA_2_7B = _LLAMA | {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "torch_dtype": "float16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA_3_70B = _LLAMA | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
LLAMA_3_405B = _LLAMA | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128,
}  # fmt: skip


def config_folder(folder: Path, config: dict[str, Any]) -> str:
    """Write a directory that holds config.json only; return its path."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)

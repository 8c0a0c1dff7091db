"""Convert a tiny checkpoint to a GGUF file as llama.cpp's converter would.

    path = write_gguf_of(folder, tmp_path / "tiny.gguf", kind="Q4_K")

Metadata from config.json, tensors from model.safetensors (matrices stored as `kind`, vectors as
F32), and the byte-level tokenizer of the tiny models if they have one. Written after the
converter (convert_hf_to_gguf.py), not after the reader of the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.weights.checkpoint import open_checkpoint
from tests.gguf_writer import converted, write_gguf

Json = Mapping[str, Any]
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "granite": "granite",
    "smollm3": "smollm3", "olmo2": "olmo2", "olmo3": "olmo2", "gpt2": "gpt2",
    "starcoder2": "starcoder2", "mixtral": "llama", "qwen3_moe": "qwen3moe", "olmoe": "olmoe",
}  # fmt: skip
NORMAL, CONTROL = 1, 3
# Configurations with rows of whole blocks of 256.
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 131, "num_hidden_layers": 2,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "bos_token_id": 0,
    "eos_token_id": 1, "layer_norm_epsilon": 1e-5, "n_embd": 256, "n_head": 2, "n_layer": 1,
    "n_positions": 64, "vocab_size": 97,
}  # fmt: skip


def write_gguf_of(folder: Path, path: Path, *, kind: str = "F32", **changes: Any) -> Path:
    """Write the checkpoint in `folder` to `path`; `changes` override metadata, None drops a key.

    A key's dots are written as two underscores.
    """
    metadata, tensors = gguf_of(folder)
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    typed = {
        name: (values, "F32" if values.ndim == 1 else kind) for name, values in tensors.items()
    }
    return write_gguf(path, kept, typed)


def gguf_of(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return metadata and tensors."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    checkpoint = open_checkpoint(folder)
    sources = {name: checkpoint.read_f32(name) for name in checkpoint.names}
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv_heads = config.get("num_key_value_heads", heads)
    tensors = converted(sources, architecture, heads=heads, kv_heads=kv_heads)
    tensors |= _rope_tensors(config)
    metadata = {"general.architecture": architecture, "general.name": "tiny"}
    metadata |= {f"{architecture}.{key}": value for key, value in _own(config).items()}
    return metadata | tokenizer_metadata(folder, config), tensors


def _own(config: Json) -> dict[str, Any]:
    if config["model_type"] == "gpt2":
        return {
            "block_count": config["n_layer"],
            "context_length": config["n_positions"],
            "embedding_length": config["n_embd"],
            "feed_forward_length": config.get("n_inner") or 4 * config["n_embd"],
            "attention.head_count": config["n_head"],
            "attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
        }
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
    }
    if "norm_epsilon" in config:
        values["attention.layer_norm_epsilon"] = float(config["norm_epsilon"])
    else:
        values["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    if config.get("head_dim") or config["model_type"] == "qwen3":
        head_dim = config.get("head_dim") or 128
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config["model_type"] in ("llama", "mistral", "mixtral", "smollm3", "granite"):
        values |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    return values | _rope(config, head_dim) | _of_family(config)


def _rope(config: Json, head_dim: int) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = given.get("full_attention", given)
    theta = scaling.get("rope_theta") or config.get("rope_theta")
    values: dict[str, Any] = {} if theta is None else {"rope.freq_base": float(theta)}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }
        for name in ("beta_fast", "beta_slow"):
            if name in scaling:
                values[f"rope.scaling.yarn_{name}"] = float(scaling[name])
    if config["model_type"] == "phi3":
        original = config["original_max_position_embeddings"]
        share = config.get("partial_rotary_factor", 1.0)
        values |= {
            "rope.scaling.original_context_length": original,
            "rope.dimension_count": int(share * head_dim),
            "attention.sliding_window": config.get("sliding_window") or 0,
        }
        stretched = config["max_position_embeddings"] / original
        if kind == "longrope":
            usual = math.sqrt(1 + math.log(stretched) / math.log(original))
            values["rope.scaling.attn_factor"] = usual if stretched > 1 else 1.0
    return values


def _of_family(config: Json) -> dict[str, Any]:
    kind = config["model_type"]
    values: dict[str, Any] = {}
    if kind == "granite":
        for key, name in (
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ):
            values[key] = float(config[name])
    if "num_experts_per_tok" in config:
        values["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        values["expert_used_count"] = config["num_experts_per_tok"]
    if kind == "qwen3_moe":
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind in ("gemma2", "gemma3_text", "olmo3"):
        values["attention.sliding_window"] = config["sliding_window"]
    if kind in ("gemma2", "gemma3_text"):
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key):
                values[key] = float(config[key])
    if kind == "olmo3" or "layer_types" in config:
        types = config.get("layer_types") or [
            "sliding_attention" if (layer + 1) % 4 else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ]
        flags = [name == "sliding_attention" for name in types]
        values["attention.sliding_window_pattern"] = flags
    return values


def _rope_tensors(config: Json) -> dict[str, NDArray[np.float32]]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(scaling[f"{name}_factor"], np.float32)
            for name in ("long", "short")
        }
    if kind != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = scaling.get("rope_theta") or config["rope_theta"]
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for pair in range(0, head_dim, 2):
        exponent = np.float32(pair) / np.float32(head_dim)
        wave = 2 * math.pi / float(np.float32(1) / np.float32(theta**exponent))
        if wave < length / high:
            divisors.append(1.0)
        elif wave > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def tokenizer_metadata(folder: Path, config: Json) -> dict[str, Any]:
    """Return the tokenizer's entries, or only the two ids if the tiny model has no tokenizer."""
    ids: dict[str, Any] = {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    if not (folder / "tokenizer.json").is_file():
        return ids
    said = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"] for token in said["added_tokens"]}
    tokens = sorted(said["model"]["vocab"], key=said["model"]["vocab"].__getitem__)
    missing = config["vocab_size"] - len(tokens)
    kinds = [CONTROL if token in special else NORMAL for token in tokens] + [5] * missing
    tokens += [f"[PAD{len(tokens) + at}]" for at in range(missing)]
    return ids | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": said["model"]["merges"],
        "tokenizer.ggml.add_bos_token": settings["add_bos_token"],
        "tokenizer.chat_template": settings["chat_template"],
    }

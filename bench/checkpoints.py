"""Random checkpoints in the shapes of real models, for speed measurements.

Random weights are useless for quality; shapes and bytes are the real ones. They are written once to
a cache directory outside the repository and found by name; the same name means the same bytes.
Values come from one pool of normals (0, 0.02), so writing 1.2 GB takes seconds. Shapes of real
models have a tokenizer with as many tokens as the model (generated, all ASCII, so that each token
completes text); the older llama-0.6b has one of bytes only.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

POOL_SIZE = 1 << 22

SHAPES: dict[str, dict[str, object]] = {
    "llama-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    # The same rows with four layers, which take seconds instead of minutes.
    "qwen3-0.1b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_768,
        "max_position_embeddings": 40_960,
        "max_window_layers": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    # Layers of Qwen3-30B-A3B: eight experts of 128 a token.
    "qwen3-moe-2-layers": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32_768,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    # As many layers as qwen3-0.1b, with a mixture in each: four experts of 32 a token.
    "qwen3-moe-0.2b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_768,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
}
BYTES_ONLY = ("llama-0.6b",)


def cache_folder() -> Path:
    """Return the checkpoint directory: QUIRE_BENCH_CACHE, else one for temporary files."""
    return Path(os.environ.get("QUIRE_BENCH_CACHE") or Path(tempfile.gettempdir()) / "quire-bench")


def checkpoint_config(shape: str) -> dict[str, object]:
    """Return the config.json of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **SHAPES[shape],
    }


def random_checkpoint(shape: str, *, seed: int = 0) -> Path:
    """Return the folder of a bf16 checkpoint of `shape` (a key of SHAPES); write it if missing."""
    folder = cache_folder() / f"{shape}-bf16-seed{seed}"
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = checkpoint_config(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    num_tokens = None if shape in BYTES_ONLY else int(str(config["vocab_size"]))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(num_tokens)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    _write_safetensors(folder / "model.safetensors", dict(tensor_shapes(config)), seed)
    (folder / "complete").touch()
    return folder


def tensor_shapes(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return name and shape of each tensor of a checkpoint with this config.json."""

    def number(key: str) -> int:
        return int(config[key])  # type: ignore[call-overload,no-any-return]

    hidden, inter, head_dim = number("hidden_size"), number("intermediate_size"), number("head_dim")
    q_rows = number("num_attention_heads") * head_dim
    kv_rows = number("num_key_value_heads") * head_dim
    yield "model.embed_tokens.weight", (number("vocab_size"), hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (number("vocab_size"), hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(number("num_hidden_layers")):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (q_rows, hidden)
        yield at + "self_attn.k_proj.weight", (kv_rows, hidden)
        yield at + "self_attn.v_proj.weight", (kv_rows, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, q_rows)
        if str(config["model_type"]).startswith("qwen3"):
            yield at + "self_attn.q_norm.weight", (head_dim,)
            yield at + "self_attn.k_norm.weight", (head_dim,)
        blocks = {at + "mlp.": inter}
        if "num_experts" in config:
            yield at + "mlp.gate.weight", (number("num_experts"), hidden)
            experts = range(number("num_experts"))
            size = number("moe_intermediate_size")
            blocks = {f"{at}mlp.experts.{expert}.": size for expert in experts}
        for block, size in blocks.items():
            yield block + "gate_proj.weight", (size, hidden)
            yield block + "up_proj.weight", (size, hidden)
            yield block + "down_proj.weight", (hidden, size)


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Write the safetensors layout: u64 header length, JSON header, tensor bytes."""
    rng = np.random.default_rng(seed)
    pool = _to_bf16(rng.standard_normal(POOL_SIZE, dtype=np.float32) * np.float32(0.02))
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            if name.endswith("norm.weight"):
                file.write(np.full(size, 0x3F80, np.uint16).tobytes())  # 1.0
                continue
            while size > 0:
                start = int(rng.integers(0, POOL_SIZE // 2))
                run = pool[start : start + min(size, POOL_SIZE - start)]
                file.write(run.tobytes())
                size -= len(run)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tokenizer_json(num_tokens: int | None) -> dict[str, object]:
    """Return a byte-level BPE tokenizer. num_tokens None: without merges.

    Else it has exactly that many tokens, by merges of two printable ASCII letters, then of such a
    pair and a third one.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(rest))]
    merges = [] if num_tokens is None else list(_merges(num_tokens - 2 - len(letters)))
    tokens = ["<s>", "</s>", *letters, *(left + right for left, right in merges)]
    special = [
        {
            "id": i,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, text in enumerate(tokens[:2])
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: id_ for id_, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def _merges(count: int) -> Iterator[tuple[str, str]]:
    ascii_letters = [chr(byte) for byte in range(33, 127)]
    pairs = [(left, right) for left in ascii_letters for right in ascii_letters]
    triples = ((left + middle, right) for left, middle in pairs for right in ascii_letters)
    return itertools.islice(itertools.chain(pairs, triples), count)

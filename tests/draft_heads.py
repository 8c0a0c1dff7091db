"""Write tiny draft heads in the published layouts, for a model of the given sizes.

    write_medusa(folder, medusa_tensors(hidden_size=60, vocab_size=307))
    write_eagle(folder, eagle_tensors(hidden_size=60, vocab_size=307), vocab_size=307)

Weights are drawn; the same arguments always give the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.train.tensor_file import write_tensors
from tests.safetensors_writer import write_safetensors

Float32s = NDArray[np.float32]


def medusa_tensors(
    *,
    hidden_size: int,
    vocab_size: int,
    num_heads: int = 3,
    num_layers: int = 1,
    prefix: str = "medusa_lm_head.",
    seed: int = 1,
) -> dict[str, Float32s]:
    """Return drawn tensors of Medusa heads by name."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Float32s] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{prefix}{head}.{layer}.linear"
            scale = hidden_size**-0.5
            drawn = rng.normal(0, scale, (hidden_size, hidden_size))
            tensors[f"{name}.weight"] = drawn.astype(np.float32)
            tensors[f"{name}.bias"] = rng.normal(0, 0.1, hidden_size).astype(np.float32)
        drawn = rng.normal(0, 0.3, (vocab_size, hidden_size))
        tensors[f"{prefix}{head}.{num_layers}.weight"] = drawn.astype(np.float32)
    return tensors


def write_medusa(
    folder: Path,
    tensors: dict[str, Float32s],
    *,
    file: str = "model.safetensors",
    **config: Any,
) -> Path:
    """Write Medusa heads; `config` changes config.json, None drops a key."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = {int(name.removeprefix("medusa_lm_head.").split(".")[0]) for name in tensors}
    values = {
        "model_type": "medusa",
        "medusa_num_heads": len(heads),
        "medusa_num_layers": 1,
        "base_model_name_or_path": "somewhere/else",
        **config,
    }
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    write_safetensors(folder / file, tensors)
    return folder


EAGLE_HEADS, EAGLE_KV_HEADS, EAGLE_HEAD_DIM, EAGLE_INNER = 3, 1, 8, 24


def eagle_tensors(
    *, hidden_size: int, vocab_size: int, draft_vocab_size: int = 90, seed: int = 1
) -> dict[str, NDArray[Any]]:
    """Return drawn tensors of an EAGLE-3 head by name, without an embedding; the head is as wide as
    the target."""
    rng = np.random.default_rng(seed)
    width = hidden_size
    queries, keys = EAGLE_HEADS * EAGLE_HEAD_DIM, EAGLE_KV_HEADS * EAGLE_HEAD_DIM
    shapes = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.mlp.gate_proj.weight": (EAGLE_INNER, width),
        "midlayer.mlp.up_proj.weight": (EAGLE_INNER, width),
        "midlayer.mlp.down_proj.weight": (width, EAGLE_INNER),
        "lm_head.weight": (draft_vocab_size, width),
    }
    tensors: dict[str, NDArray[Any]] = {
        name: rng.normal(0, 1.5 * shape[1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in (
        *(f"midlayer.{norm}" for norm in ("input_layernorm", "hidden_norm")),
        *("midlayer.post_attention_layernorm", "norm"),
    ):
        tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
    ids = np.sort(rng.permutation(vocab_size)[:draft_vocab_size])
    tensors["d2t"] = (ids - np.arange(draft_vocab_size)).astype(np.int64)
    known = np.zeros(vocab_size, np.bool_)
    known[ids] = True
    tensors["t2d"] = known
    return tensors


def write_eagle(
    folder: Path, tensors: dict[str, NDArray[Any]], *, vocab_size: int, **config: Any
) -> Path:
    """Write an EAGLE-3 head over all layers of a model with two; `config` changes config.json, None
    drops a key."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 60,
        "intermediate_size": EAGLE_INNER,
        "num_attention_heads": EAGLE_HEADS,
        "num_key_value_heads": EAGLE_KV_HEADS,
        "head_dim": EAGLE_HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        **config,
    }
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder

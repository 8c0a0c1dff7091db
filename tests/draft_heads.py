"""Write tiny draft heads in the published layouts, for a model of the given sizes.

    write_medusa(folder, hidden_size=60, vocab_size=307, num_heads=3)

Weights are drawn; the same arguments always give the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

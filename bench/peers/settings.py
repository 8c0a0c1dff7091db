"""The settings of each engine, and the candidates of a sweep.

settings.json beside this file has the chosen ones, by shape, precision and workload, with "*" for
all; later keys win: engine -> "*" -> precision -> workload. `python -m bench.sweep` tries GRID and
writes its choice there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

FILE = Path(__file__).with_name("settings.json")

# Candidates of a sweep by engine: every combination, for workloads of one request and of many.
GRID = MappingProxyType(
    {
        "quire": {
            "one": {"max_num_batched_tokens": [512, 2048]},
            "many": {"max_num_batched_tokens": [64, 128, 256, 512]},
        },
        "llama.cpp": {
            "one": {"-fa": ["on", "off"], "-ub": [512, 2048]},
            "many": {"-fa": ["on", "off"], "-ub": [512, 2048], "--kv-unified": [True]},
        },
        "openvino": {
            "one": {"max_num_batched_tokens": [2048], "KV_CACHE_PRECISION": ["u8", "bf16"]},
            "many": {
                "max_num_batched_tokens": [256, 2048],
                "dynamic_split_fuse": [True, False],
                "KV_CACHE_PRECISION": ["u8", "bf16"],
            },
        },
        "vllm": {
            "one": {"max_num_batched_tokens": [2048]},
            "many": {"max_num_batched_tokens": [512, 2048]},
        },
        "transformers": {"one": {"batch_size": [1]}, "many": {"batch_size": [16]}},
    }
)
ONE_REQUEST = ("w1", "w2")


def settings_for(
    engine: str, *, precision: str, workload: str, file: Path = FILE
) -> dict[str, Any]:
    """Return the committed settings. An engine without any is measured with its defaults."""
    known = json.loads(file.read_text()) if file.exists() else {}
    of_engine = known.get(engine, {})
    of_precision = of_engine.get(precision, {})
    chosen: dict[str, Any] = {}
    chosen |= of_engine.get("*", {}).get("*", {})
    chosen |= of_engine.get("*", {}).get(workload, {})
    chosen |= of_precision.get("*", {})
    chosen |= of_precision.get(workload, {})
    return chosen


def write_choice(
    engine: str, *, precision: str, workload: str, chosen: dict[str, Any], file: Path = FILE
) -> None:
    """Store the choice of a sweep."""
    known = json.loads(file.read_text()) if file.exists() else {}
    known.setdefault(engine, {}).setdefault(precision, {})[workload] = chosen
    file.write_text(json.dumps(known, indent=1) + "\n")


def candidates(engine: str, workload: str) -> Iterator[dict[str, Any]]:
    """Yield every combination of the engine's grid."""
    grid = GRID[engine]["one" if workload in ONE_REQUEST else "many"]
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))

"""Scenarios of the policy comparison: two machines, the speeds that load them, and the goals.

`cpu` is a small model with steps measured on a machine with two cores (the profile lies beside the
results). `accelerator` is described only: an 8B model on 1.5 TB/s and 300 TFLOP/s, sustained rates
of a data-centre card, about the capacity per request of the recorded service at its own pace.
Independent of policies; measures nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.checkpoints import checkpoint_config
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.obs.timing import Goals
from quire.sim.machine import Machine, described_machine
from quire.sim.profile import read_machine

TRACE = "traces/azure2023-conversation.csv"
MAX_TOKENS = 2048
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """speeds: ascending; light_speed: of the light tenant; settings: the engine's."""

    name: str
    text: str
    speeds: tuple[float, ...]
    light_speed: float
    goals: Goals
    settings: Mapping[str, Any]

    def config(self) -> EngineConfig:
        """Return the engine's settings, whatever the policy."""
        return engine_config(self.settings)

    def machine(self) -> Machine:
        """Return the machine."""
        if self.name == "cpu":
            return read_machine(RESULTS / "steps-qwen3-0.6b-bf16.json")
        with tempfile.TemporaryDirectory() as folder:
            config = json.dumps(checkpoint_config("llama-3.1-8b"))
            (Path(folder) / "config.json").write_text(config)
            settings = {**self.settings, "model": folder, "served_model_name": "llama-3.1-8b"}
            return described_machine(
                engine_config(settings), gb_per_s=1500.0, gflop_per_s=300_000.0, fixed_ms=2.0
            )


_CPU = Scene(
    name="cpu",
    text="qwen3-0.6b in bf16, steps measured on two cores with AMX; at most 16 run",
    speeds=(0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2),
    light_speed=0.02,
    goals=Goals(ttft_s=10.0, tpot_s=0.5),
    settings={
        "max_num_seqs": 16,
        "max_model_len": 16_384,
        "kv_cache_memory": "8GiB",
    },
)
_ACCELERATOR = Scene(
    name="accelerator",
    text="llama-3.1-8b on 1.5 TB/s and 300 TFLOP/s; at most 256 run",
    speeds=(1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0),
    light_speed=0.5,
    goals=Goals(ttft_s=2.0, tpot_s=0.1),
    settings={
        "max_num_seqs": 256,
        "max_num_batched_tokens": 1024,
        "max_model_len": 16_384,
        "kv_cache_memory": "40GiB",
        "executor": "torch",
    },
)
SCENES: Mapping[str, Scene] = {scene.name: scene for scene in (_ACCELERATOR, _CPU)}

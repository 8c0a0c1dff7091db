"""Case: a tiny checkpoint of any family, and the tokens to feed it.

All have a vocabulary of 131 and 512 positions unless stated otherwise. Families list theirs in
cases_NAME.py, and cases.py collects them. Independent of executors and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.config_reader import ConfigReader
from quire.models.registry import FAMILIES
from tests.tiny_models import write_tiny, write_tiny_llama

VOCAB_SIZE, MAX_POSITIONS = 131, 512


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint (config changes, seed, stored dtype) and the number of tokens to feed it.

    `base` is the config.json of the family's tiny model, which `changes` override (None drops a
    key); without one it is the tiny Llama of tests/tiny_models.py. `length` tokens are drawn from
    the vocabulary by the seed.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    length: int = 40
    seed: int = 1
    stored: str = "f32"
    base: Mapping[str, Any] | None = None

    def write(self, folder: Path) -> Path:
        """Write the checkpoint into `folder`."""
        if self.base is None:
            return write_tiny_llama(folder, seed=self.seed, dtype=self.stored, **self.config)
        return write_tiny(folder, self.config, seed=self.seed, dtype=self.stored)

    @property
    def config(self) -> dict[str, Any]:
        """Return the keys of config.json that differ from the tiny Llama."""
        sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS}
        return sizes | dict(self.base or {}) | self.changes

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts, as its family's reader says."""
        if self.base is None:
            return False
        values = {key: value for key, value in self.config.items() if value is not None}
        architecture = values["architectures"][0]
        spec = FAMILIES[architecture].read(ConfigReader(values, where=self.name), architecture)
        return spec.experts is not None

    @property
    def max_positions(self) -> int:
        """Return the model's number of positions; for dynamic rope, the length of the prompt."""
        positions: int = self.config["max_position_embeddings"] or self.config["n_positions"]
        return max(positions, self.length)

    @property
    def token_ids(self) -> list[int]:
        """Return the token ids of the prompt."""
        rng = np.random.default_rng(self.seed + 100)
        ids: list[int] = rng.integers(0, self.config["vocab_size"], self.length).tolist()
        return ids

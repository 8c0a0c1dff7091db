"""The precision in which a server computes a model, and what names the model in that precision.

Settings have the engine's names, and count where they are not "auto". Loads no tensor; knows no
PyTorch. Always holds: texts and hidden states of equal identities are of one model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from quire.config.flags import engine_config
from quire.engine.assembly.programs import engine_program
from quire.models.registry import open_model
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.serialize import digest
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.content import content_sample

Precision = Mapping[str, str]
AUTO: Precision = {}


def served_program(
    folder: Path, spec: ModelSpec, checkpoint: Checkpoint, precision: Precision
) -> Program:
    """Return the program that an engine with these settings runs. Raises SettingError."""
    return engine_program(engine_config({"model": str(folder), **precision}), spec, checkpoint)


def identity(folder: Path, precision: Precision) -> str:
    """Return a digest of the program and of a few bytes of each tensor, wherever the model lies.
    Raises SettingError or ModelError."""
    checkpoint = open_checkpoint(folder)
    program = served_program(folder, open_model(folder), checkpoint, precision)
    both = f"{content_sample(checkpoint)} {digest(program)}"
    return hashlib.blake2b(both.encode(), digest_size=8).hexdigest()

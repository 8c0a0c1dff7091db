"""Short trainings by their commands, as tests of several files run them. Needs PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from quire.train import eagle, medusa

SHARED_ARGUMENTS = [
    "--tokens",
    "600",
    "--answer-tokens",
    "20",
    "--max-num-seqs",
    "8",
    "--batch",
    "2",
]
SHARED_ARGUMENTS += ["--threads", "1", "--lr", "0.003", "--form", "both", "--checkpoint-steps", "3"]
KINDS: dict[str, tuple[Any, list[str]]] = {
    "medusa": (medusa.main, ["--heads", "2"]),
    "eagle": (eagle.main, ["--rounds", "3", "--draft-vocab-size", "200"]),
}


def arguments(
    kind: str, model: Path, prompts: Path, out: Path, steps: int, *more: str
) -> list[str]:
    """Return the arguments of a command."""
    given = ["--model", str(model), "--prompts", str(prompts), "--out", str(out)]
    return [*given, *SHARED_ARGUMENTS, *KINDS[kind][1], "--steps", str(steps), *more]


def trained(kind: str, model: Path, prompts: Path, out: Path, steps: int, *more: str) -> int:
    """Run a command and return its exit code."""
    code: int = KINDS[kind][0](arguments(kind, model, prompts, out, steps, *more))
    return code

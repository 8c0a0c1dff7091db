"""Compares a program's parameter table with a checkpoint: strict both ways.

A missing tensor, an unexpected one and one of a wrong shape are all errors, listed together.
Three things beyond the table are accepted: the rotary buffers that old checkpoints carry, and a
copy of the embedding as `lm_head.weight` where the head is tied, if it is the same bytes.
Reads no values but those two matrices.
"""

from __future__ import annotations

import numpy as np

from quire.program.ops import Weight, WeightForm
from quire.program.program import Program
from quire.weights.checkpoint import Checkpoint
from quire.weights.safetensors import raise_problems

ROTARY_BUFFER = ".rotary_emb.inv_freq"
TIED_COPY, TIED_SOURCE = "lm_head.weight", "model.embed_tokens.weight"
COMPARED_ROWS = 4_096


def check(program: Program, checkpoint: Checkpoint) -> None:
    """Raise WeightsError unless the checkpoint is exactly what the program needs."""
    expected = _expected_shapes(program)
    present = set(checkpoint.names)
    problems = [
        f"{name} is missing (shape {list(shape)} is needed){_missing_reason(name)}"
        for name, shape in expected.items()
        if name not in present
    ]
    for name in checkpoint.names:
        found = checkpoint.tensor(name).shape
        if name in expected:
            if found != expected[name]:
                problems.append(
                    f"{name} has shape {list(found)}; config.json asks for {list(expected[name])}"
                )
        elif name == TIED_COPY and TIED_SOURCE in expected and TIED_SOURCE in present:
            if not _same_bytes(checkpoint, TIED_COPY, TIED_SOURCE):
                problems.append(
                    f"{TIED_COPY} differs from {TIED_SOURCE}, but config.json ties them; "
                    "set tie_word_embeddings to false, or remove it"
                )
        elif not name.endswith(ROTARY_BUFFER):
            problems.append(f"{name} (shape {list(found)}) is not part of {program.name}")
    raise_problems(f"{checkpoint.path}: weights and config.json disagree", problems)


def _expected_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    return {
        part.source: _part_shape(weight, part.rows)
        for weight in program.weights.values()
        for part in weight.parts
    }


def _part_shape(weight: Weight, rows: int) -> tuple[int, ...]:
    return (rows,) if weight.form is WeightForm.VECTOR else (rows, weight.columns)


def _missing_reason(name: str) -> str:
    if name == TIED_COPY:
        return "; if the head is the embedding, config.json must say tie_word_embeddings true"
    return ""


def _same_bytes(checkpoint: Checkpoint, one: str, other: str) -> bool:
    left, right = checkpoint.tensor(one), checkpoint.tensor(other)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    size = COMPARED_ROWS * max(1, len(left.raw) // max(1, left.shape[0]))
    same = all(
        np.array_equal(left.raw[i : i + size], right.raw[i : i + size])
        for i in range(0, len(left.raw), size)
    )
    checkpoint.release(one)
    checkpoint.release(other)
    return same

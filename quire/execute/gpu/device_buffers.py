"""What an executor holds on its device beside weights and cache: buffers, angles, a step's numbers.

Made once, at addresses that stay. Knows a program's shapes and the largest step; no values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.execute.executor import StepLimits
from quire.execute.gpu.load import TORCH_TYPES
from quire.execute.layout import lay_out
from quire.execute.rope_table import CHUNK_POSITIONS, RopeTable
from quire.program.declarations import PIECE_POSITIONS, CacheSpec, RopeSpec
from quire.program.program import Program

if TYPE_CHECKING:
    from quire.execute.gpu.attention_steps import AttentionSteps

# Blocks of the smallest size cover a request's positions; a step's tables have so many columns,
# which a GPU gets with each step.
SMALLEST_BLOCK, SMALLEST_GPU_BLOCK = 4, 16


def attention_steps(
    program: Program, limits: StepLimits, device: torch.device, exact: bool
) -> AttentionSteps:
    """Return room for what attention launches of a step plan and leave to be merged."""
    from quire.execute.gpu.attention_steps import AttentionSteps, num_programs

    steps = AttentionSteps(program, limits=limits, exact=exact, programs=num_programs(device))
    steps.allocate(device)
    return steps


def step_sizes(program: Program, limits: StepLimits, device: torch.device) -> dict[str, int]:
    """Of the buffers for a step's numbers."""
    smallest = SMALLEST_BLOCK if device.type == "cpu" else SMALLEST_GPU_BLOCK
    return {
        "max_tokens": max(limits.max_tokens, limits.max_samples),
        "max_sequences": limits.max_sequences,
        "max_columns": max(
            [_columns(program, cache, smallest) for cache in program.caches], default=0
        ),
    }


def _columns(program: Program, cache: CacheSpec, smallest: int) -> int:
    """Return columns of a table of blocks; where ranks divide positions, those of other ranks
    too."""
    if cache.ranks == 1:
        return -(-program.max_positions // smallest) + 1
    of_engine = cache.ranks * PIECE_POSITIONS
    return -(-program.max_positions // of_engine) * of_engine // smallest


def step_arena(
    program: Program, limits: StepLimits, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return one arena, and each buffer's place in it as [max rows, width]."""
    layout = lay_out(program, limits)
    arena = torch.zeros(max(layout.arena_bytes, 1), dtype=torch.uint8, device=device)
    buffers = []
    for buffer, place in zip(program.buffers, layout.places, strict=True):
        raw = arena[place.offset_bytes : place.offset_bytes + place.num_bytes]
        rows = raw.view(TORCH_TYPES[buffer.dtype]).view(place.max_rows, place.stride)
        buffers.append(rows[:, : buffer.width])
    return arena, buffers


def rope_angles(spec: RopeSpec, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all positions; in whole chunks, as the table grows."""
    table = RopeTable(spec)
    table.reserve(-(-max_positions // CHUNK_POSITIONS) * CHUNK_POSITIONS)
    cos, sin = (np.ascontiguousarray(part[:max_positions]) for part in (table.cos, table.sin))
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

"""Cosines and sines of a program's rotary angles, by absolute position, grown as needed.

angle = float32(position) * inv_freq rounded to float32, as transformers has it; cosine and sine
are taken in float64, rounded to float32, and multiplied by the attention scale. Grown in chunks
of 1,024 positions that begin at multiples of 1,024, so a value depends on its position only,
never on how the table came to be that long.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.program.declarations import RopeSpec
from quire.program.program import Program

Float32s = NDArray[np.float32]

CHUNK_POSITIONS = 1_024


class RopeTable:
    """`cos` and `sin`, float32 [positions, rotary_dim / 2], for positions below `num_positions`.

    Growing replaces both arrays: take them after `reserve`.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self._inv_freq = np.array(spec.inv_freq, np.float32)
        self._scale = np.float32(spec.attention_scale)
        self.cos: Float32s = np.empty((0, len(self._inv_freq)), np.float32)
        self.sin: Float32s = np.empty((0, len(self._inv_freq)), np.float32)

    @property
    def num_positions(self) -> int:
        """Positions the table covers."""
        return len(self.cos)

    def reserve(self, num_positions: int) -> None:
        """Cover at least the positions below `num_positions`."""
        if num_positions <= self.num_positions:
            return
        num_chunks = -(-num_positions // CHUNK_POSITIONS)
        first = self.num_positions // CHUNK_POSITIONS
        chunks = [self._chunk(index) for index in range(first, num_chunks)]
        self.cos = np.concatenate([self.cos, *(cos for cos, _ in chunks)])
        self.sin = np.concatenate([self.sin, *(sin for _, sin in chunks)])

    def _chunk(self, index: int) -> tuple[Float32s, Float32s]:
        start = index * CHUNK_POSITIONS
        positions = np.arange(start, start + CHUNK_POSITIONS, dtype=np.float32)
        angles = (positions[:, None] * self._inv_freq).astype(np.float64)
        cos = np.cos(angles).astype(np.float32) * self._scale
        sin = np.sin(angles).astype(np.float32) * self._scale
        return cos, sin


def rope_bytes(program: Program) -> int:
    """Return bytes of a program's tables once they are grown to its last position."""
    return 4 * program.max_positions * sum(rope.rotary_dim for rope in program.ropes)

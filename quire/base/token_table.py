"""Tokens of the running requests, a row a slot: the worker's mirror.

Positions are absolute (prompt first). Knows no text and no policy. Always holds: entries before
`lengths[slot]` are the request's known tokens; memory is touched only where tokens are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TokenTable:
    """int32 arrays: `tokens` [slots, max_tokens], `lengths` [slots], `prompt_lengths` [slots]."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.tokens: NDArray[np.int32] = np.zeros((num_slots, max_tokens), np.int32)
        self.lengths: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.prompt_lengths: NDArray[np.int32] = np.zeros(num_slots, np.int32)

        self._flat = self.tokens.reshape(-1)

    def at(self, slots: NDArray[np.intp], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tokens of slots[i] at positions[i]."""
        # One flat index of intp: NumPy gives the GIL away for any other one, and a thread that
        # waits for it then delays the step.
        token_ids: NDArray[np.int32] = self._flat[slots * self.tokens.shape[1] + positions]
        return token_ids

    def put(
        self,
        slots: NDArray[np.intp],
        positions: NDArray[np.int32],
        token_ids: NDArray[np.int32],
    ) -> None:
        """Put tokens of slots[i] at positions[i]; lengths never shrink."""
        self._flat[slots * self.tokens.shape[1] + positions] = token_ids
        self.lengths[slots] = np.maximum(self.lengths[slots], positions + 1)

    def admit(self, slot: int, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Replace the row of `slot` by `token_ids`."""
        self.tokens[slot, : len(token_ids)] = token_ids
        self.lengths[slot] = len(token_ids)
        self.prompt_lengths[slot] = num_prompt_tokens

    def branch(self, sources: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Give each of `slots` (distinct) the tokens its source has now; it may be one itself."""
        if not len(slots):
            return
        lengths = self.lengths[sources]
        most = int(lengths.max())
        self.tokens[slots, :most] = self.tokens[sources, :most]  # all is read before it is written
        self.lengths[slots] = lengths

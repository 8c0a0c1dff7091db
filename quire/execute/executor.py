"""What the runner asks of an executor, whatever it computes with.

An executor owns packed weights, the step's buffers and the KV cache of one device. It knows
nothing of requests, scheduling or text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.program.batch import ForwardBatch
from quire.sampling.batch import SampleBatch, TokenChoice

# Called while weights are loaded: (bytes done, bytes in all).
Progress = Callable[[int, int], None]


class Executor(Protocol):
    """Runs one Program. Calls come from one thread at a time."""

    name: str  # "native", "reference"
    recipe: str  # instruction set or equivalent; part of the fingerprint
    weights_digest: str  # of every byte of the weights (quire.weights.content)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool (zero-filled). Raises CapacityError where memory does not suffice."""

    def copy_blocks(self, copy_from: NDArray[np.int32], copy_to: NDArray[np.int32]) -> None:
        """Copy whole pool blocks over all layers, in order."""

    def run_trunk(self, batch: ForwardBatch) -> None:
        """Compute the trunk segment for all token rows of the batch."""

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        """Logits [count, vocab] of batch.sample_rows[first:first+count]; count <= max_samples.

        A view of the executor's buffer: valid until the next call.
        """

    def sample(self, logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
        """Choose a token for each row of `logits` (which may be overwritten)."""

    @property
    def ops_done(self) -> int:
        """Operations finished so far, asked from any thread: progress within a step."""

    def close(self) -> None:
        """Free threads and memory; further calls are errors."""

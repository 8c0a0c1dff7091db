"""NullExecutor: returns each row's token at once, so that only the server around it has a cost.

An Executor (quire/execute/executor.py) without weights and cache. The servers of this directory
install it; no flag and no configuration of Quire selects it. The token at a position is
`token_at(position)`, whatever the row and the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.config.machine import MachineMemory, machine_memory
from quire.execute.executor import ExecutorMemory, ExecutorOptions, StepLimits
from quire.program.batch import ForwardBatch
from quire.program.program import Program
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores

# Ids of the built-in model that each stand for some letters: every token completes text.
FIRST_ID, NUM_IDS = 300, 512
_STEP_TOKENS = 1024


def token_at(position: int) -> int:
    """Return the token at a position."""
    return FIRST_ID + position * 7 % NUM_IDS


class NullExecutor:
    """See the module docstring. step_s: minimal duration of a step, asleep, like a model's
    speed.
    """

    name = "null"
    recipe = "null"
    weights_digest = "none"
    coarse_rows: Mapping[str, int] = MappingProxyType({})
    block_bytes = 1

    def __init__(self, program: Program, *, max_samples: int, step_s: float = 0.0) -> None:
        self.ops_done = 0
        self._logits = np.zeros((max_samples, program.vocab_size), np.float32)
        self._step_s = step_s
        self._next_s = 0.0

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate nothing."""

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """Do nothing."""

    def copy_blocks(self, copy_from: NDArray[np.int32], copy_to: NDArray[np.int32]) -> None:
        """Do nothing."""

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Raise: there is no KV to store in a tier."""
        raise NotImplementedError("the null executor has no blocks to move")

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        """Raise, likewise."""
        raise NotImplementedError("the null executor has no blocks to move")

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Wait until the step's time has passed."""
        self.ops_done += 1
        if self._step_s:
            now_s = time.monotonic()
            time.sleep(max(self._next_s - now_s, 0.0))
            self._next_s = max(self._next_s, now_s) + self._step_s

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        """Return zeros."""
        return self._logits[:count]

    def sample(self, logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
        """Return the tokens of the rows' positions."""
        token_ids = (FIRST_ID + batch.positions * 7 % NUM_IDS).astype(np.int32)
        return TokenChoice(token_ids=token_ids)

    def score(self, logits: NDArray[np.float32], batch: ScoreBatch) -> Scores:
        """Raise: there are no logits to score."""
        raise NotImplementedError("the null executor knows no log-probabilities")

    def close(self) -> None:
        """Do nothing."""


class NullExecutorClass:
    """An ExecutorClass of executors with steps of `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def check_program(self, program: Program) -> None:
        """Accept any program: none is run."""

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """Return the smallest sizes that plans accept."""
        return ExecutorMemory(weights_bytes=1, step_bytes=1, token_bytes=1)

    def head_rows(self, max_sequences: int) -> int:
        """Return all rows: there are no logits to hold."""
        return max_sequences

    def available_memory(self) -> MachineMemory:
        """Return the machine's memory, like the native executor."""
        return machine_memory()

    def plans_in_flight(self) -> int:
        """Return one, like the native executor."""
        return 1

    def full_step_tokens(self) -> int:
        """Return the step size of a fast machine."""
        return _STEP_TOKENS

    def __call__(self, program: Program, checkpoint: Any, options: ExecutorOptions) -> NullExecutor:
        return NullExecutor(program, max_samples=options.limits.max_samples, step_s=self._step_s)

"""What the runner asks of an executor, whatever it computes with.

An executor owns packed weights, the step's buffers and the KV cache of one device. It knows
nothing of requests, scheduling or text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.config.machine import MachineMemory
from quire.program.batch import ForwardBatch
from quire.program.program import Program
from quire.program.tensors import Rows
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores
from quire.weights.checkpoint import Checkpoint
from quire.weights.pack_cache import PackCache

# Rows of one slice of the head, where a slice costs little.
HEAD_ROWS = 64
# Most rows of a part that is computed by layers: products and attention gain little beyond.
PART_TOKENS = 512
# Called while weights are loaded: (bytes done, bytes in all).
Progress = Callable[[int, int], None]


class StepMemoryError(WorkerError):
    """The device lacks memory for what was asked for: the same rows may fit a few at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: token rows, sampled rows of one head slice, sequences."""

    max_tokens: int
    max_samples: int
    max_sequences: int

    def rows(self, rows: Rows) -> int:
        """The number behind a symbolic row count."""
        return {
            Rows.TOKENS: self.max_tokens,
            Rows.SAMPLES: self.max_samples,
            Rows.SEQUENCES: self.max_sequences,
        }[rows]


# A part that is computed by layers samples nothing.
PART_LIMITS = StepLimits(max_tokens=PART_TOKENS, max_samples=0, max_sequences=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """How an executor is made. pack_cache: where packed weights are kept and found."""

    limits: StepLimits
    num_threads: int = 1
    progress: Progress | None = None
    pack_cache: PackCache | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorMemory:
    """Bytes an executor will take: all weights, the buffers of the largest step (tables of angles
    included), and keys and values of one token over all layers."""

    weights_bytes: int
    step_bytes: int
    token_bytes: int


class ExecutorClass(Protocol):
    """What a class of executors says of a program before a byte is loaded, and makes of it."""

    def check_program(self, program: Program) -> None:
        """Raises ModelError, which lists what executors of this class cannot hold."""

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """The memory an executor takes for steps within `limits`."""

    def head_rows(self, max_sequences: int) -> int:
        """Rows of one slice of the head: logits of more are never in memory at once."""

    def available_memory(self) -> MachineMemory:
        """Of what one computes with, and how much of it a KV cache takes by itself."""

    def full_step_tokens(self) -> int:
        """Rows from which a step computes about as many a second as any larger one. Raises
        SettingError where the machine lacks the instruction set that was asked for."""

    def plans_in_flight(self) -> int:
        """How many plans are best out at once."""

    def __call__(
        self, program: Program, checkpoint: Checkpoint, options: ExecutorOptions
    ) -> Executor: ...


class Executor(Protocol):
    """Runs one Program. Calls come from one thread at a time."""

    name: str  # "native", "reference"
    recipe: str  # instruction set or equivalent; part of the fingerprint
    weights_digest: str  # of every byte of the weights (quire.weights.content)
    # Weights in 8 bits, and how many of their rows these are too coarse for (quire.quant).
    coarse_rows: Mapping[str, int]

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool (zero-filled). Raises CapacityError where memory does not suffice."""

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """Make memory of the pages of blocks [first, last) in one layer: blocks that nobody has
        written yet, so that whoever is the first to does not wait for the system."""

    def copy_blocks(self, copy_from: NDArray[np.int32], copy_to: NDArray[np.int32]) -> None:
        """Copy whole pool blocks over all layers, in order."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block over all layers, as export_block gives them."""

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a pool block's raw bytes over all layers, scales included, to out [block_bytes].

        This and import_block may be called in another thread, at any time at which nothing that
        runs reads or writes the block.
        """

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        """Make a pool block what export_block gave, of this or of an equal executor."""

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Compute the trunk segment for all token rows of the batch. head_rows: run_head is asked
        for so many of the first sample rows next, so that they may be computed at once."""

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        """Logits [count, vocab] of batch.sample_rows[first:first+count]; count <= max_samples.

        A view of the executor's buffer: valid until the next call.
        """

    def sample(self, logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
        """Choose a token for each row of `logits` (which may be overwritten)."""

    def score(self, logits: NDArray[np.float32], batch: ScoreBatch) -> Scores:
        """How likely known tokens are, by the rows of `logits` (which are only read)."""

    @property
    def ops_done(self) -> int:
        """Operations finished so far, asked from any thread: progress within a step."""

    def close(self) -> None:
        """Free threads and memory; further calls are errors."""


@runtime_checkable
class LayeredExecutor(Protocol):
    """An Executor that also computes a part of a prompt some layers at a time, in buffers of its
    own: other steps may come between."""

    @property
    def num_layers(self) -> int:
        """Into how many the trunk may be cut; each costs about the same."""

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """Compute layers first .. end - 1 of the trunk for the rows of `batch`, one sequence of at
        most PART_TOKENS. The same batch goes through all layers, in order, from 0 on; nothing is
        sampled. Bits are those of run_trunk."""


@runtime_checkable
class AsyncExecutor(Protocol):
    """An Executor whose device works beside the host and keeps the last token of each slot: batches
    may have late_slots, and calls return when the device has been told."""

    def sample_later(
        self, logits: NDArray[np.float32], batch: SampleBatch, slots: NDArray[np.int32]
    ) -> Callable[[], TokenChoice]:
        """As `sample` does, and keep each row's token as the last of its slot. A history that lacks
        its last token (batch.late_slots) has what was kept of its slot before. The result is waited
        for by calling what is returned. Not for rows that are chosen on the host: those with rare
        parameters, and beams."""

    def mark(self) -> Callable[[], None]:
        """Called, what is returned waits until all that was told until now is done."""

    def begin_moving(self, num_blocks: int) -> None:
        """Room on the device for so many blocks on their way to the host at once, and from it.
        Raises CapacityError."""

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory of the host that the device reads and writes by itself. Raises CapacityError."""

    def export_blocks(
        self, blocks: NDArray[np.int32], outs: Sequence[NDArray[np.uint8]]
    ) -> Callable[[], None]:
        """As export_block does with each, of blocks as all that was told until now leaves them;
        what is told later may write into them. The bytes are there when what is returned, which may
        be called in any thread, has been."""

    def import_blocks(self, blocks: NDArray[np.int32], raws: Sequence[NDArray[np.uint8]]) -> None:
        """As import_block does with each, waiting until they are there: in any thread, one at a
        time. What was told and reads or writes these blocks must be done."""

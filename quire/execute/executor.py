"""The interface between the runner and its executor, whatever the executor computes with.

An executor owns packed weights, the step's buffers and the KV cache of one device. It knows
nothing of requests, scheduling or text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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
# The largest part of a prompt for layered prefill; larger parts gain little.
PART_TOKENS = 512
# Called while weights are loaded: (bytes done, bytes in all).
Progress = Callable[[int, int], None]


class StepMemoryError(WorkerError):
    """The device lacks memory for a step; the same rows may fit a few at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: token rows, sampled rows of one head slice, sequences."""

    max_tokens: int
    max_samples: int
    max_sequences: int

    def rows(self, rows: Rows) -> int:
        """Return the number behind a symbolic row count."""
        return {
            Rows.TOKENS: self.max_tokens,
            Rows.SAMPLES: self.max_samples,
            Rows.SEQUENCES: self.max_sequences,
        }[rows]


# A part that is computed by layers samples nothing.
PART_LIMITS = StepLimits(max_tokens=PART_TOKENS, max_samples=0, max_sequences=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """How an executor is made.

    pack_cache: where packed weights are kept and found. beside: an executor of the same class that
    is called from the same thread: its compute threads are shared.
    """

    limits: StepLimits
    num_threads: int = 1
    progress: Progress | None = None
    pack_cache: PackCache | None = None
    beside: Executor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorMemory:
    """Bytes an executor will take: all weights, the buffers of the largest step (rotary tables
    included), keys and values of one token over all layers, and what a library of exchanges takes
    of a device."""

    weights_bytes: int
    step_bytes: int
    token_bytes: int
    exchange_bytes: int = 0


class ExecutorSizing(Protocol):
    """Sizes a program before loading."""

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """Return the memory an executor takes for steps within `limits`."""

    def head_rows(self, max_sequences: int) -> int:
        """Return rows of one slice of the head; logits of more rows are never in memory at once."""

    def full_step_tokens(self) -> int:
        """Return rows from which larger steps compute no more rows per second. Raises SettingError
        where the machine lacks the requested instruction set."""


class ExecutorClass(ExecutorSizing, Protocol):
    """A class of executors: checks and sizes a program before loading, and makes an executor."""

    def check_program(self, program: Program) -> None:
        """Raise ModelError listing what executors of this class do not support."""

    def available_memory(self) -> MachineMemory:
        """Return memory of the device, and the share that a KV cache takes by default."""

    def plans_in_flight(self) -> int:
        """Return the best number of plans in flight."""

    def __call__(
        self, program: Program, checkpoint: Checkpoint, options: ExecutorOptions
    ) -> Executor: ...


class Executor(Protocol):
    """Runs one Program. Calls come from one thread at a time."""

    name: str  # "native", "reference"
    recipe: str  # instruction set or equivalent; part of the fingerprint
    weights_digest: str  # of every byte of the weights (quire.weights.content)
    # By weight: rows for which 8 bits are too coarse (quire.quant).
    coarse_rows: Mapping[str, int]

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool (zero-filled). Raises CapacityError where memory does not suffice."""

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """Prefault the pages of blocks [first, last) of one layer, which were never written, so
        that the first write does not wait for the system."""

    def copy_blocks(self, copy_from: NDArray[np.int32], copy_to: NDArray[np.int32]) -> None:
        """Copy whole pool blocks over all layers, in order."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block over all layers, as export_block gives them."""

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a pool block's raw bytes over all layers, scales included, to out [block_bytes].

        This and import_block may be called from another thread while no running step reads or
        writes the block.
        """

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        """Write bytes from export_block, of this or of an equal executor, to a pool block."""

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Compute the trunk segment for all token rows of the batch. head_rows: run_head will
        follow for that many of the first sample rows, so both may be computed together."""

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        """Return logits [count, vocab] of batch.sample_rows[first:first+count]; count <=
        max_samples.

        A view of the executor's buffer: valid until the next call.
        """

    def sample(self, logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
        """Choose a token for each row of `logits` (which may be overwritten)."""

    def score(self, logits: NDArray[np.float32], batch: ScoreBatch) -> Scores:
        """Return log-probabilities of known tokens from the rows of `logits` (only read)."""

    @property
    def ops_done(self) -> int:
        """Operations finished so far; may be read from any thread: progress within a step."""

    def close(self) -> None:
        """Free threads and memory; further calls are errors."""


@runtime_checkable
class PoolingExecutor(Protocol):
    """An Executor of a program with the segment "pool" (quire/program/pooling.py)."""

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        """Return final hidden rows [count, width] of batch.sample_rows[first:first+count], after
        the trunk has run; count <= max_samples. bf16 rows may come as uint16. Valid until the next
        call."""


@runtime_checkable
class LayeredExecutor(Protocol):
    """An Executor that can compute part of a prompt a few layers at a time (layered prefill), in
    separate buffers, so that other steps can run in between."""

    @property
    def num_layers(self) -> int:
        """Layers the trunk can be split into; each costs about the same."""

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """Compute layers first .. end - 1 of the trunk for the rows of `batch`, one sequence of at
        most PART_TOKENS. The same batch goes through all layers, in order, from 0 on; nothing is
        sampled. Bits are those of run_trunk."""


@runtime_checkable
class TappedExecutor(Protocol):
    """An Executor that hands out named outputs of its program (quire/program/taps.py)."""

    def output(self, name: str, num_rows: int) -> NDArray[Any]:
        """Return the first rows of an output, bf16 perhaps as uint16: the trunk's hold until the
        next run_trunk, the head's until the next run_head; taps only of a batch that keeps them."""


@runtime_checkable
class PipelinedExecutor(Protocol):
    """An Executor of several stages: others compute the first layers of one step while its own
    computes the last layers of another. Batches have no late_slots."""

    @property
    def num_stages(self) -> int:
        """How many stages there are, and steps that can be computed at once."""

    @property
    def waited_ms(self) -> float:
        """Milliseconds that its own stage has waited for rows of the stage before."""

    def begin_trunk(self, batch: ForwardBatch) -> None:
        """Let the other stages begin a step, which run_trunk is called for later; steps are run in
        the order in which they were begun."""


@runtime_checkable
class AsyncExecutor(Protocol):
    """An Executor with a device that runs asynchronously and keeps the last token of each slot:
    batches may have late_slots, and calls return once the work is queued."""

    def sample_later(
        self, logits: NDArray[np.float32], batch: SampleBatch, slots: NDArray[np.int32]
    ) -> Callable[[], TokenChoice]:
        """Queue `sample`, and keep each row's token as the last of its slot. A history that lacks
        its last token (batch.late_slots) takes the token kept for that slot. Calling the returned
        function waits for the result. Rows chosen on the host (rare parameters, beams) are not
        supported."""

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until all work queued so far is done."""

    def begin_moving(self, num_blocks: int) -> None:
        """Have staging buffers on the device for at least `num_blocks` blocks each way, before any
        block is moved. Raises CapacityError."""

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory, which the device can access. Raises CapacityError."""

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pin host memory of the caller, until the executor is closed. Raises CapacityError."""

    def export_blocks(
        self, blocks: NDArray[np.int32], outs: Sequence[NDArray[np.uint8]]
    ) -> Callable[[], None]:
        """Queue export_block for each block, after all work queued so far; work queued later may
        overwrite the blocks. Calling the returned function, from any thread, waits for the
        bytes."""

    def import_blocks(self, blocks: NDArray[np.int32], raws: Sequence[NDArray[np.uint8]]) -> None:
        """Do import_block for each block and wait: from any thread. Queued work that reads or
        writes these blocks must be done."""

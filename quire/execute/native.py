"""NativeExecutor: runs a program with the compiled kernels on the CPU.

Here a Program becomes what native/include/quire/program.h holds: buffers placed in an arena,
views as numbers, weights packed (packing.py). Each segment is then one native call without the
GIL. Knows nothing of requests; adds no arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.errors import CapacityError, ModelError, SettingError, WorkerError
from quire.execute.executor import PART_LIMITS, ExecutorMemory, ExecutorOptions, StepLimits
from quire.execute.layout import lay_out
from quire.execute.native_limits import NativeSizing, memory_of, problems_of
from quire.execute.native_ops import encode, encode_view
from quire.execute.packing import LoadWeights, load
from quire.execute.rope_table import RopeTable
from quire.program.batch import ForwardBatch
from quire.program.ops import Op
from quire.program.program import Program
from quire.program.tensors import Rows
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.native import choose
from quire.sampling.native_scoring import score
from quire.sampling.scoring import ScoreBatch, Scores
from quire.weights.binding import bind
from quire.weights.checkpoint import Checkpoint

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]

_NO_POOL: NDArray[np.uint8] = np.empty((0, 0, 0), np.uint8)
# Touching one byte of each makes them memory; huge pages take one of many.
_PAGE_BYTES = 4096
SEGMENTS = ("trunk", "head", "pool")
TRUNK, HEAD, POOL, NONE = 0, 1, 2, -1  # places in these
ROW_CODES: Mapping[Rows, int] = MappingProxyType(
    {Rows.TOKENS: 0, Rows.SAMPLES: 1, Rows.SEQUENCES: 2}
)


class NativeExecutor(NativeSizing):
    """An Executor (see executor.py).

    isa: by name; empty takes QUIRE_ISA, else the machine's best. poison: fill buffers with NaN
    before each run. load_weights: in place of packing.load. Raises WeightsError where the
    checkpoint is not the program's, CapacityError where memory does not suffice, SettingError for
    an instruction set this machine does not have.
    """

    name = "native"
    pool: _native.Pool

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        *,
        isa: str = "",
        poison: bool = False,
        load_weights: LoadWeights = load,
    ) -> None:
        self.check_program(program)
        binding = bind(program, checkpoint)
        try:
            shared = options.beside.pool if isinstance(options.beside, NativeExecutor) else None
            self.pool = shared or _native.Pool(options.num_threads, isa=isa)
        except RuntimeError as error:  # its words name the instruction sets, or the threads
            raise SettingError(str(error)) from error
        self.recipe: str = self.pool.isa
        self._program = program
        self._ropes = [RopeTable(spec) for spec in program.ropes]
        self._num_angles = 0  # positions that all of them cover
        try:
            self._native = place_buffers(program, options.limits, self.pool)
            packed = load_weights(program, binding, self.pool, options.progress, options.pack_cache)
        except MemoryError as error:
            raise CapacityError(
                f"{program.name}: {program.weight_bytes} bytes of weights and a step of "
                f"{options.limits.max_tokens} tokens do not fit into memory; lower "
                "max_num_batched_tokens or take a smaller model"
            ) from error
        self.weights_digest, self.coarse_rows = packed.digest, packed.coarse_rows
        self._prepare(packed.weights, poison=poison)

    def _prepare(self, weights: Mapping[str, _native.Weight], *, poison: bool) -> None:
        self.weights = weights
        for name in SEGMENTS:
            ops = self._program.segments.get(name, ())
            self._native.add_segment([encode(op, weights) for op in ops])
        self._native.set_poison(poison)
        self.num_layers: int = self._native.num_layers(TRUNK)
        self._head_of: tuple[ForwardBatch, int] | None = None  # its logits are computed already
        self._outputs: dict[tuple[str, int], NDArray[Any]] = {}
        self._pool_bytes = _NO_POOL

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool: zero pages that are taken when first written.

        block_size is 4, 8, or a multiple of 16 from 16 to 128.
        """
        spec = self._program.caches[0]
        try:
            self._native.allocate_cache(
                dtype=str(spec.dtype),
                ints=bool(spec.scheme),
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                block_size=block_size,
                layers=spec.layers,
                num_blocks=num_blocks,
            )
        except MemoryError as error:
            raise CapacityError(
                f"{num_blocks} cache blocks of {block_size} tokens "
                f"({num_blocks * block_size * spec.token_bytes} bytes) do not fit into memory; "
                "lower the memory for the cache"
            ) from error
        # [layers, blocks, bytes]: a block's keys and values of one layer lie together.
        pool, shape = self._native.cache, (spec.layers, num_blocks)
        block_layer_bytes = len(pool) // (spec.layers * num_blocks)
        used = pool[: spec.layers * num_blocks * block_layer_bytes]
        self._pool_bytes = used.reshape(*shape, block_layer_bytes)

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """Write a zero to each page of blocks that were never written."""
        self._pool_bytes[layer, first:last, ::_PAGE_BYTES] = 0

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """Copy whole pool blocks over all layers, in order."""
        if len(copy_from):
            self._native.copy_blocks(copy_from, copy_to)

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block over all layers, as export_block gives them."""
        layers, _, layer_bytes = self._pool_bytes.shape
        return int(layers * layer_bytes)

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a pool block's raw bytes over all layers to out [block_bytes]; any thread."""
        of_block = self._pool_bytes[:, block]
        out.reshape(of_block.shape)[:] = of_block

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        """Make a pool block what export_block gave; any thread."""
        of_block = self._pool_bytes[:, block]
        of_block[:] = raw.reshape(of_block.shape)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Compute the trunk segment for all token rows of the batch, and with it the head of what
        is asked for next."""
        if len(batch.late_slots):
            raise ValueError(
                "late_slots: the native executor keeps no tokens; their ids are needed"
            )
        self._reserve_angles(batch)
        self._head_of = None
        if head_rows:
            self._run(TRUNK, batch, batch.sample_rows[:head_rows], then=HEAD)
            self._head_of = batch, head_rows
        else:
            self._run(TRUNK, batch, batch.sample_rows[:0])

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """Layers first .. end - 1 of the trunk, see LayeredExecutor."""
        self._reserve_angles(batch)
        try:
            inputs = _inputs(batch, batch.sample_rows[:0])
            self._native.run_layers(TRUNK, **inputs, first=first, end=end)
        except _native.Aborted as error:
            raise WorkerError(str(error)) from error

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        """Return logits [count, vocab] of `count` <= max_samples rows of sample_rows from `first`.

        A view of the logits buffer: valid until the next call.
        """
        there, self._head_of = self._head_of, None
        if there is None or there[0] is not batch or (0, there[1]) != (first, count):
            self._run(HEAD, batch, batch.sample_rows[first : first + count])
        return self.output("logits", count)

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> NDArray[Any]:
        """See PoolingExecutor."""
        self._run(POOL, batch, batch.sample_rows[first : first + count])
        return self.output("pooled", count)

    def output(self, name: str, num_rows: int) -> NDArray[Any]:
        """See TappedExecutor; without a copy, bf16 as uint16."""
        kept = self._outputs.get((name, num_rows))
        if kept is None:
            kept = self._native.array(encode_view(self._program.outputs[name]), num_rows)
            self._outputs[name, num_rows] = kept
        return kept

    def sample(self, logits: Float32s, batch: SampleBatch) -> TokenChoice:
        """Choose a token for each row of `logits`."""
        return choose(logits, batch, self.pool)

    def score(self, logits: Float32s, batch: ScoreBatch) -> Scores:
        """Return how likely known tokens are, by the rows of `logits` (which are only read)."""
        return score(logits, batch, self.pool)

    @property
    def program(self) -> Program:
        """What it runs."""
        return self._program

    def set_timed(self, timed: bool) -> None:
        """Take times of operations from now on, beginning at zero; or no longer."""
        self._native.set_timed(timed)

    def times(self, segment: str) -> list[tuple[tuple[Op, ...], float]]:
        """Return operations that are computed as one, and the seconds they took since set_timed."""
        ops = self._program.segments.get(segment, ())
        units = self._native.units(SEGMENTS.index(segment))
        return [(ops[first : first + count], 1e-9 * ns) for first, count, ns in units]

    @property
    def ops_done(self) -> int:
        """Operations finished so far, asked from any thread: progress within a step."""
        return self._native.ops_done

    @property
    def pieces_read(self) -> int:
        """Pieces of the KV cache that attention read so far, each 256 positions of a KV head; one
        that is read for many rows at once counts once."""
        return self._native.pieces_read

    @property
    def experts_read(self) -> int:
        """Reads of an expert's weights so far; one that many rows of a step share is one read
        or, where these are over a thousand, two."""
        return self._native.experts_read

    @property
    def expert_loads(self) -> list[list[int]]:
        """For each operation with several experts, the rows that chose each expert so far."""
        return self._native.expert_loads

    def abort(self) -> None:
        """Make the run in progress raise WorkerError before its next operation. Any thread."""
        self._native.abort()

    def close(self) -> None:
        """Free threads and memory; further calls are errors."""
        self._pool_bytes = _NO_POOL
        self._outputs.clear()
        self._head_of = None
        del self._native, self.pool, self.weights

    @staticmethod
    def check_program(program: Program) -> None:
        """Raise ModelError listing what the kernels cannot hold, before anything is packed."""
        problems = problems_of(program)
        if problems:
            raise ModelError(
                f"{program.name}: the native executor cannot hold this model "
                "(--executor reference can):" + "".join(f"\n  - {problem}" for problem in problems)
            )

    @staticmethod
    def memory_for(program: Program, limits: StepLimits) -> ExecutorMemory:
        """See ExecutorClass."""
        return memory_of(program, limits)

    @staticmethod
    def plans_in_flight() -> int:
        """See ExecutorClass: a step takes all cores, so that a second one would wait."""
        return 1

    def _run(
        self, segment: int, batch: ForwardBatch, sample_rows: Int32s, then: int = NONE
    ) -> None:
        try:
            inputs = _inputs(batch, sample_rows)
            self._native.run(segment, **inputs, features=batch.features, then=then)
        except _native.Aborted as error:
            raise WorkerError(str(error)) from error

    def _reserve_angles(self, batch: ForwardBatch) -> None:
        num_positions = int(np.maximum.reduce(batch.rope_positions, initial=-1)) + 1
        if num_positions <= self._num_angles or not self._ropes:
            return
        for index, table in enumerate(self._ropes):
            table.reserve(num_positions)
            self._native.set_rope(index, table.cos, table.sin)
        self._num_angles = self._ropes[0].num_positions


def _inputs(batch: ForwardBatch, sample_rows: Int32s) -> dict[str, Any]:
    """Return the arguments of a native run."""
    (cache,) = batch.caches
    return {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "rope_positions": batch.rope_positions,
        "kv_slots": cache.kv_slots,
        "seq_starts": batch.seq_starts,
        "block_tables": cache.block_tables,
        "sample_rows": sample_rows,
        "keeps_taps": batch.keeps_taps,
    }


def place_buffers(program: Program, limits: StepLimits, pool: _native.Pool) -> _native.Program:
    """Return a native program with arenas for steps and for a part computed by layers."""
    layout, apart = lay_out(program, limits), lay_out(program, PART_LIMITS)
    native = _native.Program(pool, layout.arena_bytes, apart.arena_bytes)
    for places, is_apart in ((layout.places, False), (apart.places, True)):
        for buffer, place in zip(program.buffers, places, strict=True):
            native.add_buffer(
                rows=ROW_CODES[buffer.rows],
                offset_bytes=place.offset_bytes,
                stride=place.stride,
                max_rows=place.max_rows,
                dtype=str(buffer.dtype),
                apart=is_apart,
            )
    return native

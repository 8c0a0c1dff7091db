"""ReferenceExecutor: runs a program in NumPy, slowly and obviously.

The yardstick for the other executors: float32 arithmetic, each operation its plain twin, results
rounded where the program's buffer dtypes say. bfloat16 values are held in float32 arrays, already
rounded. All buffers are filled with NaN before a step, so nothing left over from another step
can pass unseen. Knows nothing of requests; NumPy decides how many threads its products use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CapacityError, SettingError, WorkerError
from quire.comm.communicator import Communicator, RowLink
from quire.config.machine import MachineMemory, machine_memory
from quire.execute import reference_ops as ops
from quire.execute.batch_check import check_batch, check_range, num_ids
from quire.execute.executor import (
    HEAD_ROWS,
    PART_LIMITS,
    ExecutorMemory,
    ExecutorOptions,
    Progress,
    StepLimits,
)
from quire.execute.quantized_weights import quantize_weight, read_f32
from quire.execute.reference_attention import PagedRows, attention
from quire.execute.reference_context import context_attention
from quire.execute.reference_experts import expert_parallel, experts, route
from quire.execute.rope_table import RopeTable, rope_bytes
from quire.program.batch import ForwardBatch
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.declarations import CacheSpec, Weight
from quire.program.expert_ops import Experts, Route
from quire.program.forms import IdSource
from quire.program.ops import (
    Activation,
    Add,
    Attention,
    Copy,
    Embed,
    Feed,
    GatherRows,
    Linear,
    Norm,
    Op,
    Rope,
    Scale,
    SoftCap,
    StoreKV,
    Tap,
)
from quire.program.program import Program
from quire.program.stage_ops import Recv, Send
from quire.program.tensors import DType, Rows, View
from quire.quant.fp8 import Fp8Matrix
from quire.quant.int_weights import IntMatrix
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.reference import choose
from quire.sampling.scoring import ScoreBatch, Scores, score
from quire.weights.binding import Binding, bind
from quire.weights.checkpoint import Checkpoint
from quire.weights.content import WeightsDigest
from quire.weights.dtypes import round_to_bf16

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Cache:
    """One cache group: keys and values [layers, blocks, block_size, kv_heads, head_dim]."""

    keys: PagedRows
    values: PagedRows

    @classmethod
    def zeros(cls, spec: CacheSpec, num_blocks: int, block_size: int) -> _Cache:
        shape = (spec.layers, num_blocks, block_size, spec.kv_heads, spec.head_dim)
        return cls(PagedRows.zeros(*shape), PagedRows.zeros(*shape))


class ReferenceExecutor:
    """An Executor (see executor.py).

    group: the ranks, where the program is one rank's. links: from the stage before and to the next
    one, where it is a stage's. Raises WeightsError where the checkpoint is not what the program
    needs.
    """

    name = "reference"
    recipe = "numpy"

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        *,
        group: Communicator | None = None,
        links: tuple[RowLink | None, RowLink | None] = (None, None),
    ) -> None:
        if options.pack_cache is not None:
            raise SettingError(
                "pack_cache: the reference executor packs nothing; leave it out, or take the "
                "native executor"
            )
        binding = bind(program, checkpoint)
        if options.num_threads < 1:
            raise ValueError(f"num_threads is {options.num_threads}; at least 1 is allowed")
        self._group, self._links = group, links
        digest = WeightsDigest()
        coarse: dict[str, int] = {}
        self._weights, self._few, self._experts = _load(
            program, binding, digest, coarse, options.progress
        )
        self.coarse_rows: Mapping[str, int] = coarse
        self.weights_digest = digest.text(is_part=program.is_part)
        self._prepare(program, options.limits)

    def _prepare(self, program: Program, limits: StepLimits) -> None:
        """Make what steps need besides weights and cache."""
        self._program, self._limits = program, limits
        self._ropes = [RopeTable(spec) for spec in program.ropes]
        self._buffers = self._new_buffers(self._limits.rows)
        self._apart: list[Float32s] = []  # of a part that is computed by layers
        self._layers = program.layer_starts
        self._caches: list[_Cache] = []
        self._num_blocks = self._block_size = 0
        self.ops_done = 0  # operations finished so far; read by other threads
        self._is_closed = False
        self._counts: Mapping[Rows, int] = {}
        self._sample_rows: Int32s = np.empty(0, np.int32)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Zeros in float32; each cache group has `num_blocks` blocks."""
        tokens, specs = num_blocks * block_size, self._program.caches
        try:
            self._caches = [_Cache.zeros(spec, num_blocks, block_size) for spec in specs]
        except MemoryError as error:
            needed = sum(2 * 4 * spec.layers * spec.kv_heads * spec.head_dim for spec in specs)
            raise CapacityError(
                f"{num_blocks} cache blocks of {block_size} tokens need {needed * tokens} bytes, "
                "more than there is; lower the memory for the cache"
            ) from error
        self._num_blocks, self._block_size = num_blocks, block_size

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """Do nothing: page faults do not matter here."""

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """Copy whole blocks over all layers, one after the other."""
        for source, target in zip(copy_from, copy_to, strict=True):
            for cache in self._caches:
                cache.keys.copy_block(source, target)
                cache.values.copy_block(source, target)

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block over all layers, as export_block gives them."""
        total = sum(cache.keys.nbytes + cache.values.nbytes for cache in self._caches)
        return total // self._num_blocks

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a pool block's raw bytes, values and scales over all layers, to out."""
        first = 0
        for part in self._block_parts(block):
            out[first : first + part.nbytes].view(np.float32)[:] = part.reshape(-1)
            first += part.nbytes

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        """Make a pool block what export_block gave."""
        first = 0
        for part in self._block_parts(block):
            part[:] = raw[first : first + part.nbytes].view(np.float32).reshape(part.shape)
            first += part.nbytes

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Run the trunk segment on all token rows."""
        self._check_fits(Rows.TOKENS, len(batch.token_ids))
        self._check_fits(Rows.SEQUENCES, len(batch.seq_starts) - 1)
        self._begin(batch)
        for buffer in self._buffers:
            buffer.fill(np.nan)
        self._run(self._program.segments["trunk"], batch, _counts(batch))

    @property
    def num_layers(self) -> int:
        """See LayeredExecutor."""
        return len(self._layers)

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        """Layers first .. end - 1 of the trunk, see LayeredExecutor."""
        if not 0 <= first < end <= len(self._layers):
            raise ValueError(f"layers {first} to {end} of {len(self._layers)}")
        self._begin(batch)
        if first == 0:
            self._apart = self._new_buffers((_counts(batch) | {Rows.SAMPLES: 0}).__getitem__)
        trunk, starts = self._program.segments["trunk"], self._layers
        begins = starts[first] if first else 0
        ends = starts[end] if end < len(starts) else len(trunk)
        kept, self._buffers = self._buffers, self._apart
        try:
            self._run(trunk[begins:ends], batch, _counts(batch))
        finally:
            self._buffers = kept

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        """Return logits [count, vocab] of sample_rows[first : first + count]; a view, see
        executor.py."""
        return self._run_samples("head", "logits", batch, first, count)

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        """See PoolingExecutor."""
        return self._run_samples("pool", "pooled", batch, first, count)

    def output(self, name: str, num_rows: int) -> Float32s:
        """Return the first rows of a named output of the last run; see TappedExecutor."""
        return self._read(self._program.outputs[name])[:num_rows]

    def sample(self, logits: Float32s, batch: SampleBatch) -> TokenChoice:
        """Choose a token for each row."""
        return choose(logits, batch)

    def score(self, logits: Float32s, batch: ScoreBatch) -> Scores:
        """Return how likely known tokens are, by the rows of `logits`."""
        return score(logits, batch)

    def close(self) -> None:
        """Let go of weights, buffers and cache."""
        self._is_closed = True
        self._weights, self._few, self._experts = {}, {}, {}
        self._buffers, self._apart = [], []
        self._caches, self._num_blocks = [], 0

    @staticmethod
    def check_program(program: Program) -> None:
        """NumPy holds whatever a program can say."""

    @staticmethod
    def head_rows(max_sequences: int) -> int:
        """See ExecutorClass."""
        return HEAD_ROWS

    @staticmethod
    def available_memory() -> MachineMemory:
        """See ExecutorClass."""
        return machine_memory()

    @staticmethod
    def plans_in_flight() -> int:
        """See ExecutorClass: a step takes all cores, so that a second one would wait."""
        return 1

    @staticmethod
    def full_step_tokens() -> int:
        """See ExecutorClass."""
        return 128

    @staticmethod
    def memory_for(program: Program, limits: StepLimits) -> ExecutorMemory:
        """Everything in float32, each buffer by itself, whatever the program's dtypes."""
        weights = sum(weight.size for weight in program.weights.values())
        columns = sum(
            (limits.rows(b.rows) + PART_LIMITS.rows(b.rows)) * b.width for b in program.buffers
        )
        token = sum(2 * c.layers * c.kv_heads * (c.head_dim + 1) for c in program.caches)
        return ExecutorMemory(
            weights_bytes=4 * weights,
            step_bytes=4 * columns + rope_bytes(program),
            token_bytes=4 * token,
        )

    # ---- private

    def _run_samples(
        self, segment: str, output: str, batch: ForwardBatch, first: int, count: int
    ) -> Float32s:
        """Run a segment for sample_rows[first : first + count]; return its output, a view."""
        self._check_fits(Rows.SAMPLES, count)
        self._sample_rows = batch.sample_rows[first : first + count]
        counts = {Rows.TOKENS: len(batch.token_ids), Rows.SAMPLES: count}
        self._run(self._program.segments[segment], batch, counts)
        return self._read(self._program.outputs[output])

    def _block_parts(self, block: int) -> tuple[Float32s, ...]:
        """Return views of what a block holds."""
        return tuple(
            part[:, block]
            for cache in self._caches
            for rows in (cache.keys, cache.values)
            for part in (rows.values, rows.scales)
        )

    def _check_fits(self, rows: Rows, count: int) -> None:
        if self._is_closed:
            raise WorkerError("this executor is closed; nothing can be run with it")
        most = self._limits.rows(rows)
        if count > most:
            raise ValueError(f"a step of {count} {rows}; at most {most} are allowed")

    def _begin(self, batch: ForwardBatch) -> None:
        num_caches = len(self._program.caches)
        if len(batch.caches) != max(num_caches, 1):
            raise ValueError(f"rows of {len(batch.caches)} caches; the program has {num_caches}")
        has_cache = num_caches > 0
        check_batch(
            batch if has_cache else replace(batch, caches=()),
            vocab_size=num_ids(self._program),
            num_blocks=self._num_blocks if has_cache else 1,
            block_size=self._block_size,
        )
        for table in self._ropes:
            table.reserve(int(batch.rope_positions.max(initial=-1)) + 1)

    def _new_buffers(self, rows: Callable[[Rows], int]) -> list[Float32s]:
        return [
            np.full((rows(buffer.rows), buffer.width), np.nan, np.float32)
            for buffer in self._program.buffers
        ]

    def _run(self, ops: Sequence[Op], batch: ForwardBatch, counts: Mapping[Rows, int]) -> None:
        self._counts = counts
        # BLAS kernels pad narrow rows with whatever their scratch holds: a signalling NaN there
        # raises the flag of an invalid operation though no result contains it.
        with np.errstate(invalid="ignore"):
            for op in ops:
                self._run_op(op, batch)
                self.ops_done += 1

    def _run_op(self, op: Op, batch: ForwardBatch) -> None:
        match op:
            case Embed():
                self._embed(op, batch)
            case Feed():
                self._feed(op, batch)
            case Norm():
                self._norm(op)
            case Linear():
                self._linear(op)
            case Rope():
                self._rope(op, batch)
            case StoreKV():
                self._store_kv(op, batch)
            case Attention():
                self._attention(op, batch)
            case Activation():
                self._activation(op)
            case Add():
                self._add(op)
            case Scale():
                self._scale(op)
            case SoftCap():
                self._soft_cap(op)
            case Tap() if not batch.keeps_taps:
                pass
            case Copy() | Tap():
                self._copy(op)
            case GatherRows():
                self._gather_rows(op)
            case Route():
                self._write(op.y, route(op, self._read(op.x), self._weight(op.bias)))
            case Experts():
                self._run_experts(op)
            case AllGather():
                self._all_gather(op)
            case AllReduce():
                self._all_reduce(op)
            case Send():
                self._link(op).send_rows(
                    self._read(op.x).astype(np.float32, order="C").view(np.uint8)
                )
            case Recv():
                self._recv(op)
            case _:
                assert_never(op)

    def _read(self, view: View) -> Float32s:
        rows = self._counts[view.buffer.rows]
        return self._buffers[view.buffer.index][:rows, view.offset : view.offset + view.width]

    def _write(self, view: View, values: Float32s) -> None:
        assert values.dtype == np.float32, f"{view} was given {values.dtype}: f32 is meant"
        self._read(view)[:] = round_to_bf16(values) if view.dtype is DType.BF16 else values

    def _weight(self, name: str | None) -> Float32s | None:
        return None if name is None else self._weights[name]

    def _embed(self, op: Embed, batch: ForwardBatch) -> None:
        name = op.weight
        table = self._few[name].dequantized() if name in self._few else self._weights[name]
        if op.ids is IdSource.TOKENS:
            ids = batch.token_ids
        else:
            ids = batch.rope_positions
            check_range("rope_positions", ids, 0, len(table))
        self._write(op.y, ops.embed(table, ids))

    def _feed(self, op: Feed, batch: ForwardBatch) -> None:
        read, shape = batch.features, (len(batch.token_ids), op.y.width)
        if read is None or read.shape != shape:
            found = None if read is None else list(read.shape)
            raise ValueError(f"features are {found}; {list(shape)} are read")
        self._write(op.y, ops.copy(read))

    def _norm(self, op: Norm) -> None:
        if op.delta is not None:
            self._write(op.x, ops.add(self._read(op.x), self._read(op.delta)))
        y = ops.norm(
            self._read(op.x),
            self._weight(op.weight),
            eps=op.eps,
            form=op.form,
            bias=self._weight(op.bias),
            group=op.group,
        )
        self._write(op.y, y)

    def _linear(self, op: Linear) -> None:
        weight = self._few[op.weight] if op.weight in self._few else self._weights[op.weight]
        self._write(op.y, ops.product(self._read(op.x), weight, self._weight(op.bias)))

    def _run_experts(self, op: Experts) -> None:
        if op.holders:
            self._run_expert_parallel(op)
            return
        y = experts(
            op,
            self._read(op.x),
            self._read(op.routing),
            self._experts[op.gate_up],
            self._experts[op.down],
            round_inner=round_to_bf16 if op.x.dtype is DType.BF16 else ops.copy,
            whole_inner=partial(self._gathered, op, self._program.weights[op.down].columns),
        )
        self._write(op.y, y)

    def _run_expert_parallel(self, op: Experts) -> None:
        y = expert_parallel(
            op,
            self._read(op.x),
            self._read(op.routing),
            self._experts[op.gate_up],
            self._experts[op.down],
            round_inner=round_to_bf16 if op.x.dtype is DType.BF16 else ops.copy,
            all_ranks=self._group_of(op).all_gather,
        )
        self._write(op.y, y)

    def _rope(self, op: Rope, batch: ForwardBatch) -> None:
        table = self._ropes[op.rope]
        y = ops.rope(
            self._read(op.x),
            table.cos[batch.rope_positions],
            table.sin[batch.rope_positions],
            heads=op.heads,
            head_dim=op.head_dim,
        )
        self._write(op.x, y)

    def _store_kv(self, op: StoreKV, batch: ForwardBatch) -> None:
        spec, cache = self._program.caches[op.cache], self._caches[op.cache]
        kv_slots = batch.caches[op.cache].kv_slots
        for paged, view in ((cache.keys, op.k), (cache.values, op.v)):
            paged.layer(op.layer).store(self._read(view), kv_slots, spec.dtype, spec.scheme)

    def _attention(self, op: Attention, batch: ForwardBatch) -> None:
        if op.degree > 1:
            self._context_attention(op, batch)
            return
        layer, cache = op.layer, self._caches[op.cache]
        y = attention(
            self._read(op.q),
            cache.keys.layer(layer),
            cache.values.layer(layer),
            seq_starts=batch.seq_starts,
            positions=batch.positions,
            block_tables=batch.caches[op.cache].block_tables,
            heads=op.heads,
            scale=op.scale,
            window=op.window,
            soft_cap=op.soft_cap,
            dtype=self._program.caches[op.cache].dtype,
        )
        self._write(op.y, y)

    def _context_attention(self, op: Attention, batch: ForwardBatch) -> None:
        cache, group = self._caches[op.cache], self._group
        if group is None or group.degree % op.degree or group.rank % op.degree != op.rank:
            raise ValueError(f"{op.kind}: there are no ranks, or others, to exchange with")
        y = context_attention(
            op,
            self._read(op.q),
            cache.keys.layer(op.layer),
            cache.values.layer(op.layer),
            seq_starts=batch.seq_starts,
            positions=batch.positions,
            block_tables=batch.caches[op.cache].block_tables,
            dtype=self._program.caches[op.cache].dtype,
            first_rank=group.rank - op.rank,
            all_ranks=group.all_gather,
        )
        self._write(op.y, y)

    def _activation(self, op: Activation) -> None:
        up = None if op.up is None else self._read(op.up)
        self._write(op.y, ops.activation(self._read(op.gate), up, form=op.form))

    def _add(self, op: Add) -> None:
        self._write(op.x, ops.add(self._read(op.x), self._read(op.y)))

    def _scale(self, op: Scale) -> None:
        self._write(op.x, ops.scale(self._read(op.x), op.factor))

    def _soft_cap(self, op: SoftCap) -> None:
        self._write(op.x, ops.soft_cap(self._read(op.x), op.cap))

    def _copy(self, op: Copy | Tap) -> None:
        self._write(op.y, ops.copy(self._read(op.x)))

    def _all_gather(self, op: AllGather) -> None:
        own = op.own
        self._read(op.x)[:] = self._gathered(op, op.x.width, self._read(own))

    def _all_reduce(self, op: AllReduce) -> None:
        own = np.ascontiguousarray(self._read(op.x))
        parts = self._group_of(op).all_gather(own.reshape(-1).view(np.uint8))
        total = np.zeros_like(own)
        for part in parts:  # in the order of ranks
            total += part.view(np.float32).reshape(own.shape)
        self._write(op.x, total)

    def _recv(self, op: Recv) -> None:
        y = self._read(op.y)
        rows = np.empty(y.shape, np.float32)
        self._link(op).receive_rows(rows.view(np.uint8))
        y[:] = rows

    def _link(self, op: Send | Recv) -> RowLink:
        link = self._links[isinstance(op, Send)]
        if link is None:
            raise ValueError(f"{op.kind}: there is no link to another stage")
        return link

    def _gathered(self, op: AllGather | Experts, width: int, columns: Float32s) -> Float32s:
        """Return all `width` columns, from those of this rank."""
        if op.degree == 1:
            return columns
        group = self._group_of(op)
        shares = [share_of(width, op.unit, rank, op.degree) for rank in range(op.degree)]
        widest = max(end - start for start, end in shares)
        own = np.zeros((len(columns), widest), np.float32)  # parts are exchanged at equal sizes
        own[:, : columns.shape[1]] = columns
        parts = group.all_gather(own.reshape(-1).view(np.uint8))
        rows = [part.view(np.float32).reshape(own.shape) for part in parts]
        return np.concatenate(
            [part[:, : end - start] for part, (start, end) in zip(rows, shares, strict=True)],
            axis=1,
        )

    def _group_of(self, op: AllGather | AllReduce | Experts) -> Communicator:
        if self._group is None or (self._group.rank, self._group.degree) != (op.rank, op.degree):
            raise ValueError(f"{op.kind}: there are no ranks, or others, to exchange with")
        return self._group

    def _gather_rows(self, op: GatherRows) -> None:
        x = self._read(op.x)
        self._write(op.y, ops.gather_rows(x, self._sample_rows))


def _counts(batch: ForwardBatch) -> dict[Rows, int]:
    return {Rows.TOKENS: len(batch.token_ids), Rows.SEQUENCES: len(batch.seq_starts) - 1}


def _load(
    program: Program,
    binding: Binding,
    digest: WeightsDigest,
    coarse: dict[str, int],
    progress: Progress | None,
) -> tuple[dict[str, Float32s], dict[str, IntMatrix | Fp8Matrix], dict[str, list[ops.Matrix]]]:
    """Return weights in float32, [rows, columns] or [rows] of a vector; those in few bits; and
    those with an expert axis, a matrix per expert."""
    loaded: dict[str, Float32s] = {}
    few: dict[str, IntMatrix | Fp8Matrix] = {}
    of_experts: dict[str, list[ops.Matrix]] = {}
    total, done = program.weight_bytes, 0
    for name, weight in program.weights.items():
        matrices = [_matrix(one, binding, coarse, name) for one in (weight.by_expert() or [weight])]
        if weight.experts:
            of_experts[name] = matrices
        elif isinstance(matrices[0], np.ndarray):
            loaded[name] = matrices[0]
        else:
            few[name] = matrices[0]
        for part in weight.parts:
            if not digest.holds(stored := binding.content(part)):
                digest.add(stored)
            binding.release(part)
        done += weight.num_bytes
        if progress is not None:
            progress(done, total)
    for source in program.elsewhere:
        digest.add(binding.content_of(source))
        binding.release_source(source)
    return loaded, few, of_experts


def _matrix(weight: Weight, binding: Binding, coarse: dict[str, int], name: str) -> ops.Matrix:
    """Return a weight as it is kept; the rows that 8 bits are too coarse for are counted under
    `name`."""
    if weight.quantized is None:
        values = read_f32(weight, binding)
        return round_to_bf16(values) if weight.dtype is DType.BF16 else values
    matrix, count = quantize_weight(weight, binding)
    if count:
        coarse[name] = coarse.get(name, 0) + count
    return matrix

"""`quire bench kernels`: each operation of a model alone, beside the machine's limits.

Products in several precisions and row counts, attention at several depths, the small operations,
and sampling. Shapes are the model's, weights are random. Always holds: an operation is timed only
after some of its rows were checked against the NumPy twin. The share is that of the operation's
floor (floor.py) at the memory bandwidth of that moment; there is none where the bytes came from
caches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.errors import SettingError, WorkerError
from quire.bench.floor import CACHED, op_floor_s, program_of, share_text
from quire.bench.limits import READ, machine_limits
from quire.bench.reading import ReadProbe
from quire.bench.report import result
from quire.bench.sampling_cases import ASKED, check_choice, choice_batch
from quire.bench.single_op import (
    BLOCK_SIZE,
    PIECE_ROWS,
    TABLE_ROWS,
    RandomTensors,
    Sequences,
    SingleOp,
    rows_batch,
)
from quire.config.flags import engine_config
from quire.config.machine import num_compute_threads
from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.hub.cache import with_local_model
from quire.obs.report import Progress, table
from quire.program.batch import ForwardBatch
from quire.program.cost import StepShape
from quire.program.ops import (
    Activation,
    Add,
    Attention,
    Linear,
    Norm,
    Op,
    Rope,
    Scale,
    SoftCap,
)
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.sampling.native import choose
from quire.weights.dtypes import from_bf16_bits

T = TypeVar("T", bound=Op)

PARTS = ("products", "attention", "small", "choice")
COLD_BYTES = 400 << 20  # of weights, or keys and values, that a call goes through
MANY_ROWS = 64  # from here on arithmetic bounds products, and two copies do
PREFILL_TOKENS, SEQUENCES = 256, 16
_MAX_COPIES = 512
_MIN_CALLS = 3
_SMALL: tuple[type[Op], ...] = (Norm, Rope, Activation, Add, Scale, SoftCap)
# Of the root of the mean square of a result, and of each of its elements.
_TOLERANCE = {DType.BF16: 2.0**-7, DType.F32: 1e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What to measure: parts, precisions, rows and depths, and seconds for each case."""

    parts: tuple[str, ...] = PARTS
    precisions: tuple[str, ...] = ("none", "int8", "int4")
    rows: tuple[int, ...] = (1, 4, 16, 64, 256, 2048)
    depths: tuple[int, ...] = (512, 4096)
    seconds: float = 0.2

    def __post_init__(self) -> None:
        if unknown := set(self.parts) - set(PARTS):
            raise SettingError(f"parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
        if min(self.rows) < 1 or min(self.depths) < 0:
            raise SettingError("rows are at least 1, depths at least 0")


def measure_kernels(
    model: str,
    settings: Mapping[str, Any],
    asked: KernelOptions,
    *,
    progress: Progress | None = None,
) -> dict[str, object]:
    """Return the result. Raises SettingError, ModelError, and WorkerError for a wrong result."""
    progress = progress or Progress()
    config = with_local_model(engine_config({"model": model, **settings}))
    threads = num_compute_threads(config.executor.num_threads)
    program = program_of(model, {**settings, "quantization": "none"})
    progress.say("measuring the machine")
    limits = machine_limits(threads)
    found: list[dict[str, Any]] = []
    with ReadProbe(threads) as probe:
        bench = _Bench(threads, limits, probe, asked, progress)
        for part in asked.parts:
            found += _PARTS[part](bench, program)
    progress.clear()
    return result(
        "kernels",
        {"model": program.name, **settings, **_as_dict(asked)},
        threads=threads,
        kernels=_native.isa(),
        dtype=str(program.caches[0].dtype),
        kv_cache_dtype=program.caches[0].precision,
        limits=limits,
        measured=found,
    )


def kernels_text(outcome: Mapping[str, Any]) -> str:
    """Return a table for each part."""
    about = (
        f"{outcome['settings']['model']}: {outcome['kernels']}, {outcome['threads']} threads, "
        f"memory {outcome['limits'][READ]:.1f} GB/s; each result is what NumPy makes of it"
    )
    headings = ("rows", "ms", "GB/s", "GFLOP/s", "of the limit")
    tables = []
    for part in outcome["settings"]["parts"]:
        rows = [_row(one) for one in outcome["measured"] if one["part"] == part]
        if rows:
            tables.append(table((part, *headings), rows))
    notes = (
        [f"{CACHED}: its bytes came faster than memory reads, so that memory is no limit to it"]
        if any(one["share"] > 1 for one in outcome["measured"])
        else []
    )
    return "\n\n".join([about, *tables, *notes])


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        one["what"],
        str(one["rows"]),
        f"{1e3 * one['seconds']:.4f}",
        f"{one['gb_per_s']:.1f}" if one["gb_per_s"] else "-",
        f"{one['gflop_per_s']:.1f}" if one["gflop_per_s"] else "-",
        share_text(one["floor_s"], one["seconds"]) if one["floor_s"] else "-",
    )


# ---- parts


class _Bench:
    """Shared state of all parts of the measurement."""

    def __init__(
        self,
        threads: int,
        limits: Mapping[str, float],
        probe: ReadProbe,
        asked: KernelOptions,
        progress: Progress,
    ) -> None:
        self.threads, self.asked = threads, asked
        self._limits, self._probe, self._progress = limits, probe, progress

    def lone(
        self, part: str, what: str, lone: SingleOp, cases: Sequence[tuple[ForwardBatch, StepShape]],
        twin: Callable[[ForwardBatch], tuple[NDArray[np.intp], NDArray[np.float32]]],
        prepare: Callable[[Executor], None],
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Measure an operation at several batches. twin: some rows and their expected values."""
        most = max(len(batch.token_ids) for batch, _ in cases)
        with closing(_executor(NativeExecutor, lone.program, most, self.threads)) as executor:
            prepare(executor)
            for batch, shape in cases:
                self._progress.say(f"{part}: {what}, {len(batch.token_ids)} rows")
                executor.run_trunk(batch)
                rows, wanted = twin(batch)
                _check(_head(executor, batch)[rows], wanted, lone, what)
                # The small ones' rows lie in caches: only arithmetic is a limit to them.
                read = math.inf if part == "small" else self._probe.gb_per_s(rounds=1)
                now = {**self._limits, READ: read}
                seconds = self._median_s(executor, batch) / len(lone.ops)
                cost = lone.ops[0].cost(lone.program, shape)
                num_bytes = cost.memory_bytes if part != "small" else cost.buffer_bytes
                floor_s = op_floor_s(lone.program, lone.ops[0], cost, now)
                yield _entry(part, what, batch, seconds, num_bytes, cost.operations, floor_s)

    def choice(
        self, what: str, logits: NDArray[np.float32], asked: Mapping[str, float]
    ) -> dict[str, Any]:
        """Measure sampling of these rows."""
        self._progress.say(f"choice: {what}, {len(logits)} rows")
        pool, batch = _native.Pool(self.threads), choice_batch(len(logits), asked)
        check_choice(choose(logits, batch, pool), logits, asked, what)
        floor_s = logits.nbytes / (1e9 * self._probe.gb_per_s(rounds=1))

        def call() -> float:
            began_s = time.perf_counter()
            choose(logits, batch, pool)
            return time.perf_counter() - began_s

        seconds = statistics.median(_calls(call, self.asked.seconds))
        return _entry("choice", what, logits, seconds, logits.nbytes, 0, floor_s)

    def _median_s(self, executor: Executor, batch: ForwardBatch) -> float:
        """Return the median time of all copies."""
        return statistics.median(_calls(lambda: _timed(executor, batch), self.asked.seconds))


def _products(bench: _Bench, program: Program) -> Iterator[dict[str, Any]]:
    """Measure each shape in each precision; weights for few rows come from memory, not caches."""
    for scheme in bench.asked.precisions:
        written = quantize(program, scheme, head=scheme)
        for op in _distinct(written, Linear):
            weight = written.weights[op.weight]
            what = f"{weight.columns} -> {weight.rows} {weight.scheme or weight.dtype}"
            few = [rows for rows in bench.asked.rows if rows <= MANY_ROWS]
            many = [rows for rows in bench.asked.rows if rows > MANY_ROWS]
            cold = min(max(COLD_BYTES // weight.num_bytes, 1), _MAX_COPIES)
            for counts, copies in ((few, cold), (many, min(cold, 2))):
                if counts:
                    yield from _of_rows(bench, "products", what, written, op, copies, counts)


def _small(bench: _Bench, program: Program) -> Iterator[dict[str, Any]]:
    """Measure operations without products."""
    for op in _distinct(program, _SMALL):
        form = op.form if isinstance(op, (Norm, Activation)) else ""
        what = " ".join(str(word) for word in (op.kind, form, op.inputs[0].width) if word)
        if isinstance(op, Norm):
            what += f", heads of {op.group}" if op.group else ""
            what += " after a sum" if op.delta is not None else ""
        yield from _of_rows(bench, "small", what, program, op, 1, bench.asked.rows)


def _of_rows(
    bench: _Bench,
    part: str,
    what: str,
    program: Program,
    op: Op,
    copies: int,
    counts: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Measure an operation that does not use the KV cache, at several row counts."""
    lone = SingleOp(program, op, copies=copies)
    small = SingleOp(program, op, one_piece=True)
    rng = np.random.default_rng(0)

    def drawn(count: int) -> tuple[ForwardBatch, StepShape]:
        ids = rng.integers(0, TABLE_ROWS, count).astype(np.int32)
        positions = rng.integers(0, program.max_positions, count).astype(np.int32)
        return rows_batch(ids, positions), StepShape([1] * count, [0] * count)

    with closing(_executor(ReferenceExecutor, small.program, 3, 1)) as reference:
        reference.allocate_cache(1, BLOCK_SIZE)

        def twin(batch: ForwardBatch) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
            rows = _some_rows(len(batch.token_ids))
            few = rows_batch(batch.token_ids[rows], batch.rope_positions[rows])
            reference.run_trunk(few)
            return rows, _head(reference, few)

        def prepare(executor: Executor) -> None:
            executor.allocate_cache(1, BLOCK_SIZE)

        yield from bench.lone(part, what, lone, [drawn(count) for count in counts], twin, prepare)


def _attention(bench: _Bench, program: Program) -> Iterator[dict[str, Any]]:
    """Measure one row, rows of several sequences, and a prompt chunk, each at several depths."""
    for op in _distinct(program, Attention):
        for depth in sorted(
            {min(depth, program.max_positions - 1) for depth in bench.asked.depths}
        ):
            chunk = min(PREFILL_TOKENS, program.max_positions - depth)
            cases = [(f"row at depth {depth}", 1, 1)]
            cases += [(f"{SEQUENCES} rows at depth {depth}", SEQUENCES, 1)]
            cases += [(f"chunk of {chunk} at depth {depth}", 1, chunk)] * (chunk > 1)
            for what, sequences, count in cases:
                window = f", window {op.window}" if op.window else ""
                yield from _attend(bench, f"{what}{window}", program, op, sequences, depth, count)


def _attend(
    bench: _Bench, what: str, program: Program, op: Op, sequences: int, depth: int, count: int
) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, TABLE_ROWS, (sequences, depth + count)).astype(np.int32)
    held = Sequences(ids)
    layer_bytes = ids.size * program.caches[0].token_bytes // program.caches[0].layers
    copies = 2 if count > 1 else min(max(COLD_BYTES // layer_bytes, 1), _MAX_COPIES)
    lone = SingleOp(program, op, copies=copies)
    shape = StepShape([count] * sequences, [depth] * sequences)

    def twin(batch: ForwardBatch) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Return the first and the last row, each of a sequence of its own in the twin's cache."""
        small, rows, wanted = SingleOp(program, op), [], []
        for sequence, row in dict.fromkeys([(0, 0), (sequences - 1, count - 1)]):
            alone = Sequences(ids[sequence : sequence + 1])
            with closing(
                _executor(ReferenceExecutor, small.program, depth + count, 1)
            ) as reference:
                reference.allocate_cache(alone.num_blocks, BLOCK_SIZE)
                alone.store(reference)
                one = alone.batch([0], depth + row, 1)
                reference.run_trunk(one)
                wanted.append(_head(reference, one))
            rows.append(sequence * count + row)
        return np.array(rows), np.concatenate(wanted)

    def prepare(executor: Executor) -> None:
        executor.allocate_cache(held.num_blocks, BLOCK_SIZE)
        held.store(executor)

    batch = held.batch(range(sequences), depth, count)
    yield from bench.lone("attention", what, lone, [(batch, shape)], twin, prepare)


def _choice(bench: _Bench, program: Program) -> Iterator[dict[str, Any]]:
    """Measure sampling over the vocabulary, for one row and for several."""
    rng = np.random.default_rng(2)
    logits = 3 * rng.standard_normal((SEQUENCES, program.vocab_size), np.float32)
    for what, asked in ASKED.items():
        for rows in (1, SEQUENCES):
            yield bench.choice(what, logits[:rows], asked)


_PARTS: Mapping[str, Callable[[_Bench, Program], Iterator[dict[str, Any]]]] = {
    "products": _products,
    "attention": _attention,
    "small": _small,
    "choice": _choice,
}


# ---- shared


def _distinct(program: Program, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Return operations of these kinds that differ in more than their layer."""
    found: dict[object, T] = {}
    for ops in program.segments.values():
        for op in ops:
            if isinstance(op, kind):
                found.setdefault(_likeness(program, op), op)
    return [*found.values()]


def _likeness(program: Program, op: Op) -> object:
    views = tuple((view.width, view.dtype) for view in (*op.inputs, *op.outputs))
    weights = tuple(
        (weight.rows, weight.columns, weight.scheme)
        for weight in (program.weights[name] for name in op.weights)
    )
    named = ("weight", "bias", "layer", "rope")
    rest = {name: value for name, value in op.parameters.items() if name not in named}
    return op.kind, views, weights, tuple(sorted(rest.items()))


def _executor(
    make: type[NativeExecutor | ReferenceExecutor], program: Program, rows: int, threads: int
) -> NativeExecutor | ReferenceExecutor:
    rows = max(rows, PREFILL_TOKENS * 2)
    return make(
        program,
        RandomTensors(program),
        ExecutorOptions(
            limits=StepLimits(max_tokens=rows, max_samples=rows, max_sequences=rows),
            num_threads=threads,
        ),
    )


def _head(executor: Executor, batch: ForwardBatch) -> NDArray[np.float32]:
    """Return the operation's output as float32."""
    found: NDArray[Any] = executor.run_head(batch, 0, len(batch.token_ids))
    return from_bf16_bits(found) if found.dtype == np.uint16 else found.copy()


def _timed(executor: Executor, batch: ForwardBatch) -> float:
    """Return the seconds of all copies of the operation, after renewing its inputs."""
    assert isinstance(executor, NativeExecutor)
    executor.run_trunk(batch)
    executor.set_timed(True)
    executor.run_head(batch, 0, len(batch.token_ids))
    taken_s = sum(seconds for _, seconds in executor.times("head"))
    executor.set_timed(False)
    return taken_s


def _calls(call: Callable[[], float], seconds: float) -> list[float]:
    """Return the times reported by repeated calls within `seconds`, at least _MIN_CALLS."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(found) < _MIN_CALLS or time.perf_counter() < end_s:
        found.append(call())
    return found


def _check(
    found: NDArray[np.float32], wanted: NDArray[np.float32], lone: SingleOp, what: str
) -> None:
    """Raise WorkerError unless the rows equal the twin's, which repeat where weights do."""
    of_wanted = np.arange(found.shape[1]) % wanted.shape[1]
    if wanted.shape[1] < found.shape[1]:
        of_wanted = np.arange(found.shape[1]) % PIECE_ROWS
    wanted = wanted[:, of_wanted]
    tolerance = _TOLERANCE[lone.ops[0].inputs[0].dtype]
    allowed = tolerance * (np.abs(wanted) + np.sqrt(np.mean(wanted**2)))
    is_wrong = ~(np.abs(found - wanted) <= allowed)  # NaN is wrong
    if is_wrong.any():
        row, column = np.argwhere(is_wrong)[0]
        raise WorkerError(
            f"{lone.program.name}, {what}: element {row}, {column} is {found[row, column]}, NumPy "
            f"says {wanted[row, column]}; no times of wrong results are reported"
        )


def _some_rows(count: int) -> NDArray[np.intp]:
    """Return the first, the middle and the last row."""
    return np.unique([0, count // 2, count - 1])


def _entry(
    part: str, what: str, rows: Any, seconds: float, num_bytes: int, operations: int, floor_s: float
) -> dict[str, Any]:
    count = len(rows.token_ids) if isinstance(rows, ForwardBatch) else len(rows)
    return {
        "part": part,
        "what": what,
        "rows": count,
        "seconds": seconds,
        "gb_per_s": num_bytes / seconds / 1e9,
        "gflop_per_s": operations / seconds / 1e9,
        "floor_s": floor_s,
        "share": floor_s / seconds,
    }


def _as_dict(asked: KernelOptions) -> dict[str, object]:
    return {
        "parts": list(asked.parts),
        "precisions": list(asked.precisions),
        "rows": list(asked.rows),
        "depths": list(asked.depths),
    }

"""`quire bench kernels`: where a step's time goes, by kind of operation.

The executor counts operations as it does them; a thread looks at that count some thousand times a
second while the same step is computed over and over, so each look tells which operation was at
work. Shares of looks times the step's own time (measured without looking) are the times told. No
kernel is timed by itself: caches and memory are as in service. Bytes and operations are those of
the program's cost model.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.errors import SettingError, WorkerError
from quire.bench.floor import program_of
from quire.bench.reading import ReadProbe
from quire.bench.report import Progress, result, table
from quire.bench.workloads import draw_ids
from quire.config.machine import num_usable_cpus
from quire.execute.native import NativeExecutor
from quire.models.registry import box_path
from quire.program.batch import ForwardBatch
from quire.program.cost import Cost, StepShape, op_cost
from quire.program.ops import Op, OpKind
from quire.program.program import Program
from quire.weights.checkpoint import open_checkpoint

BLOCK_SIZE = 16
LOOK_EVERY_S = 2e-5  # asked for; what a sleeping thread gets is some 4 times as much
SEGMENTS = ("trunk", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to be measured: each of `sequences` computes `tokens` rows after `depth` others."""

    tokens: int = 1
    depth: int = 0
    sequences: int = 1

    @property
    def shape(self) -> StepShape:
        """As the cost model takes it; one row of each sequence goes through the head."""
        return StepShape([self.tokens] * self.sequences, [self.depth] * self.sequences)


def measure_kernels(
    model: str,
    step: Step,
    *,
    dtype: str = "auto",
    num_threads: int | None = None,
    seconds: float = 3.0,
    peak_gflops: float | None = None,
    progress: Progress | None = None,
) -> dict[str, object]:
    """The result object. Raises SettingError, ModelError, CapacityError."""
    progress = progress or Progress()
    program = program_of(model, dtype)
    _check(step, program)
    threads = num_threads or num_usable_cpus()
    rows = step.tokens * step.sequences
    progress.say("packing the weights")
    executor = NativeExecutor(
        program,
        open_checkpoint(Path(model).expanduser() if model else box_path()),
        max_tokens=rows,
        max_samples=step.sequences,
        max_sequences=step.sequences,
        num_threads=threads,
    )
    with closing(executor), ReadProbe(threads) as probe:
        batch = _batch(step, program)
        executor.allocate_cache(int(batch.block_tables.max()) + 1, BLOCK_SIZE)
        progress.say("measuring")
        read_gb_per_s = probe.gb_per_s()
        calls: dict[str, Callable[[], object]] = {
            "trunk": lambda: executor.run_trunk(batch),
            "head": lambda: executor.run_head(batch, 0, step.sequences),
        }
        parts: dict[str, dict[str, Any]] = {}
        for segment in SEGMENTS:
            ops = program.segments[segment]
            own_s = _seconds_each(calls[segment], seconds / 2)
            looks = _looks(calls[segment], executor, len(ops), seconds / 2)
            for part in _by_kind(program, ops, step.shape, looks, own_s):
                _join(parts.setdefault(part["kind"], {"kind": part["kind"]}), part)
        recipe = executor.recipe
    progress.clear()
    total_s = sum(part["seconds"] for part in parts.values())
    for part in parts.values():
        _add_rates(part, total_s, read_gb_per_s, peak_gflops)
    return result(
        "kernels",
        {
            "model": program.name,
            "tokens": step.tokens,
            "depth": step.depth,
            "sequences": step.sequences,
            "threads": threads,
            "recipe": recipe,
        },
        step_s=total_s,
        read_gb_per_s=read_gb_per_s,
        peak_gflops=peak_gflops,
        kinds=sorted(parts.values(), key=lambda part: -float(part["seconds"])),
    )


def kernels_text(outcome: Mapping[str, Any]) -> str:
    """A line a kind, the longest first."""
    settings = outcome["settings"]
    title = (
        f"{settings['model']}, {settings['recipe']}, {settings['threads']} threads: a step of "
        f"{settings['sequences']} x {settings['tokens']} rows at depth {settings['depth']} takes "
        f"{1e3 * outcome['step_s']:.2f} ms; memory reads {outcome['read_gb_per_s']:.1f} GB/s"
    )
    headings = ("operation", "times", "ms", "share", "GB/s", "of memory", "GFLOP/s", "of peak")
    rows = [
        (
            part["kind"],
            str(part["num_ops"]),
            f"{1e3 * part['seconds']:.3f}",
            f"{100 * part['share']:.1f} %",
            f"{part['gb_per_s']:.1f}",
            f"{100 * part['memory_share']:.0f} %",
            f"{part['gflops']:.1f}",
            "-" if part["peak_share"] is None else f"{100 * part['peak_share']:.0f} %",
        )
        for part in outcome["kinds"]
    ]
    return f"{title}\n{table(headings, rows)}"


def _check(step: Step, program: Program) -> None:
    for name in ("tokens", "sequences"):
        if getattr(step, name) < 1:
            raise SettingError(f"{name} is {getattr(step, name)}; at least 1 is needed")
    if step.depth < 0 or step.depth + step.tokens > program.max_positions:
        raise SettingError(
            f"depth {step.depth} and {step.tokens} tokens; 0 to {program.max_positions} positions "
            "are allowed for this model"
        )


def _batch(step: Step, program: Program) -> ForwardBatch:
    """Every sequence with blocks of its own; what they attend to is whatever the cache holds."""
    longest = step.depth + step.tokens
    columns = -(-longest // BLOCK_SIZE)
    tables = np.arange(step.sequences * columns, dtype=np.int32).reshape(step.sequences, columns)
    positions = np.arange(step.depth, longest, dtype=np.int32)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = step.tokens * step.sequences
    ids = draw_ids(rows, program.vocab_size, np.random.default_rng(0))
    everywhere = np.tile(positions, step.sequences)
    return ForwardBatch(
        token_ids=ids.astype(np.int32),
        positions=everywhere,
        rope_positions=everywhere,
        kv_slots=np.ascontiguousarray(slots.reshape(-1), np.int32),
        seq_starts=np.arange(0, rows + 1, step.tokens, dtype=np.int32),
        block_tables=tables,
        sample_rows=np.arange(step.tokens - 1, rows, step.tokens, dtype=np.int32),
    )


def _seconds_each(call: Callable[[], object], seconds: float) -> float:
    """Median of calls made for so long, after two to warm up; at least three count."""
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    call(), call()
    while len(times) < 3 or time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def _looks(
    call: Callable[[], object], executor: NativeExecutor, num_ops: int, seconds: float
) -> Counter[int]:
    """How often each operation of the segment was the one at work."""
    looks: Counter[int] = Counter()
    running = threading.Event()
    done = threading.Event()
    first = [0]

    def look() -> None:
        while not done.is_set():
            if running.is_set():
                began, at = first[0], executor.ops_done
                if running.is_set() and 0 <= at - began < num_ops:
                    looks[at - began] += 1
            time.sleep(LOOK_EVERY_S)

    watcher = threading.Thread(target=look, name="quire-looks", daemon=True)
    watcher.start()
    end_s = time.perf_counter() + seconds
    try:
        num_calls = 0
        while num_calls < 3 or time.perf_counter() < end_s:
            first[0] = executor.ops_done
            running.set()
            call()
            running.clear()
            num_calls += 1
            if executor.ops_done - first[0] != num_ops:
                raise WorkerError(
                    f"the executor counted {executor.ops_done - first[0]} operations of "
                    f"{num_ops}; times by kind cannot be told"
                )
    finally:
        done.set()
        watcher.join()
    return looks


def _by_kind(
    program: Program, ops: tuple[Op, ...], step: StepShape, looks: Counter[int], seconds: float
) -> list[dict[str, Any]]:
    """One entry a kind, products apart by the shape of their weight."""
    costs: dict[str, Cost] = {}
    counted: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for index, op in enumerate(ops):
        kind = _name(program, op)
        costs[kind] = costs.get(kind, Cost()) + op_cost(program, op, step)
        counted[kind] += 1
        seen[kind] += looks[index]
    total = max(sum(seen.values()), 1)
    return [
        {
            "kind": kind,
            "num_ops": counted[kind],
            "looks": seen[kind],
            "seconds": seconds * seen[kind] / total,
            "memory_bytes": cost.memory_bytes,
            "operations": cost.operations,
        }
        for kind, cost in costs.items()
    ]


def _join(known: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add the numbers of a kind that occurs in another segment as well."""
    for name, value in part.items():
        if name != "kind":
            known[name] = known.get(name, 0) + value


def _name(program: Program, op: Op) -> str:
    if op.kind is not OpKind.LINEAR:
        return str(op.kind)
    weight = program.weights[op.attrs["weight"]]
    return f"linear {weight.columns} -> {weight.rows}"


def _add_rates(
    part: dict[str, Any], total_s: float, read_gb_per_s: float, peak_gflops: float | None
) -> None:
    seconds = max(part["seconds"], 1e-12)
    known = part["looks"] > 0  # too short to be met at work: no rate is told
    part["share"] = part["seconds"] / total_s
    part["gb_per_s"] = part["memory_bytes"] / seconds / 1e9 if known else 0.0
    part["gflops"] = part["operations"] / seconds / 1e9 if known else 0.0
    part["memory_share"] = part["gb_per_s"] / read_gb_per_s
    part["peak_share"] = None if peak_gflops is None else part["gflops"] / peak_gflops

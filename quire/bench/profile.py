"""`quire profile`: where the time of a step goes, beside the machine's limits, and advice.

Made-up steps are computed repeatedly by the engine's own runner with the given settings: one row at
depth, a full prompt chunk, and rows at depth beside a chunk. The executor times each operation
(fused ones together), so that caches and memory behave as in service. The rest of a step is Python.
Floors are max(bytes / bandwidth, operations / peak) with the counts of the program's cost model.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire import _native
from quire.base.clock import Clock
from quire.base.errors import SettingError
from quire.base.records import NO_INTS, StepPlan
from quire.base.report import Field
from quire.base.sampling_params import SamplingParams
from quire.bench.floor import CACHED, arithmetic_s, op_floor_s, share_text
from quire.bench.limits import FORK_JOIN, READ, machine_limits
from quire.bench.reading import ReadProbe
from quire.bench.report import result
from quire.config.flags import engine_config
from quire.config.machine import num_usable_cores
from quire.engine.assembly.assemble import assemble
from quire.engine.assembly.warm_up import made_up_plan
from quire.execute.native import SEGMENTS, NativeExecutor
from quire.hub.cache import with_local_model
from quire.obs.report import Progress, table
from quire.program.cost import Cost, StepShape
from quire.program.expert_ops import Experts
from quire.program.ops import Linear, Op
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.runner.model_runner import ModelRunner

DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"
CHOICE, OUTSIDE = "token choice", "outside operations"
_GREEDY = SamplingParams(temperature=0.0, seed=0)
_MIN_CALLS = 5
_WORTH_TELLING = 0.05  # of a step: what is said to be worth a change


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Row i computes counts[i] tokens after starts[i] others."""

    name: str
    counts: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def shape(self) -> StepShape:
        """Return the shape for the cost model; one row of each sequence goes through the head."""
        return StepShape(self.counts, self.starts)

    @property
    def text(self) -> str:
        """Return a description."""
        shown = []
        for (count, start), number in Counter(zip(self.counts, self.starts, strict=True)).items():
            rows = f"{number} row{'s' * (number > 1)}" if count == 1 else f"{count} tokens"
            shown.append(f"{rows} at depth {start}")
        return f"{self.name}: {' + '.join(shown)}"


def measure_profile(
    model: str,
    settings: Mapping[str, Any],
    *,
    depth: int = 512,
    sequences: int = 16,
    seconds: float = 3.0,
    progress: Progress | None = None,
) -> dict[str, object]:
    """Return the result. depth: cached tokens of a decoding row.

    sequences: rows that decode together, and rows of the mixed step. Raises SettingError,
    ModelError, CapacityError.
    """
    progress = progress or Progress()
    config = with_local_model(engine_config({"model": model, **settings}))
    if config.executor.executor != "native":
        raise SettingError("executor is not native; only the native executor takes times")
    if config.executor.pipeline_parallel_size > 1:
        raise SettingError(
            f"pipeline_parallel_size is {config.executor.pipeline_parallel_size} and times are "
            "taken of one stage: leave it out"
        )
    progress.say("packing the weights")
    engine = assemble(config, clock=Clock(), report=_ignore)
    runner, card = engine.core.runner, engine.card
    assert isinstance(runner, ModelRunner)
    with closing(runner):
        executor = runner.executor
        assert isinstance(executor, NativeExecutor)
        threads = executor.pool.num_threads
        budget = engine.step_tokens
        steps = _steps(
            depth,
            min(sequences, card.max_num_seqs),
            budget=budget,
            positions=card.max_model_len,
            blocks=(card.num_blocks, card.block_size),
        )
        progress.say("measuring the machine")
        limits = {
            str(count): machine_limits(count, isa=executor.recipe)
            for count in _thread_counts(threads)
        }
        profiled = []
        for step in steps:
            progress.say(f"measuring a step: {step.text}")
            _fill_cache(runner, step.starts[0], budget)
            with ReadProbe(threads, isa=executor.recipe) as probe:  # it drifts
                now = {**limits[str(threads)], READ: probe.gb_per_s()}
            profiled.append(_profile(step, runner, executor, now, seconds))
        floors = _floors(executor.program, steps[0], limits[str(threads)], profiled[0]["step_s"])
    progress.clear()
    return result(
        "profile",
        {"model": card.name, "depth": depth, "sequences": sequences, **settings},
        ranks=config.executor.ranks_of_stage,
        threads=threads,
        usable_cores=num_usable_cores(),
        recipe=card.recipe,
        dtype=card.dtype,
        quantization=card.quantization,
        limits=limits,
        steps=profiled,
        decode_floors_s=floors,
    )


def profile_text(outcome: Mapping[str, Any]) -> str:
    """Return the limits, a table for each step, and the advice."""
    threads = outcome["threads"]
    about = (
        f"{outcome['settings']['model']}: {outcome['dtype']}, weights {outcome['quantization']}, "
        f"{outcome['recipe']}, {threads} threads"
    )
    if outcome["ranks"] > 1:
        about += (
            f"\nrank 0 of {outcome['ranks']}: its share of the operations; limits are those of its "
            "threads alone, and times of exchanges include waiting for the other ranks"
        )
    parts = [about, _limits_text(outcome["limits"])]
    parts += [_step_text(step) for step in outcome["steps"]]
    advice = _advice(outcome)
    if advice:
        parts.append("what would help\n" + "\n".join(f"  - {line}" for line in advice))
    return "\n\n".join(parts)


_LIMIT_NAMES = {
    READ: "memory GB/s",
    "fma_f32": "f32 GFLOP/s",
    "dot_bf16": "bf16 dot",
    "tile_bf16": "bf16 tile",
    "dot_int8": "int8 dot",
    "tile_int8": "int8 tile",
    FORK_JOIN: "fork + join us",
}


def _limits_text(limits: Mapping[str, Mapping[str, float]]) -> str:
    names = [name for name in _LIMIT_NAMES if any(name in found for found in limits.values())]
    rows = [
        (
            f"{count} thread{'s' * (count != '1')}",
            *(f"{found[name]:.{1 + (name == FORK_JOIN)}f}" for name in names),
        )
        for count, found in limits.items()
    ]
    return table(("the machine allows", *(_LIMIT_NAMES[name] for name in names)), rows)


def _step_text(step: Mapping[str, Any]) -> str:
    share = share_text(step["floor_s"], step["step_s"])
    title = (
        f"{step['text']}: {1e3 * step['step_s']:.2f} ms, "
        f"{step['tokens'] / step['step_s']:.0f} tokens/s; the floor is "
        f"{1e3 * step['floor_s']:.2f} ms ({share}), memory at {step['read_gb_per_s']:.1f} GB/s"
    )
    headings = ("operation", "times", "ms", "share", "GB/s", "GFLOP/s", "of its floor")
    rows = [
        (
            part["kind"],
            str(part["num_ops"]),
            f"{1e3 * part['seconds']:.3f}",
            f"{100 * part['share']:.1f} %",
            _rate(part, "memory_bytes"),
            _rate(part, "operations"),
            _share(part),
        )
        for part in step["kinds"]
    ]
    forks = (
        f"work was handed to all threads {step['num_forks']} times: "
        f"{1e3 * step['fork_join_s']:.3f} ms of the operations' time"
    )
    lines = [title, table(headings, rows), forks]
    if any(part.get("cached") for part in step["kinds"]):
        lines.append(
            f"{CACHED}: it took less time than reading its weights, keys and values from memory "
            "does; they lie in the processor's caches, and only its arithmetic counts for the floor"
        )
    return "\n".join(lines)


def _share(part: Mapping[str, Any]) -> str:
    """Return the floor's share of the time."""
    if part.get("cached"):
        return CACHED
    return share_text(part["floor_s"], part["seconds"]) if part["floor_s"] else "-"


def _rate(part: Mapping[str, Any], name: str) -> str:
    amount = part.get(name, 0)
    return f"{amount / part['seconds'] / 1e9:.1f}" if amount and part["seconds"] > 0 else "-"


def _advice(outcome: Mapping[str, Any]) -> list[str]:
    """Return what the measurement suggests about settings; may be empty."""
    threads, floors = outcome["threads"], outcome["decode_floors_s"]
    lines = []
    if outcome["quantization"] == "none" and "none" in floors:
        at = ", ".join(
            f"{1e3 * floors[scheme]:.2f} ms with --quantization {scheme}"
            for scheme in ("int8", "int4-g32")
            if scheme in floors and floors[scheme] < (1 - _WORTH_TELLING) * floors["none"]
        )
        if at:
            lines.append(
                f"fewer bits: the floor of the decode step is {1e3 * floors['none']:.2f} ms, {at}"
            )
    if threads < outcome["usable_cores"]:
        lines.append(
            f"more threads: {threads} of the {outcome['usable_cores']} cores this process may use "
            "compute (--threads)"
        )
    half, full = (outcome["limits"][str(n)] for n in (max(threads // 2, 1), threads))
    if threads > 1 and half[READ] > (1 - _WORTH_TELLING) * full[READ]:
        lines.append(
            f"decoding gains little from more than {max(threads // 2, 1)} of the threads: "
            f"they read {half[READ]:.1f} GB/s of memory, all {threads} read {full[READ]:.1f}"
        )
    for step in outcome["steps"]:
        outside = next(part for part in step["kinds"] if part["kind"] == OUTSIDE)
        if outside["share"] > _WORTH_TELLING:
            lines.append(
                f"{step['text']}: {100 * outside['share']:.0f} % is spent outside operations, "
                "which more rows a step would share (more requests at once)"
            )
        if step["fork_join_s"] > _WORTH_TELLING * step["step_s"]:
            lines.append(
                f"{step['text']}: handing out work takes "
                f"{100 * step['fork_join_s'] / step['step_s']:.0f} %; fewer threads may be faster"
            )
    return lines


# ---- the steps


def _steps(
    depth: int, sequences: int, *, budget: int, positions: int, blocks: tuple[int, int]
) -> list[Step]:
    """Return decode of one row, prefill, and where they fit decode of all sequences and mixed."""
    num_blocks, block_size = blocks
    held = num_blocks * block_size
    deep = min(depth, positions - 2, held - 1)
    if depth < 0 or sequences < 1:
        raise SettingError(f"depth {depth} and {sequences} sequences; 0 and 1 are the least")
    chunk = min(budget, positions - 1, held)
    steps = [
        Step(name=DECODE, counts=(1,), starts=(deep,)),
        Step(name=PREFILL, counts=(chunk,), starts=(0,)),
    ]
    taken = -(-(deep + 1) // block_size) * block_size  # tokens of a decoding row's blocks
    if 1 < sequences <= min(budget, held // taken):
        steps.append(Step(name=DECODE, counts=(1,) * sequences, starts=(deep,) * sequences))
    rows = sequences - 1
    room = held - rows * taken
    rest = min(budget - rows, positions - 1, room)
    if rows and rest > 0:
        mixed = Step(name=MIXED, counts=(1,) * rows + (rest,), starts=(deep,) * rows + (0,))
        steps.append(mixed)
    return steps


def _fill_cache(runner: ModelRunner, depth: int, budget: int) -> None:
    """Write row 0's keys and values, which other rows get copies of.

    Reads of unwritten pages would all hit one zero page in the processor's caches.
    """
    for start in range(0, depth, budget):
        count = min(budget, depth - start)
        plan = made_up_plan([count], [start], runner.tables.block_size, _GREEDY)
        runner.collect(runner.submit(plan))


def _settled(plan: StepPlan) -> StepPlan:
    """Return the plan for the same rows without admissions."""
    none = NO_INTS
    return replace(plan, admissions=(), table_slots=none, table_columns=none, table_blocks=none)


def _copied(plan: StepPlan, depth: int, block_size: int) -> StepPlan:
    """Add copies of row 0's blocks to the other rows of the same depth."""
    columns = depth // block_size
    deep = [row for row, start in enumerate(plan.starts.tolist()) if start == depth][1:]
    width = -(-(depth + 1) // block_size)
    if not columns or not deep:
        return plan
    return replace(
        plan,
        copy_from=np.tile(np.arange(columns, dtype=np.int32), len(deep)),
        copy_to=np.concatenate([np.arange(columns) + row * width for row in deep]).astype(np.int32),
    )


# ---- measuring


def _profile(
    step: Step,
    runner: ModelRunner,
    executor: NativeExecutor,
    limits: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    block_size = runner.tables.block_size
    plan = made_up_plan(step.counts, step.starts, block_size, _GREEDY)
    first = _copied(plan, step.starts[0], block_size)
    again = _settled(plan)
    for warm in (first, again):
        runner.collect(runner.submit(warm))
    calls = _calls(lambda: runner.collect(runner.submit(again)), executor, seconds)
    program, shape = executor.program, step.shape
    units = [ops for segment in SEGMENTS for ops, _ in executor.times(segment)]
    parts: dict[str, dict[str, Any]] = {}
    for index, ops in enumerate(units):
        taken_s = statistics.median(call.unit_s[index] for call in calls)
        _join(parts, _part(program, ops, shape, taken_s, limits))
    for kind, taken_s in (
        (CHOICE, statistics.median(call.choice_s for call in calls)),
        (OUTSIDE, statistics.median(call.outside_s for call in calls)),
    ):
        parts[kind] = {"kind": kind, "num_ops": 1, "seconds": taken_s, "floor_s": 0.0}
    total_s = sum(part["seconds"] for part in parts.values())
    floor_s = sum(part["floor_s"] for part in parts.values())
    for part in parts.values():
        part["share"] = part["seconds"] / total_s
    forks = int(statistics.median(call.num_forks for call in calls))
    return {
        "name": step.name,
        "text": step.text,
        "tokens": sum(step.counts),
        "sequences": len(step.counts),
        "step_s": total_s,
        "floor_s": floor_s,
        "floor_share": floor_s / total_s,
        "read_gb_per_s": limits[READ],
        "num_forks": forks,
        "fork_join_s": 1e-6 * forks * limits[FORK_JOIN],
        "kinds": sorted(parts.values(), key=lambda part: -float(part["seconds"])),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    unit_s: Sequence[float]
    choice_s: float
    outside_s: float
    num_forks: int


def _calls(call: Callable[[], object], executor: NativeExecutor, seconds: float) -> list[_Call]:
    """Repeat the call for `seconds`, at least _MIN_CALLS times; return the times of each."""
    calls: list[_Call] = []
    end_s = time.perf_counter() + seconds
    while len(calls) < _MIN_CALLS or time.perf_counter() < end_s:
        executor.set_timed(True)
        forks, compute_ns, began_s = (
            executor.pool.num_forks,
            _native.compute_ns(),
            time.perf_counter(),
        )
        call()
        wall_s = time.perf_counter() - began_s
        compute_s = 1e-9 * (_native.compute_ns() - compute_ns)
        unit_s = [taken for segment in SEGMENTS for _, taken in executor.times(segment)]
        calls.append(
            _Call(
                unit_s=unit_s,
                choice_s=max(compute_s - sum(unit_s), 0.0),
                outside_s=max(wall_s - compute_s, 0.0),
                num_forks=executor.pool.num_forks - forks,
            )
        )
    executor.set_timed(False)
    return calls


# ---- kinds, floors


def _part(
    program: Program,
    ops: Sequence[Op],
    shape: StepShape,
    seconds: float,
    limits: Mapping[str, float],
) -> dict[str, Any]:
    """Return what operations computed together took, beside their floor.

    Where they took less than their memory floor, their bytes came from the processor's caches:
    "cached" is 1 and the floor that of their arithmetic, at most the time they took.
    """
    costs = [op.cost(program, shape) for op in ops]
    pairs = list(zip(ops, costs, strict=True))
    floor_s = sum(op_floor_s(program, op, cost, limits) for op, cost in pairs)
    cached = floor_s > seconds
    if cached:
        floor_s = min(sum(arithmetic_s(program, op, cost, limits) for op, cost in pairs), seconds)
    cost = sum(costs, Cost())
    return {
        "kind": " + ".join(dict.fromkeys(_name(program, op) for op in ops)),
        "num_ops": len(ops),
        "seconds": seconds,
        "floor_s": floor_s,
        "cached": int(cached),
        "memory_bytes": cost.memory_bytes,
        "operations": cost.operations,
    }


def _join(parts: dict[str, dict[str, Any]], part: Mapping[str, Any]) -> None:
    known = parts.setdefault(part["kind"], {"kind": part["kind"]})
    for name, value in part.items():
        if name != "kind":
            known[name] = known.get(name, 0) + value


def _name(program: Program, op: Op) -> str:
    if isinstance(op, Experts):
        down = program.weights[op.down]
        shape = f"{down.expert_rows} -> {down.columns} {down.scheme or down.dtype}"
        here = f" ({down.experts} here)" if op.holders else ""
        return f"experts {op.top_k} of {op.routing.width}{here}: {shape}"
    if not isinstance(op, Linear):
        return op.kind
    weight = program.weights[op.weight]
    return f"linear {weight.columns} -> {weight.rows} {weight.scheme or weight.dtype}"


def _step_floor_s(program: Program, shape: StepShape, limits: Mapping[str, float]) -> float:
    return sum(
        op_floor_s(program, op, op.cost(program, shape), limits)
        for ops in program.segments.values()
        for op in ops
    )


def _floors(
    program: Program, step: Step, limits: Mapping[str, float], step_s: float
) -> dict[str, float]:
    """Return the floors of one step by precision of the weights, without those above `step_s`."""
    floors = {
        scheme: _step_floor_s(quantize(program, scheme), step.shape, limits)
        for scheme in ("none", "int8", "int4-g32")
    }
    return {scheme: floor_s for scheme, floor_s in floors.items() if floor_s <= step_s}


def _thread_counts(threads: int) -> list[int]:
    return sorted({1, max(threads // 2, 1), threads})


def _ignore(what: str, **fields: Field) -> None:
    """Ignore reports; a failed step fails the measurement."""

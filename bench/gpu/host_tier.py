"""A KV tier in host memory: copy speed, the cost of swapping for other requests, equal tokens.

Plans are made here (see loop.py): one request is paused, and its blocks go to the host and come
back while others generate.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bench.gpu.batches import BLOCK_SIZE, columns_for
from bench.gpu.loop import GREEDY, Idle, run, warm_tokens
from bench.gpu.models import executor_of, program_of
from bench.gpu.stage import Stage
from quire.base.block_copies import BlockCopies, Tier, between
from quire.base.records import Admission, StepPlan, StepResult
from quire.base.report import Field
from quire.execute.gpu.executor import TorchExecutor
from quire.runner.handle import Handle
from quire.runner.model_runner import ModelRunner
from quire.runner.tier_mover import TierMover
from quire.transfer.host import HostStore, piece_sizes

Int32s = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """running: requests that generate, at `depth`. swapped: tokens of the paused one, which is
    swapped out and in once in `every` steps.
    """

    running: int
    depth: int
    steps: int
    swapped: int
    answer: int
    every: int


FULL = Load(running=64, depth=1024, steps=160, swapped=1024, answer=16, every=8)
DRY = Load(running=2, depth=16, steps=8, swapped=40, answer=4, every=4)


class TimedRunner(ModelRunner):
    """Record the host time of submitting each plan."""

    def __init__(self, executor: TorchExecutor, **settings: Any) -> None:
        super().__init__(executor, **settings)
        self.submit_s: list[float] = []

    def submit(self, plan: StepPlan) -> Handle:
        """Submit like ModelRunner."""
        began = time.perf_counter()
        handle = super().submit(plan)
        self.submit_s.append(time.perf_counter() - began)
        return handle


def host_tier(stage: Stage) -> None:
    """Measure copies alone, compare tokens, measure steps."""
    load = DRY if stage.is_dry else FULL
    columns = columns_for(max(load.depth + load.steps, load.swapped + load.answer) + 64)
    executor = executor_of(
        stage,
        program_of(stage, "Llama-3.1-8B"),
        exact=False,
        max_tokens=max(load.swapped, load.running),
        max_sequences=load.running,
        blocks=(load.running + 2) * columns,
    )
    stage.report("copies", _copies(stage, executor, 8 if stage.is_dry else 128))
    alone = _tokens(stage, executor, load, columns, swaps=False)
    swapped = _tokens(stage, executor, load, columns, swaps=True)
    stage.report("tokens", {"are_equal": alone == swapped, "tokens": len(alone)})
    if alone != swapped:
        raise RuntimeError(f"a request that was swapped got {swapped}, alone {alone}")
    for name, swaps in (("quiet", False), ("beside_swaps", True)):
        if stage.has_time():
            stage.report(name, _steps(stage, executor, load, columns, swaps=swaps))


def _copies(stage: Stage, executor: TorchExecutor, count: int) -> dict[str, float]:
    """Return bytes/s in each direction for a number of blocks, and the host's time to launch."""
    size = executor.block_bytes
    executor.begin_moving(count)
    rooms = [*executor.host_memory(count * size).reshape(count, size)]
    blocks = np.arange(count, dtype=np.int32)
    submitted: list[float] = []

    def out() -> None:
        began = time.perf_counter()
        wait = executor.export_blocks(blocks, rooms)
        submitted.append(time.perf_counter() - began)
        wait()

    out_s = stage.wall_seconds(out)
    in_s = stage.wall_seconds(lambda: executor.import_blocks(blocks, rooms))
    return {
        "block_bytes": size,
        "to_host_bytes_per_s": count * size / out_s,
        "from_host_bytes_per_s": count * size / in_s,
        "submit_s_per_block": median(submitted) / count,
    }


def _runner(executor: TorchExecutor, load: Load, longest: int) -> TimedRunner:
    """Return a runner with a tier that holds the paused request twice."""
    size = executor.block_bytes
    sizes = piece_sizes(2 * columns_for(load.swapped) * size * 2, size)
    store = HostStore([executor.host_memory(piece) for piece in sizes], size)

    def report(problem: str, **fields: Field) -> None:
        print(problem, fields, flush=True)

    mover = TierMover(executor, store, now_ms=lambda: 1e3 * time.perf_counter(), report=report)
    return TimedRunner(
        executor,
        num_slots=load.running,
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        max_samples=load.running,
        overlap=True,
        mover=mover,
    )


def _tokens(
    stage: Stage, executor: TorchExecutor, load: Load, columns: int, *, swaps: bool
) -> list[int]:
    """Return a request's tokens; with `swaps` its blocks leave midway, are overwritten, and return
    into other blocks.
    """
    runner = _runner(executor, load, columns * BLOCK_SIZE)
    plans = list(_answer(load, columns))
    if swaps:
        middle = len(plans) // 2
        plans[middle:middle] = _swap(load, columns)
    results = list(run(runner, plans, plans_in_flight=2, idle=Idle(stage, executor)))
    runner.end_thread()
    return np.concatenate([result.token_ids for result in results]).tolist()


def _answer(load: Load, columns: int) -> Iterator[StepPlan]:
    """Compute a prompt in one step, then a token a step."""
    first = seated([admission(0, load.swapped)], columns)
    for step in range(load.answer):
        start = load.swapped + step - 1 if step else 0
        count = 1 if step else load.swapped
        yield plan_of(first if step == 0 else {}, [0], [start], [count])


def _swap(load: Load, columns: int) -> list[StepPlan]:
    """Save and overwrite the prompt's whole blocks in one plan, load them in the next, use
    them after.
    """
    whole = np.arange(load.swapped // BLOCK_SIZE, dtype=np.int32)
    others = whole + np.int32(columns)
    spare = np.full_like(whole, 2 * columns)
    table = {
        "table_slots": np.zeros_like(whole),
        "table_columns": whole,
        "table_blocks": others,
    }
    return [
        StepPlan(step=0, tier_copies=saved(whole), copy_from=spare, copy_to=whole),
        StepPlan(step=0, tier_copies=loaded(others)),
        StepPlan(step=0, **table),
    ]


def _steps(
    stage: Stage, executor: TorchExecutor, load: Load, columns: int, *, swaps: bool
) -> dict[str, float]:
    """Return seconds per step of `running` requests, by the host's clock."""
    runner = _runner(executor, load, columns * BLOCK_SIZE)
    warm = warm_tokens(stage)
    plans = _decode(load, columns, warm, swaps=swaps)
    idle = Idle(stage, executor)
    taken = list(_timed(run(runner, plans, plans_in_flight=2, idle=idle)))[warm:]
    submit_s = runner.submit_s[warm:]
    ended = None if runner.mover is None else runner.mover.ended()
    runner.end_thread()
    moved = 0 if ended is None else ended.saved + ended.fetched
    return {
        "seconds_a_step": sum(taken) / len(taken),
        "median_seconds_a_step": median(taken),
        "longest_step_s": max(taken),
        "longest_submit_s": max(submit_s),
        "moved_bytes_per_s": moved * executor.block_bytes / sum(taken),
    }


def _timed(results: Iterable[StepResult]) -> Iterator[float]:
    last = time.perf_counter()
    for _ in results:
        now = time.perf_counter()
        yield now - last
        last = now


def _decode(load: Load, columns: int, warm: int, *, swaps: bool) -> Iterator[StepPlan]:
    slots = list(range(load.running))
    first = seated([admission(slot, load.depth) for slot in slots], columns)
    parked = np.arange(columns_for(load.swapped), dtype=np.int32)
    parked += np.int32(load.running * columns)
    for step in range(warm + load.steps):
        more = dict(first) if step == 0 else {}
        turn = (step - warm) % load.every if swaps and step >= warm else -1
        if turn == 0:
            more["tier_copies"] = saved(parked)
        if turn == load.every // 2:
            more["tier_copies"] = loaded(parked)
        starts = [load.depth - 1 + step] * len(slots)
        yield plan_of(more, slots, starts, [1] * len(slots))


def saved(blocks: Int32s, first: int = 0) -> BlockCopies:
    """Return copies of blocks to the places from `first` on."""
    places = first + np.arange(len(blocks), dtype=np.int32)
    return between(Tier.POOL, blocks, Tier.HOST, places, [key_of(one) for one in places.tolist()])


def loaded(blocks: Int32s) -> BlockCopies:
    """Return copies of the places from 0 on to blocks."""
    places = np.arange(len(blocks), dtype=np.int32)
    return between(Tier.HOST, places, Tier.POOL, blocks, [key_of(one) for one in places.tolist()])


def key_of(place: int) -> bytes:
    """Return the digest under which a place is filled."""
    return place.to_bytes(16, "little")


def admission(slot: int, prompt: int) -> Admission:
    """Return a request with a prompt of its own, by greedy choice."""
    rng = np.random.default_rng(slot)
    return Admission(
        slot=slot,
        request_id=str(slot),
        stream=0,
        token_ids=rng.integers(0, 100, prompt).astype(np.int32),
        num_prompt_tokens=prompt,
        stop_ids=(),
        sampling=GREEDY,
    )


def seated(admissions: list[Admission], columns: int) -> dict[str, Any]:
    """Return fields of the plan that admits them, with blocks for all they will compute."""
    slots = np.array([admission.slot for admission in admissions], np.int32)
    table_slots = np.repeat(slots, columns).astype(np.int32)
    table_columns = np.tile(np.arange(columns, dtype=np.int32), len(slots))
    return {
        "admissions": tuple(admissions),
        "table_slots": table_slots,
        "table_columns": table_columns,
        "table_blocks": table_slots * np.int32(columns) + table_columns,
    }


def plan_of(
    more: dict[str, Any],
    slots: list[int],
    starts: list[int],
    counts: list[int],
    *,
    samples: bool = True,
) -> StepPlan:
    """Return a plan of these rows, with more fields. samples: a token of each row."""
    first = np.array(starts, np.int32)
    return StepPlan(
        step=0,
        **more,
        slots=np.array(slots, np.int32),
        starts=first,
        counts=np.array(counts, np.int32),
        store_from=first,
        sample_counts=np.full(len(slots), int(samples), np.int32),
    )

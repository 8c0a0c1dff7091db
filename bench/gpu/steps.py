"""Whole steps of models: decode, chunks beside decoding rows, prefill, the price of exact mode.

A floor is the time of reading all weights once at the copy's rate (decode), or of the products at
the peak rate (prefill); both limits are measured in the same process.
"""

from __future__ import annotations

import time
from itertools import product
from statistics import median
from typing import Any

from bench.gpu.batches import batch_of, columns_for
from bench.gpu.limits import device_limits
from bench.gpu.loop import decode, warm_tokens, what_waits
from bench.gpu.models import executor_of, program_of
from bench.gpu.stage import Stage
from quire.execute.executor import StepLimits
from quire.execute.gpu.executor import TorchExecutor
from quire.execute.gpu.step_sizes import Sizes
from quire.program.batch import ForwardBatch
from quire.program.cost import StepShape
from quire.program.program import Program

DECODED = (
    ("Llama-3.1-8B", "none"),
    ("Llama-3.1-8B", "fp8"),
    ("Llama-3.1-8B", "fp8-block"),
    ("Llama-3.1-8B", "int8"),
    ("Llama-3.1-8B", "int4-g128"),
    ("Qwen3-8B", "none"),
    ("Qwen3-0.6B", "none"),
)


def decode_one(stage: Stage) -> None:
    """Measure one request from a depth of 512 on: tokens a second with two plans in flight.

    Also with one plan at a time, and a step without sampling on the device alone.
    """
    limits = device_limits(stage)
    for name, precision in DECODED:
        for exact in (False, True):
            if not stage.has_time():
                return
            mode = "exact" if exact else "fast"
            found = _decode(stage, name, precision, limits, exact=exact)
            stage.report(f"{name} {precision} {mode}", found)


def mixed(stage: Stage) -> None:
    """Measure a prompt chunk beside 64 decoding rows, or 8.

    Replayed as a graph if the executor does that, and launched kernel by kernel; seconds per step,
    and the host's time of submitting it.
    """
    for name in ("Qwen3-0.6B", "Llama-3.1-8B"):
        program = program_of(stage, name)
        depth, chunks, rows = (20, (4,), (2,)) if stage.is_dry else (512, (64, 192, 960), (8, 64))
        executor = executor_of(
            stage,
            program,
            exact=False,
            max_tokens=max(chunks) + max(rows),
            max_sequences=max(rows) + 1,
            blocks=(max(rows) + 1) * columns_for(depth + max(chunks) + 1),
        )
        sizes = executor.sizes
        limits = StepLimits(
            max_tokens=max(chunks), max_samples=max(rows) + 1, max_sequences=max(rows) + 1
        )
        for chunk, beside in product(chunks, rows):
            if not stage.has_time():
                return
            batch = _batch(program, [1] * beside + [chunk], [depth] * (beside + 1))
            executor.sizes = sizes
            found = {"as_served": _timed(stage, executor, batch)}
            executor.sizes = Sizes(limits, mixed=0)
            found["launched"] = _timed(stage, executor, batch)
            stage.report(f"{name} {chunk} tokens beside {beside}", found)
        executor.close()


def _timed(stage: Stage, executor: TorchExecutor, batch: ForwardBatch) -> dict[str, Any]:
    before, host = executor.steps_replayed, []

    def step() -> None:
        began = time.perf_counter()
        _step(executor, batch)
        host.append(time.perf_counter() - began)

    seconds = stage.wall_seconds(step, times=10)
    is_replayed = executor.steps_replayed > before
    return {"seconds": seconds, "host_s": median(host), "is_replayed": is_replayed}


def prefill(stage: Stage) -> None:
    """Measure a prompt of 8,192 tokens in one step."""
    limits = device_limits(stage)
    for exact in (False, True):
        tokens = 24 if stage.is_dry else 8192
        program = program_of(stage, "Llama-3.1-8B")
        executor = _open(stage, program, tokens, exact=exact)
        batch = _batch(program, [tokens], [0])
        seconds = stage.wall_seconds(lambda: _step(executor, batch), times=5)  # noqa: B023
        operations = program.step_cost(StepShape([tokens], [0])).operations
        stage.report(
            "exact" if exact else "fast",
            {
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "share_of_peak": operations / seconds / limits["bf16_ops_per_s"],
            },
        )
        executor.close()


def exact_price(stage: Stage) -> None:
    """Measure the price of exact mode: decode of 1, 8 and 64 requests, and a prefill of 2,048."""
    program = program_of(stage, "Qwen3-0.6B" if stage.is_dry else "Llama-3.1-8B")
    depth, tokens = (20, 24) if stage.is_dry else (1024, 2048)
    sizes = (1, 3) if stage.is_dry else (1, 8, 64)
    shapes = {f"decode of {size}": ([1] * size, [depth] * size) for size in sizes}
    shapes[f"prefill of {tokens}"] = ([tokens], [0])
    seconds: dict[str, dict[str, float]] = {}
    for exact in (False, True):
        executor = executor_of(
            stage,
            program,
            exact=exact,
            max_tokens=max(tokens, 64),
            max_sequences=64,
            blocks=64 * columns_for(max(depth + 1, tokens)),
        )
        for what, (counts, starts) in shapes.items():
            batch = _batch(program, counts, starts)
            taken = stage.wall_seconds(lambda: _step(executor, batch), times=10)  # noqa: B023
            seconds.setdefault(what, {})["exact" if exact else "fast"] = taken
        executor.close()
    for what, taken in seconds.items():
        stage.report(what, {**taken, "price": taken["exact"] / taken["fast"] - 1})


def _decode(
    stage: Stage, name: str, precision: str, limits: dict[str, Any], *, exact: bool
) -> dict[str, Any]:
    program = program_of(stage, name, precision=precision)
    depth, tokens = 20 if stage.is_dry else 512, 128 if stage.is_on_card else 2
    executor = _open(stage, program, depth + warm_tokens(stage) + tokens, exact=exact)
    overlapped = decode(stage, executor, depth=depth, tokens=tokens, plans_in_flight=2)
    with_host_s = overlapped["seconds_a_token"]
    one_by_one = decode(stage, executor, depth=depth, tokens=tokens, plans_in_flight=1)
    waits = what_waits(stage, executor, depth=depth)
    batch = _batch(program, [1], [depth])
    device_s = stage.seconds(lambda: _step(executor, batch))
    cost = program.step_cost(StepShape([1], [depth]))
    floor_s = cost.memory_bytes / limits["copy_bytes_per_s"]
    executor.close()
    return {
        "seconds_with_host": with_host_s,
        "of_these_idle_between_steps": overlapped["idle_between_steps_s"],
        "steps": overlapped["steps"],
        "seconds_one_step_at_a_time": one_by_one["seconds_a_token"],
        "seconds_on_device": device_s,  # without sampling
        "waits_before_the_next_step": waits,
        "tokens_per_s": 1 / with_host_s,
        "floor_tokens_per_s": 1 / floor_s,
        "share_of_floor": floor_s / with_host_s,
    }


def _open(stage: Stage, program: Program, tokens: int, *, exact: bool) -> TorchExecutor:
    return executor_of(
        stage,
        program,
        exact=exact,
        max_tokens=tokens,
        max_sequences=4,
        blocks=columns_for(tokens + 1),
    )


def _batch(program: Program, counts: list[int], starts: list[int]) -> ForwardBatch:
    columns = columns_for(max(n + first for n, first in zip(counts, starts, strict=True)) + 1)
    if len(counts) == 1:
        columns = columns_for(counts[0] + starts[0])
    return batch_of(counts, starts, columns=columns, vocab_size=program.vocab_size, samples=True)


def _step(executor: TorchExecutor, batch: ForwardBatch) -> None:
    executor.run_trunk(batch, head_rows=len(batch.sample_rows))
    executor.run_head(batch, 0, len(batch.sample_rows))

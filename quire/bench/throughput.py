"""`quire bench throughput`: tokens per second of many requests submitted at once.

With static batching the same requests are computed in fixed groups, each until its longest answer
is complete, as engines without continuous batching do; the difference is the gain of continuous
batching. Both modes alternate on the same requests, so that drift of the machine affects both. Time
outside native code is Python's: scheduling, runner and outputs.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire import _native
from quire.base.errors import WorkerError
from quire.bench.local import CompletedRequest, LocalEngine
from quire.bench.report import result
from quire.bench.workloads import Workload
from quire.obs.report import Progress, table
from quire.obs.timing import percentiles, run_rates

MODES = ("continuous", "static")


def measure_throughput(
    model: str,
    settings: Mapping[str, Any],
    *,
    workload: Workload,
    modes: tuple[str, ...] = ("continuous",),
    repeats: int = 5,
    progress: Progress | None = None,
) -> dict[str, object]:
    """Return the result. Raises SettingError, ModelError or CapacityError.

    Raises WorkerError where the two modes answer the same request differently.
    """
    progress = progress or Progress()
    chosen = {**settings, "max_num_seqs": workload.max_running}
    samples: dict[str, list[dict[str, object]]] = {mode: [] for mode in modes}

    async def run() -> dict[str, object]:
        async with LocalEngine(model, chosen) as engine:
            rng = np.random.default_rng()
            progress.say("warming up")
            await engine.run(workload.draw(engine.vocab_size, rng)[:2])
            await engine.settle()
            for number in range(repeats):
                # Each mode gets different tokens, so that no prefix is cached.
                for mode in modes if number % 2 == 0 else modes[::-1]:
                    progress.say(f"{mode} batching, repetition {number + 1} of {repeats}")
                    requests = workload.draw(engine.vocab_size, rng)
                    static = workload.max_running if mode == "static" else 0
                    began_s, computed_ns = time.perf_counter(), _native.compute_ns()
                    answered = await engine.run(requests, static_batch=static)
                    wall_s = time.perf_counter() - began_s
                    python_s = max(wall_s - 1e-9 * (_native.compute_ns() - computed_ns), 0.0)
                    samples[mode].append({**_sample(answered), "python_share": python_s / wall_s})
                    if number == 0:
                        [alone] = await engine.run(requests[:1])
                        _check_same(alone, answered[0])
            progress.clear()
            return engine.description

    description = asyncio.run(run())
    medians = {
        mode: {
            name: statistics.median(value for one in found if isinstance(value := one[name], float))
            for name, first in found[0].items()
            if isinstance(first, float)
        }
        for mode, found in samples.items()
    }
    shown = {
        "num_requests": len(workload.lengths),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "max_running": workload.max_running,
    }
    return result(
        "throughput", shown | dict(settings), engine=description, median=medians, samples=samples
    )


def throughput_text(outcome: Mapping[str, Any]) -> str:
    """Return the medians as a table, a line for each mode."""
    settings = outcome["settings"]
    title = (
        f"{outcome['engine']['model']}, {settings['num_requests']} requests, "
        f"{settings['prompt_tokens']} tokens in and {settings['output_tokens']} out, at most "
        f"{settings['max_running']} running"
    )
    rows = [
        (
            f"{mode} batching",
            f"{median['wall_s']:.2f} s",
            f"{median['total_tokens_per_s']:.1f}",
            f"{median['output_tokens_per_s']:.1f}",
            f"{median['ttft_s']:.2f} s",
            f"{100 * median['python_share']:.1f} %",
        )
        for mode, median in outcome["median"].items()
    ]
    headings = ("", "wall", "tokens/s", "output tokens/s", "median TTFT", "in Python")
    return f"{title}\n{table(headings, rows)}"


def _sample(answered: list[CompletedRequest]) -> dict[str, object]:
    times = [one.times for one in answered]
    return {
        **run_rates(times),
        "ttft_s_percentiles": percentiles(one.ttft_s for one in times),
        "tpot_s_percentiles": percentiles(one.tpot_s for one in times if one.output_tokens > 1),
    }


def _check_same(alone: CompletedRequest, together: CompletedRequest) -> None:
    if alone.token_ids != together.token_ids:
        raise WorkerError(
            "a request was answered differently alone and among others; nothing is reported of "
            f"wrong answers ({alone.token_ids[:8]}... and {together.token_ids[:8]}...)"
        )

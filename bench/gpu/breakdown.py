"""Measure where a step's time goes on the device, by kernel, with PyTorch's profiler.

In a section of its own, and late: a profiler that is missing, or that disturbs the machine, affects
no other timing. Reports, beside the time of kernels, the gaps between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType

from bench.gpu.batches import batch_of, columns_for
from bench.gpu.models import executor_of, program_of
from bench.gpu.stage import Stage

Span = tuple[str, float, float]  # a kernel's name, start and end in microseconds
MAX_NAMES = 24


def where_time_goes(stage: Stage) -> None:
    """Profile a token of one request, of 64, and a prompt of 8,192 tokens; 8B, in both modes."""
    depth, tokens = (20, 24) if stage.is_dry else (512, 8192)
    steps = {
        "decode of 1": ([1], [depth]),
        "decode of 64": ([1] * (3 if stage.is_dry else 64), [depth] * (3 if stage.is_dry else 64)),
        f"prefill of {tokens}": ([tokens], [0]),
    }
    program = program_of(stage, "Llama-3.1-8B")
    for exact in (False, True):
        executor = executor_of(
            stage,
            program,
            exact=exact,
            max_tokens=tokens,
            max_sequences=64,
            blocks=64 * columns_for(depth + 1) + columns_for(tokens),
        )
        for title, (counts, starts) in steps.items():
            if not stage.has_time():
                break
            batch = batch_of(
                counts,
                starts,
                columns=columns_for(counts[0] + starts[0]),
                vocab_size=program.vocab_size,
                samples=True,
            )

            def step() -> None:
                executor.run_trunk(batch, head_rows=len(batch.sample_rows))  # noqa: B023
                executor.run_head(batch, 0, len(batch.sample_rows))  # noqa: B023

            for _ in range(3):  # compiled, captured, replayed
                step()
            stage.settle()
            spans = _spans(stage, step)
            stage.report(f"{title} {'exact' if exact else 'fast'}", kernel_times(spans))
        executor.close()


def _spans(stage: Stage, step: Callable[[], None]) -> list[Span]:
    """Return spans of the kernels that a step launches."""
    if not stage.is_on_card:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        stage.settle()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
    ]


def kernel_times(spans: Iterable[Span]) -> dict[str, Any]:
    """Return counts and seconds by kernel, the step's duration, and the time without a
    running kernel.
    """
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    first, idle, reached = None, 0.0, 0.0
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        counts[name] += 1
        seconds[name] += (end - start) / 1e6
        if first is None:
            first = reached = start
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    if first is None:
        return {"not_measured": "the profiler saw no kernels"}
    longest = sorted(seconds, key=lambda name: -seconds[name])[:MAX_NAMES]
    return {
        "seconds": (reached - first) / 1e6,
        "between_kernels_s": idle / 1e6,
        "kernels": sum(counts.values()),
        "by_name": {name[:80]: {"count": counts[name], "s": seconds[name]} for name in longest},
    }

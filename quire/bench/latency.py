"""`quire bench latency`: one request alone: time to first token and time per output token.

Memory bandwidth is measured before each repetition, so that the time per output token can be given
as a share of the floor: the time of reading the weights and the cache alone.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.bench.floor import decode_bytes, program_of
from quire.bench.local import LocalEngine
from quire.bench.reading import ReadProbe
from quire.bench.report import result
from quire.bench.workloads import Lengths, Workload
from quire.config.machine import num_compute_threads
from quire.obs.report import Progress, table
from quire.obs.timing import RequestTimes


def measure_latency(
    model: str,
    settings: Mapping[str, Any],
    *,
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    progress: Progress | None = None,
) -> dict[str, object]:
    """Return the result. Raises SettingError, ModelError or CapacityError."""
    progress = progress or Progress()
    program = program_of(model, settings)
    read_bytes = decode_bytes(program, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    workload = Workload(
        name="latency",
        text=f"one request, {prompt_tokens} tokens in, {output_tokens} out",
        lengths=(Lengths(prompt=prompt_tokens, output=output_tokens),),
        max_running=1,
    )
    threads = num_compute_threads(settings.get("num_threads"))
    samples: list[dict[str, float]] = []

    async def run() -> dict[str, object]:
        async with LocalEngine(model, settings) as engine:
            rng = np.random.default_rng()
            progress.say("warming up")
            await engine.run(workload.draw(engine.vocab_size, rng))
            await engine.settle()
            with ReadProbe(threads) as probe:
                for number in range(repeats):
                    progress.say(f"repetition {number + 1} of {repeats}")
                    read_gb_per_s = probe.gb_per_s()
                    [answered] = await engine.run(workload.draw(engine.vocab_size, rng))
                    samples.append(_sample(answered.times, read_gb_per_s, read_bytes))
            progress.clear()
            return engine.description

    description = asyncio.run(run())
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    shown = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "threads": threads}
    return result(
        "latency",
        shown | dict(settings),
        engine=description,
        floor_bytes=read_bytes,
        median=medians,
        samples=samples,
    )


def latency_text(outcome: Mapping[str, Any]) -> str:
    """Return the medians as a table."""
    median, settings = outcome["median"], outcome["settings"]
    title = (
        f"{outcome['engine']['model']}, {settings['prompt_tokens']} tokens in, "
        f"{settings['output_tokens']} out, {settings['threads']} threads; "
        f"medians of {len(outcome['samples'])}"
    )
    rows = [
        ("time to first token", f"{1e3 * median['ttft_s']:.1f} ms"),
        ("prompt tokens a second", f"{median['prefill_tokens_per_s']:.0f}"),
    ]
    if "tpot_s" in median:
        rows += [
            ("time per token after it", f"{1e3 * median['tpot_s']:.2f} ms"),
            ("tokens a second", f"{median['decode_tokens_per_s']:.1f}"),
            ("memory reads", f"{median['read_gb_per_s']:.1f} GB/s"),
            ("share of the floor", f"{100 * median['floor_share']:.0f} %"),
        ]
    return f"{title}\n{table(('', ''), rows).lstrip()}"


def _sample(times: RequestTimes, read_gb_per_s: float, read_bytes: int) -> dict[str, float]:
    sample = {
        "ttft_s": times.ttft_s,
        "prefill_tokens_per_s": times.prompt_tokens / times.ttft_s,
        "read_gb_per_s": read_gb_per_s,
    }
    if times.output_tokens > 1:
        floor_s = read_bytes / read_gb_per_s / 1e9
        sample |= {
            "tpot_s": times.tpot_s,
            "decode_tokens_per_s": times.decode_tokens_per_s,
            "floor_share": floor_s / max(times.last_s - times.first_s, 1e-9),
        }
    return sample

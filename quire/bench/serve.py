"""`quire bench serve`: a server under rising load over HTTP, as its clients see it.

At each rate requests arrive independently (Poisson), whatever is still pending. Reported are
percentiles of time to first token and time per output token, and the goodput: requests per second
that met both goals. The knee is the highest rate at which nearly all did; if no higher rate was
tried, the true knee may be higher. A recorded trace can be replayed instead, at several speeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.errors import WorkerError
from quire.bench.arrivals import poisson, replay
from quire.bench.http_load import ServedModel, Target, open_loop, served_model
from quire.bench.report import result
from quire.bench.workloads import Lengths, RequestSpec
from quire.obs.report import Progress, table
from quire.obs.timing import Goals, knee, rate_summary
from quire.obs.trace import Arrival

WARM_UP_REQUESTS = 2
# Beyond the knee more load teaches nothing and takes ever longer.
GIVE_UP_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The arrivals. rates: requests per second, or with `trace` its speed factors.

    lengths are taken in turn where there is no trace; max_tokens: longer requests of a trace are
    left out. vocab_size: bound of the token ids.
    """

    rates: tuple[float, ...]
    seconds: float
    lengths: tuple[Lengths, ...]
    vocab_size: int
    trace: tuple[Arrival, ...] = ()
    max_tokens: int = 4096
    seed: int = 0


def measure_serving(
    target: Target, load: Load, goals: Goals, *, progress: Progress | None = None
) -> dict[str, object]:
    """Return the result. Raises SettingError, and WorkerError where the server answers nothing.

    Rates are tried in ascending order until too few requests meet the goals.
    """
    progress = progress or Progress()
    rng = np.random.default_rng(load.seed)

    async def run() -> tuple[str, list[dict[str, object]]]:
        named = target
        if not target.model:
            named = replace(target, model=(await served_model(target)).name)
        await _warm_up(named, load, rng)
        summaries: list[dict[str, object]] = []
        for rate in sorted(load.rates):
            specs, left_out = _asks(load, rate, rng)
            counted = _counter(progress, f"rate {rate:g}", len(specs))
            times = await open_loop(named, specs, on_end=counted)
            seconds = max(specs[-1].arrival_s, load.seconds if not load.trace else 0.0)
            offered = len(specs) / max(seconds, 1e-9)
            summary = rate_summary(times, offered_per_s=offered, seconds=seconds, goals=goals)
            errors = sorted({one.error for one in times if one.error})[:5]
            summaries.append({"rate": rate, **summary, "errors": errors, "left_out": left_out})
            if summary["num_errors"] == len(times):
                raise WorkerError(f"every request failed at rate {rate:g}: {'; '.join(errors)}")
            if float(summary["good_share"]) < GIVE_UP_SHARE:  # type: ignore[arg-type]
                break
        progress.clear()
        return named.model, summaries

    model, summaries = asyncio.run(run())
    settings = {
        "model": model,
        "seconds": load.seconds,
        "requests_of": "trace" if load.trace else "Poisson arrivals",
        "goals": asdict(goals),
        "prompts": "text" if target.as_text else "token ids",
    }
    found = knee(summaries)
    return result(
        "serve",
        settings,
        rates=summaries,
        knee=None if found is None else summaries[found],
        knee_reached=found is not None and found < len(summaries) - 1,
    )


def resolve_model(target: Target) -> ServedModel:
    """Return the served model. Raises WorkerError where the server and the target name none."""
    try:
        return asyncio.run(served_model(target))
    except WorkerError:
        if not target.model:
            raise
        return ServedModel(name=target.model)


def serving_text(outcome: Mapping[str, Any]) -> str:
    """Return a line for each rate, and the knee."""
    goals = outcome["settings"]["goals"]
    rows = [
        (
            f"{one['rate']:g}",
            f"{one['offered_per_s']:.2f}/s",
            str(one["num_requests"]),
            _seconds(one["ttft_s"], "p50"),
            _seconds(one["ttft_s"], "p99"),
            _milliseconds(one["tpot_s"], "p50"),
            _milliseconds(one["tpot_s"], "p99"),
            f"{100 * one['good_share']:.0f} %",
            f"{one['goodput_per_s']:.2f}/s",
            str(one["num_errors"]),
        )
        for one in outcome["rates"]
    ]
    headings = (
        *("rate", "offered", "requests", "TTFT p50", "p99", "TPOT p50", "p99"),
        *("good", "goodput", "errors"),
    )
    found = outcome["knee"]
    verdict = "no rate served 90 % of its requests well"
    if found is not None:
        at = (
            f"{found['offered_per_s']:.2f} requests/s offered, "
            f"{found['goodput_per_s']:.2f}/s served well"
        )
        verdict = f"knee: {at}"
        if not outcome["knee_reached"]:
            verdict = (
                f"knee not reached: the highest rate was served well ({at}); try higher --rates"
            )
    problems = sorted({error for one in outcome["rates"] for error in one["errors"]})
    return "\n".join(
        [
            f"{outcome['settings']['model']}; good: first token within {goals['ttft_s']:g} s, "
            f"{1e3 * goals['tpot_s']:g} ms for each after it",
            table(headings, rows),
            verdict,
            *(f"error: {problem}" for problem in problems),
        ]
    )


async def _warm_up(target: Target, load: Load, rng: np.random.Generator) -> None:
    specs, _ = _asks(load, max(load.rates), rng)
    first = [replace(spec, arrival_s=0.0) for spec in specs[:WARM_UP_REQUESTS]]
    times = await open_loop(target, first)
    if all(one.error for one in times):
        raise WorkerError(f"{target.url} does not serve: {times[0].error}")


def _asks(load: Load, rate: float, rng: np.random.Generator) -> tuple[Sequence[RequestSpec], int]:
    if load.trace:
        return replay(
            load.trace,
            speed=rate,
            max_tokens=load.max_tokens,
            vocab_size=load.vocab_size,
            rng=rng,
        )
    specs = poisson(
        load.lengths, per_s=rate, seconds=load.seconds, vocab_size=load.vocab_size, rng=rng
    )
    return specs, 0


def _counter(progress: Progress, what: str, total: int) -> Callable[[], None]:
    ended: list[None] = []

    def count() -> None:
        ended.append(None)
        progress.say(f"{what}: {len(ended)} of {total} requests ended")

    return count


def _seconds(found: Mapping[str, float], share: str) -> str:
    return f"{found[share]:.2f} s" if share in found else "-"


def _milliseconds(found: Mapping[str, float], share: str) -> str:
    return f"{1e3 * found[share]:.0f} ms" if share in found else "-"


def trace_of(path: str, *, max_requests: int | None) -> tuple[Arrival, ...]:
    """Return the trace in a file, or None where no file is named."""
    from quire.obs.trace import read_trace

    return tuple(read_trace(Path(path), max_requests=max_requests)) if path else ()

"""Time of schedule + update by number of running requests, and of operations on a block.

No model runs: results are made up, so that only the scheduler and the cache are timed. The policy
is first come, first served. In `steady` every request decodes one token a step; lengths are
staggered so that block crossings spread evenly. In `churn` 5 % of the requests end and as many
arrive in each step, with prompts to compute. `event_*_us` is what an arrival with its completion
adds to a step; `add_us` is what add() takes beside the step. Minima (`least_us`) are less disturbed
by other programs than medians. The state is audited and numbers of rows are checked.
Run: python -m bench.scheduler [--steps 2000] [--out bench/results/scheduler.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.records import Request, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card, machine_text
from quire.cache.manager import CacheManager
from quire.obs.pictures import pyplot, use_log_scale
from quire.obs.timing import percentiles
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler

RUNNING = (16, 64, 256, 1024, 4096)
GOALS_US = {256: 50.0, 1024: 100.0}
BLOCK_SIZE = 16
CHURN = 0.05
CHURN_PROMPT = 64
WARM_UP_STEPS = 64
EOS_ID = 2


class Bench:
    """A scheduler, and a worker that returns token 5 at once for each row that samples."""

    def __init__(self, running: int, max_model_len: int, num_blocks: int, max_tokens: int) -> None:
        cache = CacheManager(num_blocks, BLOCK_SIZE, prefix_caching=True)
        limits = SchedulerLimits(
            max_num_seqs=running,
            max_num_batched_tokens=max_tokens,
            max_model_len=max_model_len,
            max_queued_requests=2 * running,
        )
        self.scheduler = Scheduler(limits, cache, FirstCome())
        self.sampling = SamplingParams(seed=1)
        self.random = np.random.default_rng(7)
        self.added = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add a request that shares no prefix with another."""
        name = f"request-{self.added}"
        self.added += 1
        self.scheduler.add(
            Request(
                request_id=name,
                group_id=name,
                stream=0,
                prompt_ids=self.random.integers(10, 30_000, prompt_tokens, np.int32),
                sampling=self.sampling,
                stop_ids=(EOS_ID,),
                max_total_tokens=prompt_tokens + output_tokens,
                arrival_ms=0.0,
            )
        )

    def step(self) -> tuple[int, StepPlan, int]:
        """Return nanoseconds of schedule + update, the plan, and how many requests ended."""
        begin = time.perf_counter_ns()
        plan = self.scheduler.schedule(0.0)
        middle = time.perf_counter_ns()
        if plan is None:
            raise SystemExit("the scheduler made no plan though requests are there")
        result = self._result(plan)
        resume = time.perf_counter_ns()
        outputs = self.scheduler.update(plan, result, 0.0)
        end = time.perf_counter_ns()
        ended = sum(event.finish_reason is not None for event in outputs.events)
        return (middle - begin) + (end - resume), plan, ended

    def check(self) -> None:
        """Exit if the state of the scheduler and the cache is inconsistent."""
        problems = self.scheduler.check_integrity()
        if problems:
            raise SystemExit(f"the state is inconsistent: {problems}")

    @staticmethod
    def _result(plan: StepPlan) -> StepResult:
        counts = plan.samples.astype(np.int32)
        return StepResult(
            step=plan.step,
            token_counts=counts,
            token_ids=np.full(int(counts.sum()), 5, np.int32),
        )


def steady(running: int, steps: int) -> dict[str, object]:
    """Measure steps in which all requests decode, without arrivals or completions."""
    longest = 128 + BLOCK_SIZE + steps + WARM_UP_STEPS + 64
    blocks = running * (-(-longest // BLOCK_SIZE))
    bench = Bench(running, longest, blocks, max_tokens=256 * running)
    for number in range(running):
        bench.add(128 + number % BLOCK_SIZE, longest - 128 - number % BLOCK_SIZE)
    for _ in range(WARM_UP_STEPS):
        bench.step()
    bench.check()
    times, crossings = [], 0
    for _ in range(steps):
        ns, plan, ended = bench.step()
        if len(plan.slots) != running or ended:
            raise SystemExit(f"a steady step had {len(plan.slots)} rows and {ended} ends")
        times.append(ns)
        crossings += len(plan.table_blocks)
    return _summary(running, times) | {
        "blocks_per_step": round(crossings / steps, 1),
        "goal_us": GOALS_US.get(running),
    }


def churn(running: int, steps: int) -> dict[str, object]:
    """Measure steps in which 5 % of the requests end and as many arrive with a prompt to
    compute.
    """
    arrivals = max(1, round(running * CHURN))
    lifetime = max(1, running // arrivals)  # steps that a request runs, one token each
    longest = CHURN_PROMPT + lifetime + 2
    blocks = 2 * running * (-(-longest // BLOCK_SIZE))
    bench = Bench(running, longest, blocks, max_tokens=running + 2 * arrivals * CHURN_PROMPT)
    times, adds, rows, ends = [], [], 0, 0
    gc.collect()
    for step in range(WARM_UP_STEPS + steps):
        begin = time.perf_counter_ns()
        for _ in range(arrivals):
            bench.add(CHURN_PROMPT, lifetime)
        add_ns = (time.perf_counter_ns() - begin) / arrivals
        ns, plan, ended = bench.step()
        if step >= WARM_UP_STEPS:
            times.append(ns)
            adds.append(add_ns)
            rows += len(plan.slots)
            ends += ended
    bench.check()
    return _summary(running, times) | {
        "rows_per_step": round(rows / steps, 1),
        "ends_per_step": round(ends / steps, 1),
        "add_us": round(float(np.median(adds)) / 1e3, 1),
    }


def event_costs(steady_case: dict[str, object], churn_case: dict[str, object]) -> dict[str, float]:
    """Return microseconds that an arrival with its completion adds to a step: minimum and p50."""
    ends = float(str(churn_case["ends_per_step"]))
    return {
        f"event_{name}": round(
            (float(str(churn_case[name])) - float(str(steady_case[name]))) / ends, 1
        )
        for name in ("least_us", "p50_us")
    }


def block_costs(count: int, repeats: int) -> dict[str, float]:
    """Return nanoseconds per block, `count` blocks at a time: allocate, free, hash, find,
    and evict.
    """
    cache = CacheManager(count, BLOCK_SIZE, prefix_caching=True)
    cache.lay_out(num_slots=1, max_tokens=count * BLOCK_SIZE)
    random = np.random.default_rng(7)
    slots, added, zero = np.zeros(1, np.int32), np.array([count], np.int32), np.zeros(1, np.int64)
    computed = added * np.int32(BLOCK_SIZE)
    taken: dict[str, list[float]] = {}

    def timed(name: str, begin: int) -> None:
        taken.setdefault(name, []).append((time.perf_counter_ns() - begin) / count)

    for repeat in range(repeats):
        tokens = random.integers(0, 30_000, (1, count * BLOCK_SIZE), np.int32)
        chain = cache.chain(tokens[0], "")
        if chain is None or cache.match(chain).num_blocks:
            raise SystemExit("a fresh prompt was found in the prefix index")
        cache.attach(0, cache.match(chain))
        begin = time.perf_counter_ns()
        cache.allocate(slots, added)
        timed("allocate_evicting" if repeat else "allocate", begin)
        begin = time.perf_counter_ns()
        cache.register(slots, computed, tokens)
        timed("hash_and_register", begin)
        begin = time.perf_counter_ns()
        cache.free(slots, zero)
        timed("free", begin)
        begin = time.perf_counter_ns()
        chain = cache.chain(tokens[0], "")
        timed("hash", begin)
        begin = time.perf_counter_ns()
        match = cache.match(chain) if chain else None
        timed("find", begin)
        if match is None or match.num_blocks != count or cache.check_integrity():
            raise SystemExit("a freed prompt was not found again, or the state is inconsistent")
    plain = CacheManager(count, BLOCK_SIZE, prefix_caching=False)
    plain.lay_out(num_slots=1, max_tokens=count * BLOCK_SIZE)
    taken["allocate"] = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        plain.allocate(slots, added)
        timed("allocate", begin)
        begin = time.perf_counter_ns()
        plain.free(slots, zero)
        timed("free_plain", begin)
    return {name: round(float(np.median(values)), 1) for name, values in sorted(taken.items())}


def _summary(running: int, times_ns: list[int]) -> dict[str, object]:
    times_us = np.array(times_ns) / 1e3
    return {
        "running": running,
        "steps": len(times_ns),
        "least_us": round(float(times_us.min()), 1),
        **{f"{name}_us": round(us, 1) for name, us in percentiles(times_us, (50, 99)).items()},
    }


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw p50 and p99 over the number of running requests, with the goals."""
    figure, axes = pyplot().subplots(figsize=(7, 5))
    for name, color in (("steady", "tab:blue"), ("churn", "tab:orange")):
        running = [case["running"] for case in result[name]]
        label = "steady" if name == "steady" else f"{CHURN:.0%} arrivals and completions a step"
        for share, style in (("p50", "o-"), ("p99", "s:")):
            values = [case[f"{share}_us"] for case in result[name]]
            axes.plot(running, values, style, color=color, label=f"{label}, {share}")
    axes.plot(list(GOALS_US), list(GOALS_US.values()), "kx", label="goal (steady)")
    axes.set_xscale("log", base=2)
    use_log_scale(axes)
    axes.set_xticks(RUNNING, [str(count) for count in RUNNING])
    axes.set_xlabel("running requests")
    axes.set_ylabel("schedule + update, µs")
    axes.set_title(f"Time of one scheduling step\n{machine_text(result['machine'])}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, framealpha=0.7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, write JSON and the plot beside it."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/scheduler.json"))
    args = parser.parse_args()
    result: dict[str, object] = {"bench": "scheduler", "machine": machine_card()}
    gc.freeze()
    steady_cases = [steady(running, args.steps) for running in RUNNING]
    churn_cases = [churn(running, max(args.steps // 4, 50)) for running in RUNNING]
    result["steady"] = steady_cases
    result["churn"] = [
        case | event_costs(without, case)
        for without, case in zip(steady_cases, churn_cases, strict=True)
    ]
    result["block_ns"] = {"blocks_at_once": 4096} | block_costs(4096, 50)
    result["goal_block_ns"] = 1_000
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, args.out.with_suffix(".png"))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

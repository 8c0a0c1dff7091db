"""Scenario: a server and a synthetic load like its traffic, for the simulator.

The real scheduler runs under the virtual clock (quire/sim/run.py) with the server's limits; steps
take what the server learned that they cost. The load has the measured rate and mean lengths, and
starts with the requests that ran and waited at the first reading. Always holds: the same scenario
gives the same metrics, so differences between two are those of their settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from quire.base.errors import InvalidParameter, SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import PIECE_TOKENS, CacheConfig, EngineConfig, SchedulerConfig
from quire.doctor.situation import MIN_FINISHED, Situation
from quire.obs.timing import percentiles
from quire.scheduler.cost.step_cost import LinearCost
from quire.sim.cost import LearnedCost
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.machine import Machine
from quire.sim.run import FinishedRequest, Run, simulate

_SEED = 0
# Requests of a simulation, at most so many that they have so many output tokens together.
_MIN_REQUESTS, _MAX_REQUESTS, _MAX_OUTPUT_TOKENS = 100, 300, 12_000
_MAX_BACKLOG = 256
# Lengths: prompts are spread evenly around their mean, outputs exponentially up to a limit.
_PROMPT_SPREAD, _MAX_OUTPUT_TIMES = 0.5, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A synthetic load. rate: arrivals per second; running, waiting: requests there at the start.

    prompt_tokens: without those found in the prefix cache.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A server's limits, the prices of its steps, and its load.

    load, price, fixed_price: factors of the arrival rate, of the time of a step, and of its fixed
    part. calibration: how much slower the server is than its prices say, as its throughput under a
    queue shows. Other fields are named as in EngineView; a Lever changes them by name.
    """

    traffic: Load
    prices: LinearCost
    slots: int
    step_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    plans_in_flight: int = 1
    tpot_target_ms: float = 0.0
    long_prompt_tokens: int = 0
    max_long_prompts: int = 0
    max_short_prompts: int = 0
    part_layers: int = 0
    load: float = 1.0
    price: float = 1.0
    fixed_price: float = 1.0
    calibration: float = 1.0

    def changed(self, change: Mapping[str, float]) -> Scenario:
        """Return a copy with other values. Raises KeyError for a name that is no field."""
        names = {field.name for field in fields(self)}
        if unknown := change.keys() - names:
            raise KeyError(f"{sorted(unknown)} are no fields of a scenario")
        return replace(self, **change)  # type: ignore[arg-type]


def scenario_of(situation: Situation) -> Scenario | str:
    """Return the scenario of a server, or why there is none."""
    engine = situation.engine
    if engine is None:
        return (
            "no prediction: GET /v1/engine was not readable; use an admin's key, or run this on "
            "the server's machine"
        )
    if engine.prices is None:
        return "no prediction: the engine has timed too few steps to know what they cost"
    if situation.finished < MIN_FINISHED or not situation.arrivals:
        return "no prediction: too few requests ended to know their lengths"
    first = situation.window.first
    traffic = Load(
        rate=situation.arrivals / situation.window.seconds,
        prompt_tokens=max(situation.prompt_tokens * (1.0 - situation.hit_share), 1.0),
        output_tokens=max(situation.output_tokens, 1.0),
        running=round(first.value("quire_running_requests")),
        waiting=round(first.value("quire_waiting_requests")),
    )
    return Scenario(
        traffic=traffic,
        prices=engine.prices,
        slots=engine.slots,
        step_tokens=engine.step_tokens,
        max_model_len=engine.max_model_len,
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        plans_in_flight=engine.plans_in_flight,
        tpot_target_ms=engine.tpot_target_ms,
        long_prompt_tokens=engine.long_prompt_tokens,
        max_long_prompts=engine.max_long_prompts,
        max_short_prompts=engine.max_short_prompts,
        part_layers=engine.part_layers,
    )


def scenario_metrics(scenario: Scenario, *, saturated: bool = False) -> dict[str, float]:
    """Simulate and return metrics by name; empty where no request ends.

    saturated: all requests arrive at once, to find the highest throughput.
    """
    requests = _requests(scenario, saturated=saturated)
    defaults = RequestDefaults(
        max_tokens=max(one.output_tokens for one in requests), max_model_len=scenario.max_model_len
    )
    try:
        run = simulate(requests, defaults, _machine(scenario), _config(scenario))
    except (SettingError, InvalidParameter):
        return {}  # the changed settings contradict each other
    return _metrics(run)


def _config(scenario: Scenario) -> EngineConfig:
    # Blocks of whole pieces are those of ranks that divide positions.
    ranks = max(scenario.block_size // PIECE_TOKENS, 1)
    return EngineConfig(
        executor=ExecutorConfig(context_parallel_size=ranks),
        cache=CacheConfig(
            block_size=scenario.block_size if ranks == 1 else CacheConfig().block_size,
            # A token of the simulated machine has one byte.
            kv_cache_memory_bytes=int(scenario.num_blocks) * scenario.block_size,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=int(scenario.slots),
            max_num_batched_tokens=int(max(scenario.step_tokens, scenario.slots)),
            plans_in_flight=int(scenario.plans_in_flight),
            max_queued_requests=2 * (_MAX_REQUESTS + _MAX_BACKLOG),
            tpot_target_ms=scenario.tpot_target_ms,
            long_prompt_tokens=int(scenario.long_prompt_tokens),
            max_long_prompts=int(scenario.max_long_prompts),
            max_short_prompts=int(scenario.max_short_prompts),
        ),
    )


def _machine(scenario: Scenario) -> Machine:
    each = {field.name: getattr(scenario.prices, field.name) for field in fields(LinearCost)}
    each["fixed_ms"] *= scenario.fixed_price
    prices = LinearCost(
        **{name: scenario.calibration * scenario.price * ms for name, ms in each.items()}
    )
    return Machine(
        name="server",
        cost=LearnedCost(prices),
        linear=prices,
        token_bytes=1,
        max_model_len=scenario.max_model_len,
        step_tokens=int(scenario.step_tokens),
        num_layers=scenario.part_layers,
    )


def _requests(scenario: Scenario, *, saturated: bool) -> list[TraceRequest]:
    """Return the backlog at time 0, then arrivals of a Poisson process."""
    traffic, rng = scenario.traffic, np.random.default_rng(_SEED)
    count = int(min(_MAX_REQUESTS, max(_MIN_REQUESTS, _MAX_OUTPUT_TOKENS / traffic.output_tokens)))
    arrivals_ms = np.cumsum(rng.exponential(1e3 / (traffic.rate * scenario.load), count))
    waiting = min(round(traffic.waiting * scenario.load), _MAX_BACKLOG)
    running = min(round(traffic.running * scenario.load), _MAX_BACKLOG)
    arrivals_ms = np.concatenate((np.zeros(running + waiting), arrivals_ms))
    if saturated:
        arrivals_ms[:] = 0.0
    spread = rng.uniform(1.0 - _PROMPT_SPREAD, 1.0 + _PROMPT_SPREAD, len(arrivals_ms))
    prompts = np.maximum(spread * traffic.prompt_tokens, 1.0)
    factors = np.minimum(rng.exponential(1.0, len(arrivals_ms)), _MAX_OUTPUT_TIMES)
    outputs = traffic.output_tokens * factors / np.mean(factors)
    outputs[:running] *= 0.5  # they are half done, on average
    longest = min(scenario.max_model_len, int(scenario.num_blocks) * scenario.block_size)
    return [
        TraceRequest(
            arrival_ms=arrival_ms,
            prompt_tokens=max(min(round(prompt), longest - 1), 1),
            output_tokens=max(min(round(output), longest - round(prompt)), 1),
        )
        for arrival_ms, prompt, output in zip(
            arrivals_ms.tolist(), prompts.tolist(), outputs.tolist(), strict=True
        )
    ]


def _metrics(run: Run) -> dict[str, float]:
    finished = run.finished
    if not finished:
        return {}
    found: dict[str, float] = {}
    waits_ms = [one.first_token_ms - one.request.arrival_ms for one in finished]
    gaps_ms = [_gap_ms(one) for one in finished if one.request.output_tokens > 1]
    for name, values in (("ttft", waits_ms), ("tpot", gaps_ms)):
        for key, value in percentiles(values, (50, 95, 99)).items():
            found[f"{name}_{key}_ms"] = value
    tokens = sum(one.request.output_tokens for one in finished)
    return found | {
        "output_tokens_per_s": 1e3 * tokens / run.end_ms,
        "preemptions_per_100": 100.0 * run.stats.preemptions_total / len(finished),
        "busy_share": run.busy_ms / run.end_ms,
    }


def _gap_ms(one: FinishedRequest) -> float:
    return (one.last_token_ms - one.first_token_ms) / (one.request.output_tokens - 1)

"""Synthetic machines and requests, small enough to follow by hand."""

from __future__ import annotations

import numpy as np

from quire.base.records import StepPlan
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.scheduler.cost.step_cost import LinearCost
from quire.sim.cost import MeasuredCost
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.machine import Machine

DEFAULTS = RequestDefaults(max_tokens=64, max_model_len=512)


def machine(*, loop_ms: float = 0.0) -> Machine:
    """Return a machine of 10 ms a step, and 1 ms more per token after the first; depth is free."""
    points = ((1, 10.0), (257, 266.0))
    cost = MeasuredCost(
        chunk_ms=points, rows_ms=points, pair_ms=0.0, read_ms=((1, 0.0),), loop_ms=loop_ms
    )
    return Machine(
        name="made up",
        cost=cost,
        linear=LinearCost(fixed_ms=9.0, token_ms=1.0, position_ms=0.0),
        token_bytes=1024,
        max_model_len=512,
        step_tokens=32,
        num_layers=2,
    )


def config(**settings: object) -> EngineConfig:
    """Return an engine that runs four requests in 64 blocks."""
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_memory": "1MiB"}
    return engine_config({**given, **settings})


def request(arrival_ms: float, prompt: int, output: int, **more: object) -> TraceRequest:
    """Return a request."""
    return TraceRequest(arrival_ms=arrival_ms, prompt_tokens=prompt, output_tokens=output, **more)  # type: ignore[arg-type]


def drawn_requests(
    count: int, *, per_s: float, seed: int, shared: bool = False
) -> list[TraceRequest]:
    """Draw jobs of mixed lengths, optionally with a shared 512-token block."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e3 / per_s, count))
    return [
        request(
            float(arrival_ms),
            int(rng.integers(1, 120)),
            int(rng.integers(1, 60)),
            block_ids=(int(rng.integers(3)),) if shared and rng.random() < 0.7 else (),
        )
        for arrival_ms in arrivals
    ]


def plan_of(*rows: tuple[int, int]) -> StepPlan:
    """Return a plan of (start, count) rows, each of which samples."""
    starts, counts = np.array(rows, np.int32).reshape(-1, 2).T.copy()
    return StepPlan(
        step=1,
        slots=np.arange(len(starts), dtype=np.int32),
        starts=starts,
        counts=counts,
        store_from=starts,
        sample_counts=np.ones(len(starts), np.int32),
    )

"""How long to stay with a warm cache: as first tokens say, or a fixed backlog; in virtual time.

Sessions that share system prompts, as in prefixes.py, over four replicas with the application of
`quire route` before them, at several loads: light; half of all sessions on one system prompt, so
that its replica is the busiest; long answers, of which a replica computes only some at a time; and
one replica of four with a quarter of the speed. Times and hits are exact and the same on every
machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.router.prefixes import (
    CACHE_BLOCKS,
    NUM_REPLICAS,
    OUTPUT_TOKENS,
    TOKENS_PER_S,
    Session,
    drive,
    oracle_share,
    sessions,
)
from bench.router.virtual_replicas import CachingReplica, VirtualRouter
from bench.router.virtual_time import run_virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """arrivals_per_s: of sessions. hot_share: of them, on one system prompt. output_tokens: of each
    answer. max_answers: that a replica computes at a time. slow: the speed of the last replica, as
    a share of that of the others."""

    arrivals_per_s: float
    hot_share: float = 0.0
    output_tokens: int = OUTPUT_TOKENS
    max_answers: int = 1000
    slow: float = 1.0


LOADS = {
    "light": Load(arrivals_per_s=8.0),
    "one hot prompt": Load(arrivals_per_s=120.0, hot_share=0.5),
    "long answers": Load(arrivals_per_s=6.0, hot_share=0.5, output_tokens=100, max_answers=16),
    "one slow replica": Load(arrivals_per_s=30.0, slow=0.25),
}
WAYS: dict[str, dict[str, Any]] = {
    "warm-cache, measured": {"policy": "warm-cache"},
    "warm-cache, 8192 tokens": {"policy": "warm-cache", "backlog_tokens": 8192},
    "warm-cache, 65536 tokens": {"policy": "warm-cache", "backlog_tokens": 65_536},
    "round-robin": {"policy": "round-robin"},
    "power-of-two": {"policy": "power-of-two"},
}


def backlog(rounds: int) -> dict[str, Any]:
    """Return hit rates and first tokens by load and policy. rounds: sessions."""
    return {
        "replicas": NUM_REPLICAS,
        "sessions": rounds,
        "cache_blocks_per_replica": CACHE_BLOCKS,
        "prompt_tokens_per_s": TOKENS_PER_S,
        "loads": {name: compared(load, rounds) for name, load in LOADS.items()},
    }


def compared(load: Load, rounds: int, ways: Mapping[str, dict[str, Any]] = WAYS) -> dict[str, Any]:
    """Return hit rates and first tokens by policy. ways: settings of routers."""
    trace = sessions(rounds, seed=3, arrivals_per_s=load.arrivals_per_s, hot_share=load.hot_share)
    oracle = oracle_share(trace)
    rows = {name: run_virtual(_run(trace, load, oracle, way)) for name, way in ways.items()}
    return {"oracle_hit_share": oracle, "ways": rows}


async def _run(
    trace: list[Session], load: Load, oracle: float, settings: dict[str, Any]
) -> dict[str, float]:
    """Return hits and first tokens of one policy."""
    replicas = [
        CachingReplica(
            number,
            cache_blocks=CACHE_BLOCKS,
            tokens_per_s=TOKENS_PER_S * (load.slow if number == NUM_REPLICAS - 1 else 1.0),
            token_s=0.002 if load.max_answers > 100 else 0.02,
            max_answers=load.max_answers,
        )
        for number in range(NUM_REPLICAS)
    ]
    exact = settings["policy"] == "warm-cache"
    router = await VirtualRouter.open(replicas, exact=exact, **settings)
    times = sorted(
        await drive(trace, lambda prompt: router.first_token_s(load.output_tokens, prompt))
    )
    counts = router.policy_counts()
    await router.close()
    share = sum(one.cached_tokens for one in replicas) / sum(one.prompt_tokens for one in replicas)
    row = {
        "hit_share": share,
        "of_oracle": share / oracle,
        "ttft_mean_ms": 1000 * fmean(times),
        **{f"ttft_p{at}_ms": 1000 * times[at * (len(times) - 1) // 100] for at in (50, 95, 99)},
    }
    row |= {name: counts[name] for name in ("left_warm",) if name in counts}
    await asyncio.sleep(0)
    return row

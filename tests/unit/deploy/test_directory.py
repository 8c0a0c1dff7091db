"""The directory of replicas: leases expire, and a directory that is away takes no replica away."""

from __future__ import annotations

import asyncio
import io

import pytest

from bench.router.virtual_time import run_virtual
from quire.base.log import Log
from quire.deploy.ray_serve.directory import LEASE_S, ReplicaDirectory, hold_lease
from quire.deploy.ray_serve.directory_discovery import ABSENT_S, DirectoryDiscovery

A, B = "http://10.0.0.1:4001", "http://10.0.0.2:4002"


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lease_that_is_not_renewed_expires() -> None:
    async def story() -> None:
        clock = Clock()
        directory = ReplicaDirectory(clock)
        await directory.hold(B)
        await directory.hold(A)
        assert await directory.addresses() == [A, B]
        clock.now_s += LEASE_S - 1
        await directory.hold(A)
        clock.now_s += 1
        assert await directory.addresses() == [A]
        await directory.give_up(A)
        await directory.give_up(A)
        assert await directory.addresses() == []

    asyncio.run(story())


def test_a_directory_that_is_away_or_empty_keeps_the_replicas_for_a_while() -> None:
    async def story() -> None:
        clock, text = Clock(), io.StringIO()
        answers: list[list[str] | Exception] = []

        async def read() -> list[str]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        discovery = DirectoryDiscovery(read, Log("router", text), clock)

        def shown() -> list[str]:
            return [url.shown for url in discovery.poll()]

        answers += [[A, B], RuntimeError("actor died"), RuntimeError("actor died"), [A]]
        assert await discovery.read()
        assert shown() == [A, B]
        assert not await discovery.read()
        clock.now_s += 1000
        assert not await discovery.read()
        assert shown() == [A, B]
        assert text.getvalue().count("does not answer") == 1
        assert not await discovery.read()  # it is back, and B may not have renewed its lease yet
        assert shown() == [A, B]
        clock.now_s += ABSENT_S
        answers.append([A])
        assert await discovery.read()
        assert shown() == [A]
        answers.append(["ftp://10.0.0.1"])
        assert not await discovery.read()
        assert shown() == [A]

    asyncio.run(story())


class CutDirectory:
    """A directory behind a network. is_silent: calls get no answer, and are lost; else, while
    is_away, they fail at once."""

    def __init__(self) -> None:
        self.directory = self.new()
        self.is_silent = self.is_away = False

    def new(self) -> ReplicaDirectory:
        return ReplicaDirectory(asyncio.get_running_loop().time)

    async def reach(self) -> ReplicaDirectory:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.is_away:
            raise RuntimeError("actor died")
        await asyncio.sleep(0.01)
        return self.directory

    async def hold(self, address: str) -> None:
        await (await self.reach()).hold(address)

    async def give_up(self, address: str) -> None:
        await (await self.reach()).give_up(address)

    async def addresses(self) -> list[str]:
        return await (await self.reach()).addresses()


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("has_data", [True, False])
@pytest.mark.parametrize("away_s", [50 + 0.7 * part for part in range(9)])
def test_a_replica_stays_when_the_directory_was_away(
    away_s: float, has_data: bool, is_silent: bool
) -> None:
    """Whatever a holder was doing when the network was cut, and when it was back."""

    async def story() -> None:
        cut, loop = CutDirectory(), asyncio.get_running_loop()
        log = Log("replica", io.StringIO())
        discovery = DirectoryDiscovery(cut.addresses, log, loop.time)
        holder = asyncio.ensure_future(hold_lease(cut, A, log))
        await asyncio.sleep(1.0)
        found = list[int]()

        async def lists(seconds: float) -> None:
            until_s = loop.time() + seconds
            while loop.time() < until_s:
                await discovery.read()
                found.append(len(discovery.poll()))
                await asyncio.sleep(discovery.read_every_s)

        await lists(3.0)
        cut.is_silent, cut.is_away = is_silent, True
        reading = asyncio.ensure_future(lists(away_s))
        await asyncio.sleep(away_s)
        if not has_data:
            cut.directory = cut.new()
        cut.is_silent = cut.is_away = False
        await reading
        await lists(2 * LEASE_S)
        assert set(found) == {1}
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        await lists(LEASE_S + ABSENT_S + 3.0)
        assert found[-1] == 0, "nothing renews it"

    run_virtual(story(), tick_s=2e-4)

"""The directory of replicas: leases expire, and a directory that is away takes no replica away."""

from __future__ import annotations

import asyncio
import io

from quire.base.log import Log
from quire.deploy.ray_serve.directory import LEASE_S, ReplicaDirectory
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

"""Servers that stop while others cannot take their streams yet, or just after they have returned.

In virtual seconds, which no load of this machine changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.router.replica import Replica
from tests.unit.router.test_overload import SETTINGS, calm, servers_of
from tests.unit.router.virtual_fleet import SteppedServer, VirtualFleet, run_virtual, whole_answer

NUM_TOKENS = 120
# Of the first server, among others that work: its limit of 0.6 s and what is between two looks.
STOP_S = 0.8
# After another replica can take over.
SOON_S = 0.15
Story = Callable[[VirtualFleet, list[Replica]], Awaitable[None]]


def run_story(story: Story) -> None:
    """Run a story before three servers with 60 streams; their answers are whole at last."""

    async def begun() -> None:
        fleet = VirtualFleet(servers_of(calm), **SETTINGS)
        await fleet.router.start()
        try:
            streams = fleet.open_streams(60, NUM_TOKENS)
            await asyncio.sleep(6.0)
            await story(fleet, list(fleet.router.fleet.replicas.values()))
            for stream in streams:
                assert (await stream)[2] == whole_answer(NUM_TOKENS)
        finally:
            await fleet.close()

    run_virtual(begun())


async def stop(fleet: VirtualFleet, server: SteppedServer) -> float:
    """Stop a server; return how long it is in use."""
    loop = asyncio.get_running_loop()
    server.is_stopped, began_s = True, loop.time()
    while fleet.is_up(server):
        await asyncio.sleep(0.01)
    return loop.time() - began_s


def lines(fleet: VirtualFleet, what: str) -> list[str]:
    return [line for line in fleet.router.lines if what in line]


@pytest.mark.parametrize("open_s", [0.3, 1.0, 1.7])
def test_one_that_stops_is_given_up_once_an_open_breaker_closes(open_s: float) -> None:
    """The third one loads. Its streams could go nowhere sooner."""

    async def story(fleet: VirtualFleet, replicas: list[Replica]) -> None:
        loop = asyncio.get_running_loop()
        fleet.servers[2].kill()
        await asyncio.sleep(0.5)
        breaker = replicas[1].breaker
        breaker.stalled(loop.time())
        breaker._until_s = loop.time() + open_s
        took_s = await stop(fleet, fleet.servers[0])
        assert took_s < max(STOP_S, open_s + SOON_S)
        kept = lines(fleet, "silent replica kept")
        assert len(kept) == (open_s > STOP_S)
        assert all("ready, its circuit breaker open, beat" in line for line in kept)
        assert replicas[0].has_stopped
        fleet.servers[0].is_stopped = False
        fleet.servers[2].start()

    run_story(story)


@pytest.mark.parametrize("load_s", [0.3, 1.0, 1.7])
def test_one_that_stops_while_all_others_load_is_given_up_once_one_is_back(load_s: float) -> None:
    async def story(fleet: VirtualFleet, replicas: list[Replica]) -> None:
        loop = asyncio.get_running_loop()
        for server in fleet.servers[1:]:
            server.kill()
        await asyncio.sleep(0.5)
        loop.call_later(load_s, fleet.servers[1].start)
        took_s = await stop(fleet, fleet.servers[0])
        probe_s = SETTINGS["probe_s"]
        assert took_s < max(STOP_S, load_s + probe_s + SOON_S)
        fleet.servers[0].is_stopped = False
        fleet.servers[2].start()

    run_story(story)


@pytest.mark.parametrize(("ready_s", "limit_s"), [(0.1, 1.2), (0.6, STOP_S), (1.2, STOP_S)])
def test_one_that_has_just_returned_and_stops_is_noticed_as_soon(
    ready_s: float, limit_s: float
) -> None:
    """Few of its beats are known: the limits of the others count once they come regularly."""

    async def story(fleet: VirtualFleet, replicas: list[Replica]) -> None:
        server = fleet.servers[0]
        server.kill()
        await asyncio.sleep(3.0)
        server.start()
        while not fleet.is_up(server):
            await asyncio.sleep(0.01)
        await asyncio.sleep(ready_s)
        assert await stop(fleet, server) < limit_s, lines(fleet, "silent")
        server.is_stopped = False

    run_story(story)


def test_one_that_has_just_returned_may_be_as_late_as_the_others_are_at_times() -> None:
    async def story(fleet: VirtualFleet, replicas: list[Replica]) -> None:
        server = fleet.servers[0]
        fleet.servers[1].beat_s = lambda now_s: 0.3
        server.kill()
        await asyncio.sleep(3.0)
        server.start()
        while not fleet.is_up(server):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)
        took_s = await stop(fleet, server)
        assert 3 * 0.3 - SOON_S < took_s < 3 * 0.3 + 2 * SOON_S
        server.is_stopped = False

    run_story(story)

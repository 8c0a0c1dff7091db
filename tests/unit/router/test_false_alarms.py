"""Engines that were only slow, and engines that hang soon after one was.

In virtual seconds: servers that say with their beats that their engine is silent, as real ones do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.router.test_overload import CALM_STEP_S, SETTINGS, servers_of
from tests.unit.router.virtual_fleet import SteppedServer, VirtualFleet, run_virtual, whole_answer

NUM_TOKENS, NUM_STREAMS = 400, 30
# What the goal allows a stream that is interrupted.
MAX_GAP_S = 3.0


class Streams:
    """Streams of one router, and when each had its events."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self._fleet = fleet
        self._times: list[list[float]] = []
        self._answers: list[asyncio.Future[Any]] = []

    def open(self, count: int) -> None:
        """Send requests."""
        loop = asyncio.get_running_loop()
        for seed in range(count):
            times: list[float] = []
            self._times.append(times)
            body = {"tokens": [1, 2], "stream": True, "max_tokens": NUM_TOKENS, "seed": seed}

            def note(piece: bytes, times: list[float] = times) -> None:
                times.append(loop.time())

            posted = self._fleet.router.post("/generate", body, on_piece=note)
            self._answers.append(asyncio.ensure_future(posted))

    async def check(self) -> None:
        """Wait for the answers: they are whole, and none had a long interruption."""
        for answer in self._answers:
            assert (await answer)[2] == whole_answer(NUM_TOKENS)
        gaps_s = (after - before for times in self._times for before, after in pairwise(times))
        assert max(gaps_s) < MAX_GAP_S


Story = Callable[[VirtualFleet, Streams], Awaitable[None]]


# How often engines send something, while steps are long, and for how long one is slow.
SPOKEN_S = [(0.25, 1.0), (0.5, 1.8)]


def run_story(story: Story, spoken_s: float) -> None:
    """Run a story before three servers with streams, which `Streams.check` checks at last."""

    def steps(number: int, now_s: float, num_streams: int) -> float:
        return 2 * spoken_s if int(now_s) % 3 == 0 else CALM_STEP_S

    async def begun() -> None:
        fleet = VirtualFleet(servers_of(steps), **SETTINGS)
        for server in fleet.servers:
            server.finds_silence, server.spoken_s = True, spoken_s
        await fleet.router.start()
        try:
            streams = Streams(fleet)
            streams.open(NUM_STREAMS)
            await asyncio.sleep(6.0)
            await story(fleet, streams)
            await streams.check()
        finally:
            await fleet.close()

    run_virtual(begun())


async def be_slow(server: SteppedServer, slow_s: float) -> None:
    """Let an engine send nothing for some time."""
    server.is_frozen = True
    await asyncio.sleep(slow_s)
    server.is_frozen = False


async def false_alarm(fleet: VirtualFleet, streams: Streams, slow_s: float) -> None:
    """Have the first server given up for an engine that is slow, and used again."""
    await be_slow(fleet.servers[0], slow_s)
    assert num_resumed(fleet) == NUM_STREAMS / 3
    await asyncio.sleep(1.0)
    assert fleet.is_up(fleet.servers[0])
    assert fleet.router.prober._silence.factor == 2.0
    streams.open(NUM_STREAMS)


def num_resumed(fleet: VirtualFleet) -> float:
    return fleet.router.count("quire_router_resumed_streams_total")


@pytest.mark.parametrize(("spoken_s", "slow_s"), SPOKEN_S)
@pytest.mark.parametrize("hangs", [0, 1], ids=["the same", "another"])
def test_an_engine_that_hangs_soon_after_a_false_alarm_is_given_up_in_time(
    hangs: int, spoken_s: float, slow_s: float
) -> None:
    async def story(fleet: VirtualFleet, streams: Streams) -> None:
        await false_alarm(fleet, streams, slow_s)
        await asyncio.sleep(5.0)
        server, loop = fleet.servers[hangs], asyncio.get_running_loop()
        server.is_frozen, began_s = True, loop.time()
        while fleet.is_up(server) and loop.time() < began_s + MAX_GAP_S:
            await asyncio.sleep(0.01)
        assert loop.time() - began_s < 2.1

    run_story(story, spoken_s)


@pytest.mark.parametrize(("spoken_s", "slow_s"), SPOKEN_S)
@pytest.mark.parametrize("after_s", [5.0, 40.0])
@pytest.mark.parametrize("slow", [0, 1], ids=["the same", "another"])
def test_a_silence_as_long_as_that_of_a_false_alarm_is_none_again(
    slow: int, after_s: float, spoken_s: float, slow_s: float
) -> None:
    async def story(fleet: VirtualFleet, streams: Streams) -> None:
        await false_alarm(fleet, streams, slow_s)
        await asyncio.sleep(after_s)
        resumed = num_resumed(fleet)
        await be_slow(fleet.servers[slow], slow_s)
        await asyncio.sleep(3.0)
        assert num_resumed(fleet) == resumed
        assert all(map(fleet.is_up, fleet.servers))

    run_story(story, spoken_s)

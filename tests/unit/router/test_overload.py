"""Overload and failures in virtual time: no stream is lost or handed round because all are slow.

A thousand streams over three servers with steps of seconds, as on a machine with far too much to
do; and how long a stopped and a hung server take to be noticed where all is calm.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.router.prober import Prober
from tests.unit.router.virtual_fleet import (
    SteppedServer,
    VirtualFleet,
    run_virtual,
    whole_answer,
)

# A thousand streams once; fewer are decided alike, and take less time here.
NUM_STREAMS, NUM_FEWER, NUM_TOKENS = 1000, 300, 20
# When an overload begins; the loop's clock begins at 100.
SLOW_FROM_S = 102.0
CALM_STEP_S = 0.15
# As bench/fleet sets them.
SETTINGS: dict[str, Any] = {"stall_s": 2.0, "probe_s": 0.25, "resume_s": 30.0, "max_open": 2064}

Steps = Callable[[int, float, int], float]


def calm(number: int, now_s: float, num_streams: int) -> float:
    return CALM_STEP_S


def all_at_once(number: int, now_s: float, num_streams: int) -> float:
    """Each step of each server takes six seconds."""
    return CALM_STEP_S if now_s < SLOW_FROM_S else 6.0 + 0.3 * number


def one_by_one(number: int, now_s: float, num_streams: int) -> float:
    """The same, and they become slow one second after the other."""
    return CALM_STEP_S if now_s < SLOW_FROM_S + number else 6.0


def ever_slower(number: int, now_s: float, num_streams: int) -> float:
    """Steps become longer and longer."""
    return CALM_STEP_S + max(now_s - SLOW_FROM_S, 0.0) / 3 % 7 * (1 + 0.2 * number)


def by_load(number: int, now_s: float, num_streams: int) -> float:
    """A step of a hundred streams takes two seconds, that of more takes longer."""
    return num_streams / 50


def servers_of(
    steps: Steps, health_s: Callable[[float], float] = lambda now_s: 0.01
) -> list[SteppedServer]:
    return [
        SteppedServer(
            number, lambda now_s, count, number=number: steps(number, now_s, count), health_s
        )
        for number in range(3)
    ]


async def answers_of(fleet: VirtualFleet, num_streams: int, meanwhile: Any = None) -> Counter[str]:
    """Return how many of the streams were whole, and how many were not."""
    streams = fleet.open_streams(num_streams, NUM_TOKENS)
    if meanwhile is not None:
        await meanwhile
    wanted, found = whole_answer(NUM_TOKENS), Counter[str]()
    for stream in streams:
        status, _, body = await stream
        found["whole" if (status, body) == (200, wanted) else "wrong"] += 1
    return found


def slow_health(now_s: float) -> float:
    return 0.01 if now_s < SLOW_FROM_S else 3.0


@pytest.mark.parametrize(
    ("steps", "num_streams", "num_handed_over"),
    [
        (all_at_once, NUM_STREAMS, 0),
        (ever_slower, NUM_FEWER, 0),
        (by_load, NUM_FEWER, 0),
        (one_by_one, NUM_FEWER, 2),
    ],
)
def test_slow_replicas_keep_their_streams(
    steps: Steps, num_streams: int, num_handed_over: int
) -> None:
    """One that is silent while the others still work cannot be known from one that hangs, so where
    they become slow one after the other some streams are handed over; and none is lost by that."""

    async def story() -> None:
        fleet = VirtualFleet(servers_of(steps, slow_health), **SETTINGS)
        await fleet.router.start()
        try:
            assert await answers_of(fleet, num_streams) == {"whole": num_streams}
            resumed = fleet.router.count("quire_router_resumed_streams_total")
            assert resumed <= num_handed_over * (num_streams // 3 + 1)
            assert sum(len(one.requests) for one in fleet.servers) == num_streams + resumed
        finally:
            await fleet.close()

    run_virtual(story())


def test_a_killed_replica_hands_over_its_own_streams_and_no_others() -> None:
    """The others compute its streams' prompts, in steps that take long, and are not given up."""

    def steps(number: int, now_s: float, num_streams: int) -> float:
        return CALM_STEP_S if num_streams < 105 else 3.0

    async def story() -> None:
        fleet = VirtualFleet(servers_of(steps), **SETTINGS)
        await fleet.router.start()

        async def kill() -> None:
            await asyncio.sleep(1.0)
            fleet.servers[0].kill()

        try:
            assert await answers_of(fleet, NUM_FEWER, kill()) == {"whole": NUM_FEWER}
            lost = len(fleet.servers[0].requests)
            assert 90 < lost < 110
            assert fleet.router.count("quire_router_resumed_streams_total") == lost
            assert sum(len(one.requests) for one in fleet.servers) == NUM_FEWER + lost
        finally:
            await fleet.close()

    run_virtual(story())


@pytest.mark.parametrize("end", [SteppedServer.kill, SteppedServer.end_streams])
def test_replicas_that_take_over_many_streams_may_be_silent_for_a_while(
    end: Callable[[SteppedServer], None],
) -> None:
    """Their servers read all those requests at once: neither answers nor tokens come meanwhile;
    beats do, as their threads need no interpreter lock."""

    def busy(now_s: float) -> float:
        return 1.8 if 105.5 < now_s < 108.0 else 0.01

    async def story() -> None:
        servers = servers_of(calm)
        servers[1] = SteppedServer(1, lambda now_s, count: CALM_STEP_S + busy(now_s), busy)
        servers[1].beat_s = lambda now_s: 0.1 + (0.4 if 106.1 < now_s < 106.6 else 0.0)
        fleet = VirtualFleet(servers, **SETTINGS)
        await fleet.router.start()

        async def fail() -> None:
            await asyncio.sleep(6.0)
            end(fleet.servers[0])

        try:
            streams = fleet.open_streams(60, 60)
            await fail()
            for stream in streams:
                assert (await stream)[2] == whole_answer(60)
            assert len(fleet.servers[0].requests) == 20
            assert fleet.router.count("quire_router_resumed_streams_total") == 20
        finally:
            await fleet.close()

    run_virtual(story())


@pytest.mark.parametrize(
    ("fault", "has_beats", "limit_s"),
    [
        ("is_stopped", True, 0.85),
        ("is_stopped", False, 1.5),
        ("is_frozen", True, 1.7),
        ("hangs", True, 2.2),
    ],
)
def test_a_silent_replica_among_working_ones_is_given_up_soon(
    fault: str, has_beats: bool, limit_s: float
) -> None:
    """In virtual seconds, which no load of this machine changes."""

    async def story() -> None:
        fleet = VirtualFleet(servers_of(calm), **SETTINGS)
        for server in fleet.servers:
            server.has_beats = has_beats
        await fleet.router.start()
        streams = fleet.open_streams(60, 120)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(6.0)
            setattr(fleet.servers[0], fault, True)
            began_s = loop.time()
            while fleet.is_up(fleet.servers[0]):
                await asyncio.sleep(0.01)
            assert loop.time() - began_s < limit_s
            for stream in streams:
                assert (await stream)[2] == whole_answer(120)
            assert fleet.router.count("quire_router_resumed_streams_total") == 20
        finally:
            await fleet.close()

    run_virtual(story())


def test_engines_that_were_only_slow_do_not_delay_the_notice_of_a_stopped_process() -> None:
    async def story() -> None:
        fleet = VirtualFleet(servers_of(calm), **SETTINGS)
        await fleet.router.start()
        streams = fleet.open_streams(6, 80)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(6.0)
            fleet.router.prober._silence.factor = 8.0  # after three false alarms
            fleet.servers[0].is_stopped, began_s = True, loop.time()
            while fleet.is_up(fleet.servers[0]):
                await asyncio.sleep(0.01)
            assert loop.time() - began_s < 0.85
            [replica, *_] = fleet.router.fleet.replicas.values()
            assert replica.has_stopped
            for stream in streams:
                assert (await stream)[2] == whole_answer(80)
            fleet.servers[0].is_stopped = False
            while not fleet.is_up(fleet.servers[0]):
                await asyncio.sleep(0.01)
            assert not replica.has_stopped
            answer_times = fleet.router.prober._answer_times[replica]
            assert max(answer_times) < 0.1, "what it did not answer while stopped is no answer time"
        finally:
            await fleet.close()

    run_virtual(story())


def test_a_replica_that_was_stopped_is_noticed_as_soon_the_next_time() -> None:
    """The silence of the first stop is no usual gap between beats, however short it was."""

    async def story() -> None:
        fleet = VirtualFleet(servers_of(calm), **SETTINGS)
        await fleet.router.start()
        streams, server = fleet.open_streams(60, 120), fleet.servers[0]
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(6.0)
            for _ in range(2):
                server.is_stopped, began_s = True, loop.time()
                while fleet.is_up(server):
                    await asyncio.sleep(0.01)
                assert loop.time() - began_s < 0.85
                await asyncio.sleep(2.6 - (loop.time() - began_s))
                server.is_stopped = False
                while not fleet.is_up(server):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(3.0)
            for stream in streams:
                assert (await stream)[2] == whole_answer(120)
        finally:
            await fleet.close()

    run_virtual(story())


def test_a_long_step_or_a_late_server_is_no_stop_while_its_beats_come() -> None:
    """An engine that computes for a second behind a server that answers no probe meanwhile differs
    from a stopped process by its beats; and beats that are late at times are waited for longer."""

    def late(now_s: float) -> float:
        return 0.9 if 107.0 < now_s < 107.5 else 0.1

    async def story() -> None:
        servers = servers_of(calm)
        servers[1] = SteppedServer(
            1,
            lambda now_s, count: 1.2 if 103.0 < now_s < 106.0 else CALM_STEP_S,
            lambda now_s: 0.9 if 103.0 < now_s < 109.0 else 0.01,
        )
        servers[1].beat_s = lambda now_s: 0.25 if now_s < 103.0 else late(now_s)
        fleet = VirtualFleet(servers, **SETTINGS)
        await fleet.router.start()
        try:
            assert await answers_of(fleet, 60) == {"whole": 60}
            assert fleet.router.count("quire_router_resumed_streams_total") == 0
        finally:
            await fleet.close()

    run_virtual(story())


@pytest.mark.parametrize("has_beats", [True, False])
def test_a_server_that_answers_no_probe_has_the_time_of_a_stall_while_its_beats_come(
    has_beats: bool,
) -> None:
    """Its event loop is busy, for longer than probes are waited for; at last it hangs."""

    def busy(now_s: float) -> float:
        return 1.6 if 106.0 < now_s < 106.5 else 1000.0 if now_s > 112.0 else 0.01

    async def story() -> None:
        servers = servers_of(calm)
        servers[1] = SteppedServer(1, lambda now_s, count: CALM_STEP_S + busy(now_s), busy)
        for server in servers:
            server.has_beats = has_beats
        fleet = VirtualFleet(servers, **SETTINGS | {"stall_s": 5.0})
        await fleet.router.start()
        loop = asyncio.get_running_loop()
        try:
            streams = fleet.open_streams(60, 200)
            await asyncio.sleep(110.0 - loop.time())
            assert any("replica fenced" in line for line in fleet.router.lines) != has_beats
            while fleet.is_up(servers[1]) and loop.time() < 130.0:
                await asyncio.sleep(0.01)
            assert loop.time() < 120.0
            for stream in streams:
                assert (await stream)[2] == whole_answer(200)
        finally:
            await fleet.close()

    run_virtual(story())


def test_a_late_replica_keeps_its_streams_while_the_other_one_takes_none() -> None:
    """The other one sends beats, but its circuit breaker is open: streams would wait for the late
    one itself."""

    def late(now_s: float) -> float:
        return 1.2 if 106.0 < now_s < 106.5 else 0.01

    async def story() -> None:
        servers = servers_of(calm)[:2]
        servers[0] = SteppedServer(0, lambda now_s, count: CALM_STEP_S + late(now_s), late)
        servers[0].beat_s = lambda now_s: 0.1 + late(now_s)
        fleet = VirtualFleet(servers, **SETTINGS)
        await fleet.router.start()
        try:
            streams = fleet.open_streams(20, 60)
            await asyncio.sleep(5.5)
            other = fleet.router.fleet.replicas[servers[1].url]
            for _ in range(3):  # each time for longer
                other.breaker.stalled(asyncio.get_running_loop().time())
            await asyncio.sleep(3.0)
            assert not other.is_available(asyncio.get_running_loop().time())
            for stream in streams:
                assert (await stream)[2] == whole_answer(60)
            assert fleet.router.count("quire_router_resumed_streams_total") == 0
            assert not any("replica fenced" in line for line in fleet.router.lines)
        finally:
            await fleet.close()

    run_virtual(story())


@pytest.mark.parametrize(("can_do_without", "wait_s"), [(False, 0.0), (True, 0.0), (False, 60.0)])
def test_the_only_replica_is_given_up_late_unless_it_is_not_needed(
    can_do_without: bool, wait_s: float
) -> None:
    async def story() -> float:
        [server] = servers = servers_of(calm)[:1]
        fleet = VirtualFleet(servers, **SETTINGS, wait_s=wait_s)
        fleet.router.prober = Prober(fleet.router.fleet, can_do_without=can_do_without)
        await fleet.router.start()
        loop, [stream] = asyncio.get_running_loop(), fleet.open_streams(1, 60)
        try:
            await asyncio.sleep(4.0)
            server.is_stopped, began_s = True, loop.time()
            while fleet.is_up(server):
                await asyncio.sleep(0.01)
            server.is_stopped, took_s = False, loop.time() - began_s
            assert (await stream)[2] == whole_answer(60)
            return took_s
        finally:
            await fleet.close()

    found_s = run_virtual(story())
    is_soon = can_do_without or wait_s > 0
    assert found_s < 1.5 if is_soon else 3.5 < found_s < 5.5


def test_where_all_are_stopped_their_streams_wait_for_the_first_that_is_back() -> None:
    async def story() -> None:
        fleet = VirtualFleet(servers_of(calm), **SETTINGS)
        await fleet.router.start()

        async def stop_all() -> None:
            await asyncio.sleep(1.0)
            for server in fleet.servers:
                server.is_stopped = True
            await asyncio.sleep(12.0)
            for server in fleet.servers:
                server.is_stopped = False

        try:
            assert await answers_of(fleet, NUM_FEWER, stop_all()) == {"whole": NUM_FEWER}
            assert fleet.router.count("quire_router_broken_streams_total") == 0
        finally:
            await fleet.close()

    run_virtual(story())

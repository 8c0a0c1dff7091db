"""Requests without output at a replica that fails: they move or wait; none is refused for that.

In virtual time, with more requests than the budget of retries allows, and beyond the capacity of
the replicas that are left.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire.router.http_client import Exchange
from quire.router.moves import MIN_PLACES, MovePlaces
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.virtual_fleet import (
    SteppedServer,
    VirtualFleet,
    run_virtual,
    whole_answer,
)

NUM_STREAMS, NUM_TOKENS = 450, 4
SETTINGS: dict[str, Any] = {"stall_s": 10.0, "probe_s": 0.25, "max_open": 2000, "resume_s": 30.0}


class BoundedServer(SteppedServer):
    """Refuses streams beyond `max_streams`, as a server with a full queue does."""

    max_streams = 10_000
    num_refused = 0

    async def send(
        self, method: bytes, path: bytes, headers: Any, body: bytes, **options: Any
    ) -> Exchange:
        """See SteppedServer."""
        if path == b"/health/beats" or len(self._streams) < self.max_streams or self.is_killed:
            return await super().send(method, path, headers, body, **options)
        self.num_refused += 1
        exchange = Exchange(self._loop, may_be_stale=False)
        exchange.began(_NoLink())  # type: ignore[arg-type]
        exchange.got_head(503, [(b"content-type", b"application/json")])
        exchange.got(b'{"error":{"message":"full","code":"overloaded"}}')
        exchange.completed()
        return exchange


class _NoLink:
    def abort(self) -> None:
        """Nothing is open."""

    def resume(self) -> None:
        """Nothing is held back."""


async def outcomes(streams: Sequence[asyncio.Future[Any]]) -> Counter[str]:
    """Count whole answers, and the error codes of others."""
    found = Counter[str]()
    for status, _, body in [await one for one in streams]:
        if (status, body) == (200, whole_answer(NUM_TOKENS)):
            found["whole"] += 1
        else:
            found[json.loads(body)["error"]["code"] if status != 200 else "broken"] += 1
    return found


def in_fleet(
    story: Callable[[VirtualFleet, Sequence[BoundedServer]], Any],
    step_s: float = 0.5,
    **settings: Any,
) -> None:
    async def go() -> None:
        servers = [BoundedServer(number, lambda now_s, count: step_s) for number in range(3)]
        fleet = VirtualFleet(servers, **{**SETTINGS, **settings})
        await fleet.router.start()
        try:
            await story(fleet, servers)
            assert fleet.router.admission.num_open == 0
            assert fleet.router.admission.places.num_taken == 0
            assert fleet.router.fleet.num_waiting == 0
        finally:
            await fleet.close()

    run_virtual(go())


def test_requests_without_output_all_move_when_their_replica_is_killed() -> None:
    """There are more of them than the budget of retries has."""

    async def story(fleet: VirtualFleet, servers: Sequence[BoundedServer]) -> None:
        streams = fleet.open_streams(NUM_STREAMS, NUM_TOKENS)
        await asyncio.sleep(0.3)
        assert len(servers[0].requests) > 130
        servers[0].kill()
        assert await outcomes(streams) == {"whole": NUM_STREAMS}

    in_fleet(story)


def test_requests_that_lose_two_replicas_move_again_a_bounded_number_at_a_time() -> None:
    async def story(fleet: VirtualFleet, servers: Sequence[BoundedServer]) -> None:
        streams = fleet.open_streams(NUM_STREAMS, NUM_TOKENS)
        await asyncio.sleep(0.3)
        servers[0].kill()
        await asyncio.sleep(0.1)
        assert len(servers[1].requests) - 150 > MIN_PLACES
        servers[1].kill()
        await asyncio.sleep(0.1)
        assert len(servers[2].requests) == 375, "those of the second move for the first time"
        servers[0].is_killed = False  # no third replica gets the others
        await asyncio.sleep(0.8)
        assert fleet.router.admission.places.num_taken == MIN_PLACES
        assert len(servers[0].requests) == 150 + MIN_PLACES
        assert await outcomes(streams) == {"whole": NUM_STREAMS}
        assert len(servers[0].requests) == 225

    in_fleet(story, step_s=2.0, stall_s=30.0, max_retry_share=0.1)


def test_a_place_for_which_there_was_no_replica_keeps_its_turn() -> None:
    """Requests that lost their place unused move before those that had an attempt with one."""

    async def story(fleet: VirtualFleet, servers: Sequence[BoundedServer]) -> None:
        streams = fleet.open_streams(NUM_STREAMS, NUM_TOKENS)
        await asyncio.sleep(0.3)
        servers[0].kill()
        await asyncio.sleep(0.1)
        servers[1].kill()
        await asyncio.sleep(0.1)
        first = servers[0]
        first.is_killed = False
        await asyncio.sleep(0.8)
        again = first.requests[150:]
        assert len(again) == MIN_PLACES
        first.kill()  # the others have their places, and no replica
        await asyncio.sleep(0.3)
        first.is_killed = False
        await until(lambda: len(first.requests) >= 150 + 2 * MIN_PLACES)
        seeds = {one["seed"] for one in first.requests[150 + MIN_PLACES :]}
        assert len(seeds) == MIN_PLACES
        assert len(seeds - {one["seed"] for one in again}) == 11, "all that had no attempt"
        assert await outcomes(streams) == {"whole": NUM_STREAMS}

    in_fleet(story, step_s=2.0, stall_s=30.0, max_retry_share=0.1)


@pytest.mark.parametrize("max_streams", [170, 151])
def test_where_the_others_are_full_requests_wait_for_room(max_streams: int) -> None:
    async def story(fleet: VirtualFleet, servers: Sequence[BoundedServer]) -> None:
        streams = fleet.open_streams(NUM_STREAMS, NUM_TOKENS)
        await asyncio.sleep(0.3)
        for one in servers:
            one.max_streams = max_streams
        servers[0].kill()
        assert await outcomes(streams) == {"whole": NUM_STREAMS}
        num_refused = sum(one.num_refused for one in servers)
        assert 0 < num_refused < 20 * NUM_STREAMS

    in_fleet(story)


def test_where_the_others_stay_full_requests_are_refused_after_the_time_to_resume() -> None:
    """Nothing waits without a bound; those with a deadline wait until then only."""

    async def story(fleet: VirtualFleet, servers: Sequence[BoundedServer]) -> None:
        loop = asyncio.get_running_loop()
        streams = fleet.open_streams(NUM_STREAMS, NUM_TOKENS)
        body = {"tokens": [1], "stream": True, "max_tokens": NUM_TOKENS, "deadline_ms": 2000}
        urgent = [asyncio.ensure_future(fleet.router.post("/generate", body)) for _ in range(30)]
        await asyncio.sleep(0.3)
        num_lost = len(servers[0].requests)
        for one in servers[1:]:
            one.max_streams = 0
        servers[0].kill()
        killed_s = loop.time()
        found = await outcomes(urgent)
        assert set(found) <= {"whole", "deadline_missed"}
        assert found["deadline_missed"] > 5
        assert loop.time() - killed_s < 3.0
        found = await outcomes(streams)
        assert set(found) == {"whole", "overloaded"}
        assert found["overloaded"] == num_lost - 10
        assert 5.0 <= loop.time() - killed_s < 8.0
        tries = sum(one.num_refused for one in servers) / num_lost
        assert tries < 15, "the pauses between tries grow"

    in_fleet(story, resume_s=5.0)


def test_a_request_that_all_have_refused_goes_to_a_replica_that_is_back_at_once() -> None:
    """And not after the pause before full ones are asked again, which is 2 s by then."""

    async def story(fleet: VirtualFleet, servers: Sequence[BoundedServer]) -> None:
        loop, first = asyncio.get_running_loop(), servers[0]
        streams = fleet.open_streams(3, NUM_TOKENS)
        await asyncio.sleep(0.3)
        num_sent = len(first.requests)
        for one in servers[1:]:
            one.max_streams = 0
        first.kill()
        await asyncio.sleep(2.5)
        assert servers[1].num_refused > 2
        first.is_killed = False
        while not fleet.is_up(first):
            await asyncio.sleep(0.01)
        back_s = loop.time()
        while len(first.requests) == num_sent:
            await asyncio.sleep(0.01)
        assert loop.time() - back_s < 0.5
        assert await outcomes(streams) == {"whole": 3}

    in_fleet(story)


def test_a_request_waits_for_a_replica_while_none_is_left() -> None:
    """Whole answers too: the only replica that is left is checked after a while."""
    first, second = FakeReplica(), FakeReplica()
    first.whole_gate = asyncio.Event()
    second.health |= {"ok": False, "state": "draining"}

    async def story(router: Router) -> None:
        asked = asyncio.ensure_future(router.post("/generate", {"tokens": [1]}))
        await first.began.wait()
        first.stop_listening(cuts=True)
        await asyncio.sleep(0.5)
        assert not asked.done()
        second.health |= {"ok": True, "state": "ready"}
        assert (await asked)[0] == 200

    run([first, second], story)


def test_a_request_that_may_be_the_cause_needs_the_budget_of_retries() -> None:
    """Few requests at their beginning are suspects; without a retry they end at once."""
    others = [FakeReplica() for _ in range(14)]  # breakers stay closed
    for one in others:
        one.status, one.body = 500, b'{"error":{"code":"internal_error"}}'

    async def story(router: Router) -> None:
        codes = Counter[int]()
        for _ in range(14):
            await until(lambda: router.fleet.num_available == 14)
            codes[(await router.post("/generate", {"tokens": [1]}))[0]] += 1
        assert router.count("quire_router_retries_total") == 10
        assert codes == {502: 10, 500: 4}

    run(others, story, max_retry_share=0.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_places_are_given_in_order_and_returned() -> None:
    async def story() -> None:
        num_open = 0
        places = MovePlaces(0.2, lambda: num_open)
        asked = [places.ask(places.turn()) for _ in range(MIN_PLACES + 3)]
        await asyncio.sleep(0)
        assert [one.done() for one in asked] == [True] * MIN_PLACES + [False] * 3
        places.withdraw(asked[MIN_PLACES])  # it gives up
        places.give_back()
        assert [one.done() for one in asked[-2:]] == [True, False]
        asked.append(places.ask(places.turn()))
        places.withdraw(asked[0])
        assert [one.done() for one in asked[-2:]] == [True, False], "in the order of coming"
        num_open = 5 * (MIN_PLACES + 10)
        more = [places.ask(places.turn()) for _ in range(12)]
        await asyncio.sleep(0)
        assert [one.done() for one in (asked[-1], *more)] == [True] * 10 + [False] * 3
        assert places.num_taken == MIN_PLACES + 10

    asyncio.run(story())


def test_of_requests_that_ask_in_one_turn_of_the_event_loop_those_that_came_first_go_first() -> (
    None
):
    """All that wait for a replica are woken at once, in any order."""

    async def story() -> None:
        places = MovePlaces(0.0, lambda: 1000)
        turns = [places.turn() for _ in range(2 * MIN_PLACES)]
        asked = {turn: places.ask(turn) for turn in reversed(turns)}
        await asyncio.sleep(0)
        assert [asked[turn].done() for turn in turns] == [True] * MIN_PLACES + [False] * MIN_PLACES

    asyncio.run(story())

"""Deadlines: what passes in the router counts, and a request waits no longer than its deadline."""

from __future__ import annotations

import asyncio
import json

from quire.router.features import Features
from quire.router.route_file import TiersTable
from quire.router.tiers import Tiers
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, WHOLE, stream
from tests.unit.router.test_hedging import Late, _fill, _learn

GIVEN = [-1, 0, True, "soon", 10**400]
TIMES = {"deadline_ms": 30_000, "ttft_slo_ms": 20_000.5}


def test_the_time_that_a_request_waits_is_taken_from_its_deadline() -> None:
    replica = FakeReplica()

    async def story(router: Router) -> None:
        assert (await stream(router, **TIMES))[2] == ANSWER
        urls, router.discovery.urls = router.discovery.urls, ()
        router.fleet.follow()
        asked = asyncio.ensure_future(stream(router, **TIMES))
        await asyncio.sleep(0.05)
        router.discovery.urls = urls
        router.fleet.probe_now.set()
        assert (await asked)[2] == ANSWER

    run([replica], story, wait_s=15.0)
    at_once, waited = replica.requests
    for name, given in TIMES.items():
        assert waited[name] <= given - 50
        assert waited[name] < at_once[name] <= given


def test_no_request_waits_beyond_its_deadline() -> None:
    async def story(router: Router) -> None:
        router.discovery.urls = ()
        router.fleet.follow()
        status, _, body = await stream(router, deadline_ms=20)
        assert (status, json.loads(body)["error"]["code"]) == (503, "deadline_missed")
        assert router.fleet.num_waiting == 0
        assert not router.fleet._waiting, "else each leaves a future until a replica is available"

    run([FakeReplica()], story, wait_s=1000.0)


def test_a_tier_that_is_full_is_not_waited_for_beyond_the_deadline() -> None:
    replica = FakeReplica()
    replica.gate = asyncio.Event()

    async def story(router: Router) -> None:
        first = asyncio.ensure_future(stream(router))
        await replica.began.wait()
        status, _, body = await stream(router, deadline_ms=20)
        assert (status, json.loads(body)["error"]["code"]) == (503, "deadline_missed")
        assert replica.gate is not None
        replica.gate.set()
        assert (await first)[2] == ANSWER

    tiers = Tiers(TiersTable(max_default=1, max_wait_seconds=600.0))
    run([replica], story, Features(tiers=tiers))


def test_a_stream_that_continues_has_its_first_token_and_ends_at_its_deadline() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after, second.fails_after = 4, 2

    def neither_comes_back(token: int) -> None:
        if token == 105:
            for one in (first, second):
                one.health |= {"ok": False, "state": "dead"}

    async def story(router: Router) -> None:
        body = (await stream(router, deadline_ms=1500, ttft_slo_ms=1000))[2]
        assert body.startswith(WHOLE[: WHOLE.index(b'data: {"token": 106}')])
        assert body.count(b'"code":"deadline_missed"') == 1

    second.before_token = neither_comes_back
    run([first, second], story, resume_s=600.0)
    [again] = second.requests
    assert "ttft_slo_ms" not in again
    assert again["deadline_ms"] <= 1500


def test_what_is_no_time_is_the_replicas_to_refuse() -> None:
    replica = FakeReplica()

    async def story(router: Router) -> None:
        for given in GIVEN:
            assert (await stream(router, deadline_ms=given))[2] == ANSWER

    run([replica], story)
    assert [one["deadline_ms"] for one in replica.requests] == GIVEN


def test_a_hedge_has_what_is_left_of_the_deadline() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.gate, late = asyncio.Event(), Late()

    async def story(router: Router) -> None:
        _learn(router)
        _fill(late)
        answer = asyncio.ensure_future(stream(router, **TIMES))
        await first.began.wait()
        await asyncio.sleep(0.3)
        late.has_passed.set()
        assert (await answer)[2] == ANSWER

    run([first, second], story, late.features)
    [given], [left] = first.requests, second.requests
    for name in TIMES:
        assert left[name] <= given[name] - 300
        del given[name], left[name]
    assert left == given

"""What must not mislead a router: lying replicas, skewed clocks, partitions, many sessions.

Other bad input has its test beside what it is meant for: fingerprints and poison requests in
test_failover.py, KV events in test_event_order.py, discovery files in test_choice.py, Redis in
test_redis.py, ids of other clients in test_responses.py and tests/serve/test_continuation.py.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router.faults import ReplicaFault
from quire.router.http_client import ConnectionPool
from quire.router.policies import make_routing_policy
from quire.router.quotas import LocalBuckets, Quota, Reservation
from quire.router.redis_buckets import RedisBuckets
from quire.router.redis_link import RedisLink
from quire.router.replica import Replica
from quire.router.routed_request import RoutedRequest
from quire.router.settings import ROUTING_POLICIES, RouterSettings
from tests.unit.router.fake_redis import FakeRedis
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run

STREAM: dict[str, Any] = {"tokens": [1, 2], "seed": 5, "stream": True, "max_tokens": LENGTH}
ANSWER = (
    b"".join(b'data: {"token": %d}\n\n' % token for token in range(100, 100 + LENGTH))
    + b"data: [DONE]\n\n"
)
MINUTE_S = 60


@pytest.mark.parametrize("pending", [0, 10**9])
def test_reports_of_load_change_no_choice(pending: int) -> None:
    """Load is what the router itself has sent, whatever a replica says of its queue."""
    replicas = [FakeReplica() for _ in range(3)]
    replicas[0].health["pending"] = pending

    async def story(router: Router) -> None:
        before_token = replicas[0].before_token
        replicas[0].before_token = lambda token: before_token(token)
        for turn in range(9):
            replicas[0].steps_total += 1  # it makes progress, so it is no stall
            assert (await router.post("/generate", {**STREAM, "seed": turn}))[0] == 200

    run(replicas, story, policy="least-tokens")
    assert [len(one.requests) for one in replicas] == [3, 3, 3]


@pytest.mark.parametrize("health", [{"ok": "yes"}, {"state": 5}, {"pending": "many"}, {"ok": None}])
def test_a_replica_with_a_report_of_no_sense_gets_nothing(health: dict[str, Any]) -> None:
    liar, honest = FakeReplica(), FakeReplica()
    liar.health |= health

    async def story(router: Router) -> None:
        for _ in range(4):
            assert (await router.post("/generate", STREAM))[2] == ANSWER

    run([liar, honest], story)
    assert (len(liar.requests), len(honest.requests)) == (0, 4)


@pytest.mark.parametrize("was_used", [False, True])
def test_a_replica_without_an_engine_is_down_until_it_lists_its_models_again(
    was_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies between the answers to /health and /v1/models."""
    only = FakeReplica()
    only.models_status = 200 if was_used else 503

    async def story(router: Router) -> None:
        [replica] = router.fleet.replicas.values()
        if was_used:
            assert replica.is_up
            only.models_status = 503
            monkeypatch.setattr("quire.router.prober._MODELS_EVERY_S", 0.0)
            while replica.is_up:
                await asyncio.sleep(0.01)
        assert replica.state == "dead"
        assert replica.reason == "/v1/models answers 503, as where its engine is down"
        assert not any("not that of a server of Quire" in line for line in router.lines)
        only.models_status = 200
        while not replica.is_up:
            await asyncio.sleep(0.01)
        assert (await router.post("/generate", STREAM))[2] == ANSWER

    run([only], story)


def test_no_replica_promises_a_stream_that_its_client_can_resume() -> None:
    """The router has no route for that, and continues the stream itself."""
    replicas = [FakeReplica(), FakeReplica()]
    replicas[0].fails_after = 4

    async def story(router: Router) -> None:
        body = {**STREAM, "stream_options": {"resumable": True}}
        assert (await router.post("/generate", body))[2] == ANSWER
        assert len(replicas[1].requests) == 1
        for replica in replicas:
            replica.raw_answer = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                b"x-quire-resume-seconds: 30\r\ncontent-length: 2\r\n\r\n{}"
            )
        status, headers, _ = await router.post("/generate", STREAM)
        assert status == 200
        assert b"content-type" in headers
        assert b"x-quire-resume-seconds" not in headers

    run(replicas, story)


def test_a_replica_behind_a_partition_adds_nothing_when_it_is_over() -> None:
    """Its stream goes on elsewhere; what it still sends of its own is not passed on."""
    first, second = FakeReplica(), FakeReplica()

    async def story(router: Router) -> None:
        held = asyncio.Event()
        first.silent_after = 4
        first.health["pending"] = 1
        status, _, body = await router.post("/generate", STREAM)
        assert (status, body) == (200, ANSWER)
        assert second.requests[0]["output_ids"] == [100, 101, 102, 103]
        first.silent_after = None
        first.health["pending"] = 0
        first.steps_total += 1
        held.set()
        async with asyncio.timeout(15):
            while router.fleet.num_available < 2:
                await asyncio.sleep(0.02)
        for _ in range(4):
            assert (await router.post("/generate", STREAM))[2] == ANSWER
        assert len(first.requests) >= 3, "it is used again"

    run([first, second], story)


def test_quotas_of_routers_with_skewed_clocks_are_one() -> None:
    """Redis' clock counts: a router an hour ahead gets no more than one with the right time."""
    quota = Quota("tenant:acme", 10.0, 1000)

    async def story() -> None:
        fake = FakeRedis()
        await fake.start()
        links = [RedisLink(fake.url, 5.0) for _ in range(3)]
        log = Log("router", io.StringIO())
        routers = [
            RedisBuckets(link, "q:", LocalBuckets(clock, 1), log, clock)
            for link, clock in zip(
                links, (lambda: 0.0, lambda: 3600.0, lambda: -3600.0), strict=True
            )
        ]
        taken = 0
        for second in range(30):
            for router in routers:
                while isinstance(await router.reserve(quota, 100), Reservation):
                    taken += 100
            fake.now_s += 1
            assert taken <= 1000 + 10 * (second + 1)
        assert taken >= 1200
        for link in links:
            await link.close()
        await fake.stop()

    asyncio.run(story())


def test_while_redis_is_down_for_a_minute_each_router_allows_its_part() -> None:
    quota, now_s = Quota("tenant:acme", 20.0, 1000), [0.0]

    async def story() -> None:
        fake = FakeRedis()
        await fake.start()
        link = RedisLink(fake.url, 0.2)
        local = LocalBuckets(lambda: now_s[0], 2)
        buckets = RedisBuckets(link, "q:", local, Log("router", io.StringIO()), lambda: now_s[0])
        assert isinstance(await buckets.reserve(quota, 1), Reservation)
        await fake.stop()
        taken = 0
        for _ in range(MINUTE_S):
            while isinstance(await buckets.reserve(quota, 10), Reservation):
                taken += 10
            now_s[0] += 1.0
        part = (1000 + 20 * MINUTE_S) / 2
        assert part - 20 <= taken <= part
        await fake.start()
        now_s[0] += 1.1
        assert isinstance(await buckets.reserve(quota, 900), Reservation)
        assert not buckets.is_down
        await link.close()
        await fake.stop()

    asyncio.run(story())


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_ten_thousand_sessions_are_spread_and_remembered_within_bounds(name: str) -> None:
    settings = RouterSettings(policy=name, history_blocks=1000)  # fewer than there are sessions
    policy, drawn = make_routing_policy(settings), Random(9)
    replicas = [Replica(server_url(f"http://10.0.0.{at}:8000"), at) for at in range(8)]
    used: Counter[int] = Counter()
    for at in range(10_000):
        raw = b'{"prompt":"%b","prompt_cache_key":"user-%d"}' % (b"%05d" % at * 60, at)
        key = RoutedRequest("/v1/completions", [], raw).key()
        chosen = policy.choose(replicas, key)
        policy.sent(chosen, key)
        used[chosen.number] += 1
        if name == "session-affinity" and at % 100 == 0:
            drawn.shuffle(replicas)
            assert policy.choose(replicas, key) is chosen
    assert len(used) == 8
    assert max(used.values()) < 1.25 * min(used.values()), used
    history = getattr(policy, "_history", None)
    if history is not None:
        assert len(history._masks) == 8 * 1000
        assert max(map(len, history._of_replica.values())) == 1000


def test_a_body_that_is_announced_too_large_is_not_read() -> None:
    """The answer does not wait for it: of what the client sends nothing was received."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("a part of the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    async def story(router: Router) -> None:
        for length in (b"4097", b"9" * 400):
            scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
            scope["headers"] = [(b"content-length", length)]
            await router.app(scope, receive, send)

    run([FakeReplica()], story, max_body_bytes=4096)
    assert [one["status"] for one in sent[::2]] == [413, 413]
    assert all(b"body_too_large" in one["body"] for one in sent[1::2])


@pytest.mark.parametrize("every_s", [1e9, 7.0])
def test_a_body_of_which_half_is_sent_is_refused_after_a_while(every_s: float) -> None:
    """No more comes, or a little of it now and then."""
    sent: list[Any] = []

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        pauses_s = iter([0.0])

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(next(pauses_s, every_s))
            return {"type": "http.request", "body": b'{"tokens"', "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
        scope["headers"] = [(b"content-length", b"4000")]
        await router.app(scope, receive, send)
        assert 59.9 < loop.time() - began_s < 60.1
        assert router.admission.num_open == 0
        assert 'requests_total{route="/generate",status="408"} 1.0' in (
            router.metrics.text().decode()
        )

    replica = FakeReplica()
    run([replica], story, within_s=100.0, probe_s=5.0, stall_s=20.0)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b'"code":"timeout"' in sent[1]["body"]
    assert b"did not come within 60 s" in sent[1]["body"]
    assert not replica.requests


def test_a_body_that_is_still_to_come_is_refused_when_the_router_stops() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(1e9)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
        scope["headers"] = [(b"content-length", b"40")]
        asking = asyncio.ensure_future(router.app(scope, receive, send))
        await asyncio.sleep(0.1)
        cut_s = loop.time()
        router.app.cut.set_result(None)
        await asking
        assert loop.time() - cut_s < 0.1

    run([FakeReplica()], story)
    assert sent[0]["status"] == 503
    assert b"shutting_down" in sent[1]["body"]


def test_a_body_that_was_read_when_the_router_stopped_leaves_no_error() -> None:
    errors = list[Any]()

    async def story(router: Router) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: errors.append(found))
        router.app.cut.set_result(None)
        status, _, body = await router.post("/generate", {"tokens": [1]})
        assert (status, b"shutting_down" in body) == (503, True)

    run([FakeReplica()], story)
    assert not errors


def test_a_busy_router_gives_up_no_connection_that_it_reads_late(monkeypatch: Any) -> None:
    """Time in which the router's own loop was busy is no silence of a server."""
    replica = FakeReplica()

    async def story(router: Router) -> None:
        loop: Any = asyncio.get_running_loop()
        connect = loop.create_connection

        async def late(*words: Any, **named: Any) -> Any:
            for _ in range(5):  # turns of a loop with thousands of requests
                loop._virtual.now_s += 1.0
                await asyncio.sleep(0)
            return await connect(*words, **named)

        async def never(*words: Any, **named: Any) -> Any:
            await asyncio.Event().wait()

        pool = router.fleet.pool(next(iter(router.fleet.replicas.values())))
        monkeypatch.setattr(loop, "create_connection", late, raising=False)
        exchange = await pool.send(b"GET", b"/health", [], b"", is_fresh=True)
        await exchange.head()
        assert exchange.status == 200
        exchange.close()
        monkeypatch.setattr(loop, "create_connection", never, raising=False)
        with pytest.raises(ReplicaFault, match=r"no connection .* within 2 s"):
            await pool.send(b"GET", b"/health", [], b"", is_fresh=True)
        monkeypatch.undo()

    run([replica], story)


def test_a_connection_that_is_not_made_is_waited_for_no_longer_than_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a partition: once the replica is given up, or the client has left."""
    away, other = FakeReplica(), FakeReplica()

    async def story(router: Router) -> None:
        loop: Any = asyncio.get_running_loop()
        connect = loop.create_connection

        async def partitioned(factory: Any, host: str, port: int, **named: Any) -> Any:
            if port == away.port:
                await asyncio.Event().wait()
            return await connect(factory, host, port, **named)

        replica = router.fleet.replicas[away.url]
        monkeypatch.setattr(loop, "create_connection", partitioned, raising=False)
        router.fleet.pool(replica).close()
        began_s = loop.time()
        await router.leave("/generate", {"tokens": [1]}, 0.05)
        assert loop.time() - began_s < 0.3
        assert replica.is_available(loop.time()), "that its client has left is no failure"
        router.fleet.policy.choose = lambda able, key: able[0]  # type: ignore[method-assign]
        assert (await router.post("/generate", {"tokens": [1]}))[0] == 200
        assert replica.is_fenced
        assert loop.time() - began_s < 10.0
        monkeypatch.undo()

    run([away, other], story, connect_s=60.0, stall_s=1.0)
    assert other.requests
    assert not away.requests


@pytest.mark.parametrize("is_open", [False, True])
def test_a_request_that_is_cancelled_leaves_no_connection_behind(is_open: bool) -> None:
    """Neither one that is being opened nor one that is open in the same turn of the loop."""

    async def go() -> None:
        has_ended = asyncio.Event()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            has_ended.set()

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        loop: Any = asyncio.get_running_loop()
        connect, opening = loop.create_connection, []

        async def opened(*words: Any, **named: Any) -> Any:
            opening.append(asyncio.current_task())
            if not is_open:
                await asyncio.Event().wait()
            return await connect(*words, **named)

        loop.create_connection = opened
        pool = ConnectionPool(server_url(f"http://127.0.0.1:{port}"), 2.0)
        sending = asyncio.ensure_future(pool.send(b"GET", b"/", [], b""))
        while not opening:
            await asyncio.sleep(0)
        if is_open:
            opening[0].add_done_callback(lambda _: sending.cancel())
        else:
            sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.wait(opening, timeout=10)
        assert opening[0].cancelled() != is_open
        if is_open:
            async with asyncio.timeout(10):
                await has_ended.wait()
        server.close()

    asyncio.run(go())

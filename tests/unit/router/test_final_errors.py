"""Errors that a server marks as final: one other replica is asked at most, then they are passed on.

They count against a replica only where another one answers the same request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from quire.api.http.errors import report_of, shape_of
from quire.base.errors import (
    CapacityError,
    ModelError,
    PoisonRequest,
    QuireError,
    SettingError,
    ShuttingDown,
    WorkerError,
)
from tests.unit.base.test_http_apis import dialect_of
from tests.unit.router.fake_replica import FakeReplica, Router, response, run
from tests.unit.router.test_failover import ANSWER, ENDED, ERROR_EVENT, WHOLE, stream
from tests.unit.router.test_other_apis import BODIES

FINAL = [PoisonRequest("it ends"), ModelError("it ends"), SettingError("it ends")]
FINAL.append(CapacityError("it ends"))
BROKEN = ModelError("it ends")
NUM_REQUESTS = 5


async def ask(router: Router, path: str, *, streams: bool) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send a request of an API."""
    return await router.post(path, {**BODIES[path], "stream": streams})


def _check_untouched(router: Router, num_retries: int = 0) -> None:
    now_s = asyncio.get_running_loop().time()
    assert all(one.is_available(now_s) for one in router.fleet.replicas.values())
    assert router.count("quire_router_replica_faults_total") == 0
    assert router.count("quire_router_retries_total") == num_retries


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("streams", [False, True])
def test_a_final_error_is_passed_on_and_counts_for_its_request_only(
    error: QuireError, streams: bool
) -> None:
    """A request that ends engines gets no further one; after the others one more is asked."""
    replicas = [FakeReplica() for _ in range(3)]
    for one in replicas:
        one.raw_answer = response(error)
    num_more = 0 if isinstance(error, PoisonRequest) else 1

    async def story(router: Router) -> None:
        for number in range(1, NUM_REQUESTS + 1):
            status, headers, body = await stream(router, stream=streams)
            assert (status, headers[b"x-should-retry"]) == (500, b"false")
            assert json.loads(body)["error"]["code"] == shape_of(error).code
            _check_untouched(router, number * num_more)

    run(replicas, story)
    assert sum(len(one.requests) for one in replicas) == NUM_REQUESTS * (1 + num_more)


def test_a_final_error_without_a_code_is_passed_on() -> None:
    first, second = FakeReplica(), FakeReplica()
    head, _, body = response(FINAL[0]).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if b"error-code" not in line]
    first.raw_answer = b"\r\n".join([*lines, b"", body])

    async def story(router: Router) -> None:
        assert (await stream(router))[::2] == (500, body)
        _check_untouched(router)

    run([first, second], story)
    assert not second.requests


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_ends_engines_goes_no_further_in_any_api(path: str, streams: bool) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.raw_answer = response(FINAL[0], dialect_of(path))

    async def story(router: Router) -> None:
        status, headers, body = await ask(router, path, streams=streams)
        assert (status, headers[b"x-quire-error-code"]) == (500, b"poison_request")
        assert first.raw_answer is not None
        assert body == first.raw_answer.partition(b"\r\n\r\n")[2]
        _check_untouched(router)

    run([first, second], story)
    assert not second.requests


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_replica_that_is_broken_in_itself_shows_in_any_api(path: str, streams: bool) -> None:
    broken, good = FakeReplica(), FakeReplica()
    broken.raw_answer = response(BROKEN, dialect_of(path))
    good.event_end = b"\n" if path.startswith("/api/") else b"\n\n"

    async def story(router: Router) -> None:
        for _ in range(6):
            assert (await ask(router, path, streams=streams))[0] == 200
        replica = router.fleet.replicas[broken.url]
        assert not replica.breaker.allows(asyncio.get_running_loop().time())
        assert router.count("quire_router_replica_faults_total") == 0

    run([broken, good], story)
    assert len(broken.requests) == 3


@pytest.mark.parametrize("path", BODIES)
def test_a_replica_that_refuses_while_it_drains_gets_no_more_requests(path: str) -> None:
    """Of any API, and before it was probed again."""
    first, second = FakeReplica(), FakeReplica()
    first.raw_answer = response(ShuttingDown("bye"), dialect_of(path))

    async def story(router: Router) -> None:
        first.health_gate = asyncio.Event()
        assert (await ask(router, path, streams=False))[0] == 200
        assert len(first.requests) == 1
        assert router.fleet.replicas[first.url].state == "draining"

    run([first, second], story, probe_s=1.0, stall_s=5.0)


def test_an_error_that_is_not_final_is_a_failure_of_the_replica() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.raw_answer = response(QuireError("it ends"))

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        assert router.count("quire_router_replica_faults_total") == 1

    run([first, second], story)


def test_a_final_error_is_no_verdict_for_the_circuit_breaker() -> None:
    only = FakeReplica()
    only.raw_answer = response(FINAL[0])

    async def story(router: Router) -> None:
        (replica,) = router.fleet.replicas.values()
        now_s = asyncio.get_running_loop().time()
        replica.breaker.failed(now_s)
        replica.breaker.failed(now_s)
        assert (await stream(router))[0] == 500
        assert replica.breaker.allows(now_s)
        replica.breaker.failed(now_s)
        assert not replica.breaker.allows(now_s), "it is the third failure in a row"

    run([only], story)


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
def test_a_final_error_within_a_stream_is_passed_on(error: QuireError) -> None:
    first, second = FakeReplica(), FakeReplica()
    event, comment = (one % str(shape_of(error).code).encode() for one in (ERROR_EVENT, ENDED))
    first.fails_after, first.says = 5, event + comment

    async def story(router: Router) -> None:
        body = (await stream(router))[2]
        assert body == WHOLE[: WHOLE.index(b'data: {"token": 105}')] + event
        _check_untouched(router)

    run([first, second], story)
    assert not second.requests


@pytest.mark.parametrize("path", BODIES)
def test_the_code_of_an_error_within_a_stream_is_known_in_any_api(path: str) -> None:
    """In a comment, so that a final one is passed on and another one ends no stream."""
    dialect = dialect_of(path)
    framing = dialect.framing("r")

    def event(error: QuireError) -> bytes:
        _, body = dialect.error(report_of(error), "r")
        return framing.error(6, json.dumps(body).encode())

    for error in (BROKEN, WorkerError("it ends")):
        first, second = FakeReplica(), FakeReplica()
        first.event_end = second.event_end = framing.event_end
        comment = b': {"ended":"%b"}%b' % (str(shape_of(error).code).encode(), framing.event_end)
        first.fails_after, first.says = 5, event(error) + comment

        async def story(router: Router) -> bytes:
            return (await ask(router, path, streams=True))[2]

        body = run([first, second], story)
        is_final = error is BROKEN
        assert body.endswith(event(error)) == is_final
        assert len(second.requests) == (0 if is_final else 1)


def test_a_stream_ends_where_its_next_replica_has_a_final_error() -> None:
    """That replica has not failed, and no third one gets the request."""
    replicas = first, second, third = [FakeReplica() for _ in range(3)]
    first.fails_after = 3
    second.raw_answer = third.raw_answer = response(FINAL[0])

    async def story(router: Router) -> None:
        body = (await stream(router))[2]
        error = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == "resume_refused"
        assert "it ends" in error["message"]
        assert router.count("quire_router_replica_faults_total") == 1, "the first one's"

    run(replicas, story)
    assert len(second.requests) + len(third.requests) == 1


def test_a_final_error_after_a_failure_of_another_replica_is_asked_of_no_third_one() -> None:
    first, second, _ = replicas = [FakeReplica() for _ in range(3)]
    first.raw_answer = b""  # takes the request and closes the connection
    second.raw_answer = response(BROKEN)

    async def story(router: Router) -> None:
        status, _, body = await stream(router)
        assert (status, json.loads(body)["error"]["code"]) == (500, "model_error")

    run(replicas, story)
    assert [len(one.requests) for one in replicas] == [1, 1, 0]


def test_a_client_that_repeats_a_final_error_costs_no_more_than_the_budget_of_retries() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    for one in replicas:
        one.raw_answer = response(BROKEN)
    count = 200

    async def story(router: Router) -> None:
        for _ in range(count):
            assert (await stream(router))[0] == 500
        _check_untouched(router, sum(len(one.requests) for one in replicas) - count)

    run(replicas, story, max_retry_share=0.1)
    assert sum(len(one.requests) for one in replicas) <= count * 1.1 + 10


@pytest.mark.parametrize("streams", [False, True])
def test_a_replica_that_is_broken_in_itself_gets_no_more_requests(streams: bool) -> None:
    """Its errors come at once, so it would be the least loaded one for ever. It is not fenced."""
    broken, *others = replicas = [FakeReplica() for _ in range(3)]
    broken.raw_answer = response(BROKEN)

    async def story(router: Router) -> None:
        for _ in range(30):
            assert (await stream(router, stream=streams))[0] == 200
        replica = router.fleet.replicas[broken.url]
        assert not replica.breaker.allows(asyncio.get_running_loop().time())
        assert replica.is_up
        assert router.count("quire_router_replica_faults_total") == 0
        assert router.count("quire_router_retries_total") == 3
        broken.raw_answer = None
        await asyncio.sleep(2.0)  # its breaker lets one try
        for _ in range(6):
            assert (await stream(router, stream=streams))[0] == 200
        assert replica.breaker.allows(asyncio.get_running_loop().time())

    run(replicas, story)
    assert len(broken.requests) >= 5
    assert sum(len(one.requests) for one in others) <= 30 + 4


def test_a_route_that_generates_nothing_shows_a_broken_replica_too() -> None:
    broken, good = FakeReplica(), FakeReplica()
    broken.raw_answer = response(BROKEN)

    async def story(router: Router) -> None:
        for _ in range(6):
            assert (await router.post("/tokenize", {"prompt": "a"}))[0] == 200
        replica = router.fleet.replicas[broken.url]
        assert not replica.breaker.allows(asyncio.get_running_loop().time())

    run([broken, good], story)


def _dies(replica: FakeReplica) -> None:
    replica.raw_answer = b""


def _is_full(replica: FakeReplica) -> None:
    replica.status, replica.body = 503, b'{"error":{"message":"full","code":"overloaded"}}'


@pytest.mark.parametrize("harm", [_dies, _is_full])
def test_a_final_error_is_passed_on_where_the_other_replica_does_not_answer(
    harm: Callable[[FakeReplica], None],
) -> None:
    """No third one is asked, and nothing is waited for."""
    first, second, _ = replicas = [FakeReplica() for _ in range(3)]
    first.raw_answer = response(BROKEN)
    harm(second)

    async def story(router: Router) -> None:
        status, headers, body = await stream(router)
        assert (status, headers[b"x-should-retry"]) == (500, b"false")
        assert json.loads(body)["error"]["code"] == "model_error"
        now_s = asyncio.get_running_loop().time()
        assert router.fleet.replicas[first.url].is_available(now_s)

    run(replicas, story)
    assert [len(one.requests) for one in replicas] == [1, 1, 0]


def test_no_budget_and_no_other_replica_leave_a_final_error_as_it_is() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.raw_answer = response(BROKEN)

    async def story(router: Router) -> None:
        while router.app._dispatcher._shared.budget.take():
            pass
        assert (await stream(router))[0] == 500
        router.fleet.suspect(router.fleet.replicas[second.url])
        assert (await stream(router))[0] == 500
        assert router.fleet.replicas[first.url].is_available(asyncio.get_running_loop().time())
        assert router.count("quire_router_retries_total") == 0

    run([first, second], story, max_retry_share=0.0)
    assert not second.requests


def test_a_stream_of_the_other_replica_continues_as_any_other() -> None:
    """The other one has answered, so that it fails afterwards is its own matter."""
    first, second, third = replicas = [FakeReplica() for _ in range(3)]
    first.raw_answer = response(BROKEN)
    second.fails_after = 4

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER

    run(replicas, story)
    assert len(third.requests) == 1

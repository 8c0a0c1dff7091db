"""Errors that a server marks as final: passed on as they are, and no failure of a replica."""

from __future__ import annotations

import asyncio
import json

import pytest

from quire.api.http.errors import error_headers, shape_of
from quire.base.errors import CapacityError, ModelError, PoisonRequest, QuireError, SettingError
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, ENDED, ERROR_EVENT, WHOLE, stream

FINAL = [PoisonRequest("it ends"), ModelError("it ends"), SettingError("it ends")]
FINAL.append(CapacityError("it ends"))
NUM_REQUESTS = 5


def _response(error: QuireError, body: bytes = b"") -> bytes:
    """Return the response of a server with an error."""
    shape = shape_of(error)
    body = body or json.dumps({"error": {"message": str(error), "code": shape.code}}).encode()
    headers = {"content-length": str(len(body)), "connection": "close", **error_headers(error)}
    head = [f"HTTP/1.1 {shape.status} X", *(f"{name}: {one}" for name, one in headers.items())]
    return "\r\n".join([*head, "", ""]).encode() + body


def _check_untouched(router: Router) -> None:
    now_s = asyncio.get_running_loop().time()
    assert all(one.is_available(now_s) for one in router.fleet.replicas.values())
    assert router.count("quire_router_replica_faults_total") == 0
    assert router.count("quire_router_retries_total") == 0


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("streams", [False, True])
def test_a_final_error_is_passed_on_and_counts_for_its_request_only(
    error: QuireError, streams: bool
) -> None:
    replicas = [FakeReplica(), FakeReplica()]
    for one in replicas:
        one.raw_answer = _response(error)

    async def story(router: Router) -> None:
        for _ in range(NUM_REQUESTS):
            status, headers, body = await stream(router, stream=streams)
            assert (status, headers[b"x-should-retry"]) == (500, b"false")
            assert json.loads(body)["error"]["code"] == shape_of(error).code
            _check_untouched(router)

    run(replicas, story)
    assert sum(len(one.requests) for one in replicas) == NUM_REQUESTS


def test_a_final_error_of_an_api_without_codes_is_passed_on() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.raw_answer = _response(FINAL[0], b'{"error":"it ends"}')

    async def story(router: Router) -> None:
        assert (await router.post("/api/chat", {"messages": []}))[::2] == (
            500,
            b'{"error":"it ends"}',
        )
        _check_untouched(router)

    run([first, second], story)
    assert not second.requests


def test_an_error_that_is_not_final_is_a_failure_of_the_replica() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.raw_answer = _response(QuireError("it ends"))

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        assert router.count("quire_router_replica_faults_total") == 1

    run([first, second], story)


def test_a_final_error_is_no_verdict_for_the_circuit_breaker() -> None:
    only = FakeReplica()
    only.raw_answer = _response(FINAL[0])

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


def test_a_stream_ends_where_its_next_replica_has_a_final_error() -> None:
    """That replica has not failed, and no third one gets the request."""
    replicas = first, second, third = [FakeReplica() for _ in range(3)]
    first.fails_after = 3
    second.raw_answer = third.raw_answer = _response(FINAL[0])

    async def story(router: Router) -> None:
        body = (await stream(router))[2]
        error = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == "resume_refused"
        assert "it ends" in error["message"]
        assert router.count("quire_router_replica_faults_total") == 1, "the first one's"

    run(replicas, story)
    assert len(second.requests) + len(third.requests) == 1

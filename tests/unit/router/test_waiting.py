"""Requests that wait for a replica, where replicas are started on demand (wait_s)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.base.server_url import server_url
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, STREAM, stream


async def _until_one_waits(router: Router) -> None:
    while not router.fleet.num_waiting:
        await asyncio.sleep(0.01)


def test_a_request_waits_for_a_first_replica() -> None:
    replica = FakeReplica()

    async def story(router: Router) -> None:
        urls, router.discovery.urls = router.discovery.urls, ()
        router.fleet.follow()
        asked = asyncio.ensure_future(stream(router))
        await _until_one_waits(router)
        assert not replica.requests
        router.discovery.urls = urls
        router.fleet.probe_now.set()
        assert (await asked)[::2] == (200, ANSWER)
        assert router.fleet.num_waiting == 0

    run([replica], story, wait_s=15.0)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_a_request_waits_no_longer_than_it_may(wait_s: float) -> None:
    async def story(router: Router) -> None:
        router.discovery.urls = ()
        router.fleet.follow()
        status, _, body = await stream(router)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_replica")
        assert router.fleet.num_waiting == 0

    run([FakeReplica()], story, wait_s=wait_s)


def test_a_model_that_no_replica_has_is_not_waited_for() -> None:
    async def story(router: Router) -> None:
        status, _, body = await stream(router, model="other")
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")

    run([FakeReplica()], story, wait_s=1000.0)


def test_a_client_that_leaves_ends_the_wait() -> None:
    async def story(router: Router) -> None:
        router.discovery.urls = ()
        router.fleet.follow()
        left = asyncio.ensure_future(_post_and_leave(router))
        await _until_one_waits(router)
        await left
        assert router.fleet.num_waiting == 0

    async def _post_and_leave(router: Router) -> None:
        sent: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(STREAM).encode()}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await _until_one_waits(router)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
        await router.app({**scope, "headers": []}, receive, send)  # type: ignore[arg-type]

    run([FakeReplica()], story, wait_s=1000.0)


def test_a_stream_waits_for_a_replica_that_is_not_known_yet() -> None:
    """The only replica dies and leaves the list before its successor is in it."""
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 4

    async def story(router: Router) -> None:
        router.discovery.urls = (server_url(first.url),)
        router.fleet.follow()
        asked = asyncio.ensure_future(stream(router))
        await _until_one_waits(router)
        router.discovery.urls = ()
        router.fleet.follow()
        await asyncio.sleep(0.3)
        router.discovery.urls = (server_url(second.url),)
        router.fleet.probe_now.set()
        assert (await asked)[::2] == (200, ANSWER)
        assert second.requests[0]["output_ids"] == [100, 101, 102, 103]

    run([first, second], story, wait_s=15.0, resume_s=15.0)


def test_a_replica_that_refuses_because_it_ends_is_not_asked_again() -> None:
    """It is known to drain before the next probe, so the request waits for its successor."""
    first, second = FakeReplica(), FakeReplica()
    ends = b'{"error":{"message":"it ends","code":"shutting_down"}}'

    def refuse(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
        first.health |= {"ok": False, "state": "draining"}
        return 503, ends

    first.answer = refuse

    async def story(router: Router) -> None:
        router.discovery.urls = (server_url(first.url),)
        router.fleet.follow()
        asked = asyncio.ensure_future(stream(router))
        await _until_one_waits(router)
        router.discovery.urls = (server_url(second.url),)
        router.fleet.probe_now.set()
        assert (await asked)[::2] == (200, ANSWER)
        assert len(first.requests) == 1

    run([first, second], story, wait_s=15.0, probe_s=0.2)

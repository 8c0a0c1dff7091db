"""Replicas that send what no server of Quire sends, and addresses at which there can be none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.base.server_url import server_url
from tests.unit.router.fake_replica import FakeReplica, Router, _chunk, run
from tests.unit.router.test_bad_input import ANSWER, STREAM


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_address_that_names_no_host_is_that_of_a_replica_that_is_away(
    host: str, scheme: str
) -> None:
    """As of a line that was half-written: the other replicas are used."""

    async def go() -> None:  # in real time: names are looked up in threads
        replica = FakeReplica()
        await replica.start()
        router = Router([replica])
        url = server_url(f"{scheme}://{host}:8000")
        router.discovery.urls = (*router.discovery.urls, url)
        router.fleet.follow()
        await router.start()
        wrong = router.fleet.replicas[url.shown]
        assert wrong.state == "unreachable"
        assert "names no host" in wrong.reason
        for _ in range(3):
            assert (await router.post("/generate", STREAM))[2] == ANSWER
        await router.close()
        replica.stop_listening(cuts=True)
        await asyncio.sleep(0.01)

    asyncio.run(go())


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 101 Other\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n\x81",
        b"HTTP/1.1 999 What\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 600 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nno number\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_that_is_none_is_a_failure_and_another_replica_answers(
    raw: bytes, is_stream: bool
) -> None:
    wrong, right = FakeReplica(), FakeReplica()
    wrong.raw_answer = raw
    errors = list[Any]()

    async def story(router: Router) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: errors.append(found))
        for _ in range(2):
            body = {**STREAM, "stream": is_stream}
            status, _, found = await router.post("/generate", body)
            assert (status, found) == (200, ANSWER if is_stream else right.body)
        assert router.count("quire_router_replica_faults_total") >= 1

    run([wrong, right], story)
    assert wrong.requests
    assert not errors


class Scripted(FakeReplica):
    """A replica with a stream of the given comments, with an event before each."""

    comments: tuple[str, ...] = ()

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for number, comment in enumerate(self.comments):
            event = b'data: {"token": %d}\n\n' % (100 + number)
            _chunk(writer, event + b": %b\n\n" % comment.encode())
            await writer.drain()
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)
        return False


def comment(**fields: Any) -> str:
    usual = {"output_ids": [100], "output_cursor": f"gen-{'0' * 24}:1:1:0"}
    return json.dumps({**usual, **fields}, separators=(",", ":"))


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    "wrong",
    [
        comment(output_ids=["x"]),
        comment(output_ids=[-1]),
        comment(output_ids=[2**31]),
        comment(output_ids=[2**70]),
        comment(output_cursor=5),
        comment(choice=1),
        comment(choice=-1),
        comment(num_choices=0),
        comment(num_choices=10**9),
        comment()[:-2],
        '{"ended":5}',
    ],
)
def test_a_stream_with_a_comment_of_no_sense_goes_on_elsewhere(wrong: str, num_before: int) -> None:
    """Its journal would not be what the client has."""
    first, second = Scripted(), FakeReplica()
    first.comments = (*(comment(output_ids=[100 + at]) for at in range(num_before)), wrong)
    errors = list[Any]()

    async def story(router: Router) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: errors.append(found))
        assert (await router.post("/generate", STREAM))[::2] == (200, ANSWER)

    run([first, second], story)
    assert len(first.requests) == 1
    known = second.requests[0].get("output_ids", [])
    assert known == list(range(100, 100 + num_before))
    assert not errors

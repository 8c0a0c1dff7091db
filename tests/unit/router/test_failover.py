"""Failover: where a stream goes on, with which request, and when it ends with an error instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.router.http_client import READ_BYTES, Exchange
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run

STREAM: dict[str, Any] = {"tokens": [1, 2], "seed": 5, "stream": True, "max_tokens": LENGTH}
WHOLE = b"".join(b'data: {"token": %d}\n\n' % token for token in range(100, 100 + LENGTH))
ANSWER = WHOLE + b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error":{"message":"it ends","code":"%s"}}\n\n'
ENDED = b': {"ended":"%s"}\n\n'


def stream(router: Router, **fields: Any) -> Awaitable[tuple[int, dict[bytes, bytes], bytes]]:
    return router.post("/generate", {**STREAM, **fields})


def test_a_cut_stream_continues_elsewhere_from_what_was_delivered() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 4

    async def story(router: Router) -> None:
        status, headers, body = await stream(router)
        assert (status, body) == (200, ANSWER)
        assert headers[b"content-type"] == b"text/event-stream"
        assert router.count("quire_router_resumed_streams_total") == 1

    run([first, second], story)
    again = second.requests[0]
    assert again["output_ids"] == [100, 101, 102, 103]
    assert again["output_cursor"].endswith(":4:0")
    assert again["seed"] == first.requests[0]["seed"] == 5
    assert again["stream_options"] == {"include_output_ids": True}
    assert b"x-forwarded-for: 10.0.0.7\r\n" in second.heads[0]


def test_a_stream_without_a_seed_gets_one_for_all_replicas() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 2
    run([first, second], lambda router: stream(router, seed=None))
    seeds = {one.requests[0]["seed"] for one in (first, second)}
    assert len(seeds) == 1
    assert isinstance(seeds.pop(), int)


def test_comments_are_passed_on_to_clients_that_asked_for_them() -> None:
    async def story(router: Router) -> bytes:
        options = {"include_output_ids": True, "include_usage": True}
        return (await stream(router, stream_options=options))[2]

    body = run([FakeReplica()], story)
    assert body.count(b': {"output_ids":') == LENGTH
    assert (
        b"".join(
            block + b"\n\n" for block in body.split(b"\n\n") if block and not block.startswith(b":")
        )
        == ANSWER
    )


@pytest.mark.parametrize("pending", [1, 0])
def test_a_stopped_replica_is_given_up_after_its_stall_time(pending: int) -> None:
    """Whatever it says of its open requests: the router knows of one with output."""
    first, second = FakeReplica(), FakeReplica()
    first.silent_after = 3
    first.health["pending"] = pending  # and steps_total does not advance

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        states = {one.name: one.state for one in router.fleet.replicas.values()}
        assert any("no progress" in line for line in router.lines), states

    run([first, second], story)
    assert second.requests[0]["output_ids"] == [100, 101, 102]


@pytest.mark.parametrize("keeps", [False, True])
def test_one_answer_with_fewer_steps_is_no_restart(keeps: bool) -> None:
    """An API process may know of fewer steps than another one of its server."""
    only = FakeReplica()
    only.steps_total = 100

    async def story(router: Router) -> None:
        (replica,) = router.fleet.replicas.values()
        await _until(lambda: replica.steps_total == 100)
        only.steps_total = 90
        await _until(lambda: replica.had_fewer_steps)
        only.steps_total = 5 if keeps else 101
        await _until(lambda: replica.steps_total == only.steps_total)
        assert any("it has begun anew" in line for line in router.lines) == keeps

    run([only], story)


def test_a_silent_stream_of_a_replica_that_computes_is_waited_for() -> None:
    """Its request may be queued or preempted: only a replica without any progress is stalled."""
    only = FakeReplica()
    only.health["pending"] = 1

    async def story(router: Router) -> None:
        gate = asyncio.Event()
        only.silent_after = 3
        answering = asyncio.ensure_future(stream(router))
        for _ in range(20):
            only.steps_total += 1
            await asyncio.sleep(0.05)
        assert not answering.done()
        assert not any("fenced" in line for line in router.lines)
        gate.set()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)

    run([only], story)


@pytest.mark.parametrize("code", ["worker_error", "shutting_down", "device_lost"])
def test_a_stream_that_a_replica_ends_continues_elsewhere(code: str) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after, first.says = 5, (ERROR_EVENT + ENDED) % (code.encode(), code.encode())

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER

    run([first, second], story)


def test_an_error_that_is_the_requests_own_is_passed_on() -> None:
    first, second = FakeReplica(), FakeReplica()
    event, comment = (one % b"no_token_to_choose" for one in (ERROR_EVENT, ENDED))
    first.fails_after, first.says = 5, event + comment

    async def story(router: Router) -> None:
        body = (await stream(router))[2]
        assert body == WHOLE[: WHOLE.index(b'data: {"token": 105}')] + event

    run([first, second], story)
    assert not second.requests


def test_a_request_is_tried_on_no_third_replica_after_two_failed() -> None:
    replicas = [FakeReplica() for _ in range(4)]
    for replica in replicas:
        replica.fails_after = 3
        replica.length = 30

    async def story(router: Router) -> bytes:
        return (await stream(router))[2]

    body = run(replicas, story, resume_s=10.0)
    assert [len(one.requests) for one in replicas if one.requests] == [2, 2], "and on no third"
    *events, last, _ = body.split(b"\n\n")
    assert len(events) == 12
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "stream_broken"
    assert "replicas failed with it 4 times" in error["message"]


def test_whole_answers_are_tried_on_two_replicas_at_most() -> None:
    replicas = [FakeReplica() for _ in range(3)]
    for replica in replicas:
        replica.raw_answer = b""  # takes the request and closes the connection

    async def story(router: Router) -> None:
        status, _, body = await router.post("/generate", {"tokens": [1]})
        assert status == 502
        assert json.loads(body)["error"]["code"] == "replicas_failed"

    run(replicas, story)
    assert sum(len(one.requests) for one in replicas) == 2


def test_streams_resume_between_equal_fingerprints_only() -> None:
    first, second = FakeReplica("fp_a"), FakeReplica("fp_b")
    first.fails_after = 3

    async def story(router: Router) -> None:
        def die(token: int) -> None:
            if token == 101:
                first.health |= {"ok": False, "state": "dead", "reason": "the engine is dead"}

        first.before_token = die
        body = (await stream(router))[2]
        assert body.startswith(WHOLE[:50])
        error = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert "fingerprint fp_a" in error["message"]
        assert router.count("quire_router_broken_streams_total") == 1

    run([first, second], story, resume_s=0.5)
    assert not second.requests


def test_a_stream_goes_on_at_the_same_replica_once_it_was_checked_again() -> None:
    only = FakeReplica()
    only.fails_after = 4

    async def story(router: Router) -> None:
        def heal(token: int) -> None:
            if token == 103:
                asyncio.get_running_loop().call_later(0.2, setattr, only, "fails_after", None)

        only.before_token = heal
        assert (await stream(router))[2] == ANSWER

    run([only], story, resume_s=8.0)
    assert len(only.requests) == 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"n": 2, "mirostat": 2}, "mirostat"), ({"prompt_logprobs": 0}, "prompt_l")],
)
def test_a_stream_that_cannot_be_continued_ends_with_the_reason(
    fields: dict[str, Any], why: str
) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 3

    async def story(router: Router) -> bytes:
        return (await stream(router, **fields))[2]

    body = run([first, second], story)
    assert why in json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["message"]
    assert "stream_options" not in first.requests[0]
    assert not second.requests


def test_full_replicas_are_passed_over_and_their_refusal_returned_at_last() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.status, first.body = 503, b'{"error":{"message":"full","code":"overloaded"}}'

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        second.status, second.body = first.status, first.body
        status, _, body = await stream(router)
        assert (status, body) == (503, first.body)

    run([first, second], story)


@pytest.mark.parametrize("in_queue", [False, True])
def test_a_stream_whose_only_equal_replica_is_full_ends_after_the_time_to_resume(
    in_queue: bool,
) -> None:
    """It refuses the stream, or has it wait and ends it by the queue's timeout, each time."""
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 3
    second.health |= {"ok": False, "state": "draining"}
    if in_queue:
        second.says, second.fails_after = ERROR_EVENT % b"" + ENDED % b"queue_timeout", 0
    else:
        second.status, second.body = 503, b'{"error":{"code":"overloaded"}}'

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(stream(router))
        await _until(lambda: router.fleet.num_waiting == 1)
        first.health |= {"ok": False, "state": "draining"}
        second.health |= {"ok": True, "state": "ready"}
        body = (await answering)[2]
        error = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == "stream_broken"
        assert "has refused it" in error["message"]
        assert ("queue_timeout" if in_queue else "503 overloaded") in error["message"]
        assert router.count('quire_router_broken_streams_total{reason="refused"}') == 1

    run([first, second], story, resume_s=2.0)
    assert second.requests


@pytest.mark.parametrize("code", ["queue_timeout", "overloaded"])
@pytest.mark.parametrize("after", [0, 3])
def test_streams_that_a_full_replica_ends_are_no_failures_of_it(code: str, after: int) -> None:
    """An overload that opened its breaker would send all of its load to the others."""
    full, other = FakeReplica(), FakeReplica()
    full.fails_after, full.says = after, ERROR_EVENT % b"" + ENDED % code.encode()

    async def story(router: Router) -> None:
        replica = router.fleet.replicas[full.url]
        for _ in range(10):
            assert (await stream(router))[2] == ANSWER
            assert replica.is_available(asyncio.get_running_loop().time())
        assert router.count("quire_router_replica_faults_total") == 0

    run([full, other], story)
    assert len(full.requests) >= 5


def test_a_stream_that_has_begun_waits_for_room_in_the_share_of_its_tenant() -> None:
    """A new request gets the 429, with which its client can come again; a stream would break."""
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 3
    second.status, second.body = 429, b'{"error":{"code":"tenant_limit"}}'

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(stream(router))
        await _until(lambda: len(second.requests) == 2)
        second.status = 200
        assert (await answering)[2] == ANSWER
        second.status, first.status, first.body = 429, 429, second.body
        assert (await stream(router))[::2] == (429, second.body)

    run([first, second], story)


def test_anthropic_s_own_status_of_a_full_server_is_no_failure() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.status, first.body = 529, b'{"type":"error","error":{"type":"overloaded_error"}}'
    second.body = b'{"type":"message"}'

    async def story(router: Router) -> None:
        assert (await router.post("/v1/messages", {"messages": []}))[2] == second.body
        assert router.count("quire_router_replica_faults_total") == 0
        second.status, second.body = first.status, first.body
        assert (await router.post("/v1/messages", {"messages": []}))[0] == 529

    run([first, second], story)


def test_a_refused_request_is_not_tried_elsewhere() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.status, first.body = 400, b'{"error":{"message":"wrong","code":"invalid_value"}}'
    second.status, second.body = 429, b'{"error":{"message":"slow","code":"tenant_limit"}}'

    async def story(router: Router) -> None:
        assert (await stream(router))[0] == 400
        assert (await stream(router))[0] == 429

    run([first, second], story)
    assert (len(first.requests), len(second.requests)) == (1, 1)


def test_retries_are_bounded_by_a_share_of_the_requests() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.status, first.body = 503, b'{"error":{"code":"overloaded"}}'
    second.status, second.body = first.status, first.body

    async def story(router: Router) -> None:
        for _ in range(60):
            await stream(router)
        assert router.count("quire_router_retries_total") == 10

    run([first, second], story, max_retry_share=0.0)
    assert len(first.requests) + len(second.requests) == 70


def test_what_is_no_http_is_a_failure_of_the_replica() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.raw_answer = b"SSH-2.0-OpenSSH_9.6\r\n"

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER

    run([first, second], story)


def test_a_kept_connection_that_was_closed_is_no_failure() -> None:
    only = FakeReplica()
    only.closes_idle = True

    async def story(router: Router) -> None:
        for _ in range(5):
            assert (await stream(router))[2] == ANSWER
            await asyncio.sleep(0.02)
        assert router.count("quire_router_replica_faults_total") == 0

    run([only], story)


def test_a_client_that_leaves_ends_its_request_at_the_replica() -> None:
    only = FakeReplica()
    only.silent_after = 6

    async def story(router: Router) -> None:
        await router.post("/generate", STREAM, leaves_after=60)
        await asyncio.sleep(0.05)
        assert router.count("quire_router_replica_faults_total") == 0

    run([only], story)
    assert len(only.requests) == 1


def test_an_open_request_ends_with_an_error_when_the_router_stops() -> None:
    only = FakeReplica()
    only.silent_after = 6
    only.health["pending"] = 1

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(stream(router))
        await asyncio.sleep(0.1)
        router.admission.is_draining = True
        status, headers, body = await stream(router)
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
        assert int(headers[b"retry-after"]) >= 1
        router.app.cut.set_result(None)
        last = (await answering)[2].split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"

    run([only], story, stall_s=5.0)


def test_draining_and_dead_replicas_get_nothing_and_return_after_a_check() -> None:
    first, second = FakeReplica(), FakeReplica()

    async def story(router: Router) -> None:
        first.health |= {"ok": False, "state": "draining", "reason": "an admin drained it"}
        await _until(lambda: router.fleet.num_available == 1)
        for _ in range(4):
            assert (await stream(router))[2] == ANSWER
        assert not first.requests
        second.stop_listening(cuts=True)
        await _until(lambda: router.fleet.num_available == 0)
        status, headers, body = await stream(router)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_replica")
        assert b"retry-after" in headers
        first.health |= {"ok": True, "state": "ready"}
        first.fingerprint = "fp_new"
        await second.start()
        await _until(lambda: router.fleet.num_available == 2)
        assert (await stream(router))[2] == ANSWER

    run([first, second], story)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_slow_client_pauses_its_replica_and_is_no_stall() -> None:
    only = FakeReplica()
    only.health["pending"] = 1
    big = b'data: {"pad": "' + b"x" * 65536 + b'"}\n\n'
    only.says = big * 40 + b"data: [DONE]\n\n"
    only.fails_after = 0

    async def story(router: Router) -> None:
        slow = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, slow.set)
        _, _, body = await router.post(
            "/generate", {**STREAM, "mirostat": 2}, on_piece=lambda piece: slow.wait()
        )
        assert body == only.says
        assert not any("fenced" in line for line in router.lines), router.lines

    run([only], story)


def test_others_have_their_turn_while_a_stream_has_much_to_read() -> None:
    """Such as requests for metrics; no piece of the stream is lost."""

    async def story() -> None:
        exchange = Exchange(asyncio.get_running_loop(), may_be_stale=False)
        exchange.got_head(200, [])
        wanted = b"".join(b"data: %d\n\n" % number for number in range(10_000))
        pieces = [wanted[at : at + 100] for at in range(0, len(wanted), 100)]
        assert not any(map(exchange.got, pieces))
        exchange.completed()
        num_turns, found = 0, list[bytes]()

        async def other() -> None:
            nonlocal num_turns
            while not exchange.is_complete or len(found) < 2 or found[-1]:
                num_turns += 1
                await asyncio.sleep(0)

        turns = asyncio.ensure_future(other())
        while not found or found[-1]:
            found.append(await exchange.read())
        await turns
        assert b"".join(found) == wanted
        assert max(map(len, found)) < READ_BYTES + 100
        assert num_turns >= len(found) - 2 >= len(wanted) // READ_BYTES

    asyncio.run(story())


def test_a_connection_is_read_again_once_all_of_it_was_read() -> None:
    async def story() -> None:
        exchange, num_bytes = Exchange(asyncio.get_running_loop(), may_be_stale=False), 0
        exchange.got_head(200, [])
        while not exchange.got(b"x" * 5000):
            num_bytes += 5000
        num_bytes += 5000
        while num_bytes:
            assert exchange.is_paused
            num_bytes -= len(await exchange.read())
        assert not exchange.is_paused
        exchange.completed()

    asyncio.run(story())


def test_limits_of_open_requests_are_429_for_a_key_and_503_for_all() -> None:
    only = FakeReplica()
    only.silent_after = 2
    only.health["pending"] = 1
    key = [(b"authorization", b"Bearer one")]

    async def story(router: Router) -> None:
        open_ = [
            asyncio.ensure_future(router.post("/generate", STREAM, headers=key)) for _ in range(2)
        ]
        await asyncio.sleep(0.1)
        status, headers, body = await router.post("/generate", STREAM, headers=key)
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_requests")
        assert headers[b"retry-after"] == b"1"
        open_.append(asyncio.ensure_future(stream(router)))
        await asyncio.sleep(0.1)
        status, headers, body = await stream(router)
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(headers[b"retry-after"]) <= 60
        for one in open_:
            one.cancel()
        await asyncio.gather(*open_, return_exceptions=True)

    run([only], story, max_open=3, max_open_per_key=2, stall_s=5.0)


def test_bodies_of_no_use_to_the_router_are_the_replicas_to_refuse() -> None:
    only = FakeReplica()
    for raw in (b"[1]", b"{", b"\xff", b'{"stream": 1}', b'{"prompt": 1e999}'):
        only.raw_answer = b"HTTP/1.1 400 X\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"

        async def story(router: Router, raw: bytes = raw) -> None:
            # The fake reads JSON; what is none ends its connection.
            status, _, body = await router.post("/v1/completions", raw)
            assert status in (400, 502, 503), body

        run([only], story)


def test_bodies_beyond_the_limit_are_refused_before_they_are_read_whole() -> None:
    async def story(router: Router) -> None:
        status, _, body = await router.post("/generate", {"tokens": [1] * 5000})
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")

    run([FakeReplica()], story, max_body_bytes=4096)


class Behind(FakeReplica):
    """A server with another /health, at an address with a path."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.health = path, {"ok": True}

    @property
    def url(self) -> str:
        return super().url + self.path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v2", "give the server's address without a path: http://127.0.0.1:"),
        ("", "give the address of a server of Quire"),
    ],
)
def test_why_a_replica_is_none_is_in_the_log_and_the_answer(path: str, said: str) -> None:
    async def story(router: Router) -> None:
        status, _, body = await stream(router)
        message = json.loads(body)["error"]["message"]
        (line,) = [line for line in router.lines if "warning" in line]
        assert "replica takes no requests yet" in line
        for text in (message, line):
            assert "its /health is not that of a server of Quire" in text
            assert said in text
        assert status == 503
        assert "probed every 0.05 s and joins by itself; try again later" in message

    run([Behind(path)], story)


def test_a_replica_that_starts_is_not_called_fenced() -> None:
    """Nothing was taken from it. One that has served is fenced once, when it is lost."""
    replica = FakeReplica()
    replica.health |= {"ok": False, "state": "starting", "reason": "the model is loaded"}

    async def story(router: Router) -> None:
        def shown() -> list[str]:
            about = [line for line in router.lines if " replica " in line and "added" not in line]
            return [line.partition(" router: ")[2].partition(" replica=")[0] for line in about]

        assert shown() == ["replica takes no requests yet"]
        assert "info router" in router.lines[-1]
        assert 'state=starting reason="the model is loaded"' in router.lines[-1]
        replica.health |= {"ok": True, "state": "ready"}
        await _until(lambda: router.fleet.num_available == 1)
        replica.stop_listening(cuts=True)
        await _until(lambda: not router.fleet.num_available)
        replica.health |= {"ok": False, "state": "starting"}
        await replica.start()
        await _until(lambda: len(shown()) == 4)
        assert shown()[1:] == [
            "replica ready",
            "replica fenced",
            "replica takes no requests yet",
        ]

    run([replica], story)


def test_replicas_that_are_not_there_yet_join_by_themselves() -> None:
    replica = FakeReplica()

    async def story(router: Router) -> None:
        replica.stop_listening(cuts=True)
        while router.fleet.num_available:
            router.fleet.probe_now.set()
            await asyncio.sleep(0.01)
        status, _, body = await stream(router)
        message = json.loads(body)["error"]["message"]
        assert status == 503
        assert f"start it on its machine, as in `quire serve --port {replica.port}`" in message
        assert f"{replica.url} unreachable: " in message
        await replica.start()
        while not router.fleet.num_available:
            await asyncio.sleep(0.01)
        assert (await stream(router))[2] == ANSWER

    run([replica], story)


def test_a_server_that_answers_no_probe_is_given_up_before_its_stall_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.router.prober.ANSWER_S", 0.3)
    first, second = FakeReplica(), FakeReplica()
    first.silent_after = 3
    first.before_token = lambda token: setattr(first, "health_gate", asyncio.Event())

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        assert any("no answer to /health" in line for line in router.lines)

    run([first, second], story, stall_s=600.0)
    assert second.requests[0]["output_ids"] == [100, 101, 102]


def test_a_stopped_engine_gets_one_request_at_a_time_after_its_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server goes on answering /health, and nothing is pending there after the cut."""
    monkeypatch.setattr("quire.router.breaker._FIRST_S", 30.0)
    first, second = FakeReplica(), FakeReplica()
    first.silent_after = 3

    async def story(router: Router) -> None:
        first.health["pending"] = 1
        assert (await stream(router))[2] == ANSWER
        first.health["pending"] = 0
        stopped = router.fleet.replicas[first.url]
        await _until(lambda: stopped.is_up)
        before = len(first.requests)
        answers = await asyncio.gather(*(stream(router) for _ in range(6)))
        assert all(body == ANSWER for _, _, body in answers)
        assert len(first.requests) == before, "its breaker is open"
        first.silent_after = None
        first.steps_total += 1
        await _until(lambda: router.fleet.num_available == 2)

    run([first, second], story)

"""Which failures of replicas end a request, and where it may go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.base.server_url import server_url
from quire.router.failures import MAX_IN_A_ROW, MAX_OF_ALL, PROGRESS_TOKENS, Failures
from quire.router.faults import ProcessStopped, ReplicaFault
from quire.router.replica import CROWDED_STALL_S, MAX_BEGINNING, STEADY_STALL_S, Load, Replica
from tests.unit.router.fake_replica import FakeReplica, Router, run

SUSPECT = ReplicaFault("it crashed", is_suspect=True)
STREAM: dict[str, Any] = {"tokens": [1, 2], "seed": 5, "stream": True}


def replicas(count: int) -> list[Replica]:
    return [Replica(server_url(f"http://127.0.0.1:{9000 + at}"), at) for at in range(count)]


def test_two_failures_without_output_are_final_and_refused_connections_do_not_count() -> None:
    failures, (first, second, third) = Failures(), replicas(3)
    failures.note(first, ReplicaFault("no connection", is_suspect=False), 0)
    failures.note(second, SUSPECT, 0)
    assert not failures.are_final
    assert failures.at == {first, second}
    failures.note(third, SUSPECT, 0)
    assert failures.are_final
    assert failures.summary.startswith("replicas failed with it 2 times")


def test_silence_of_a_replica_with_many_requests_counts_half() -> None:
    slow = ReplicaFault("no progress", is_suspect=True, is_silence=True)
    alone = ReplicaFault("no progress", is_suspect=True, is_silence=True)
    slow.is_shared = True
    failures, (first, second) = Failures(), replicas(2)
    for number in range(2 * MAX_IN_A_ROW):
        assert not failures.are_final
        failures.note((first, second)[number % 2], slow, 5)
    assert failures.are_final
    failures = Failures()
    for number in range(MAX_IN_A_ROW):
        assert not failures.are_final
        failures.note((first, second)[number % 2], alone, 5)
    assert failures.are_final


def test_a_stopped_process_is_weak_evidence_against_a_request() -> None:
    """No request holds up the thread that writes beats."""
    [replica] = replicas(1)
    load = Load(
        tokens=1,
        cut=lambda fault: None,
        began_s=1.0,
        last_s=lambda: 1.0,
        is_paused=lambda: False,
    )
    replica.begin(load)
    assert not replica.is_shared(load)
    replica.has_stopped = True
    assert replica.is_shared(load)


def test_a_stream_without_progress_ends_after_four_failures_of_two_replicas() -> None:
    failures, (first, second, third) = Failures(), replicas(3)
    for number in range(MAX_IN_A_ROW):
        assert not failures.are_final
        failures.note((first, second)[number % 2], SUSPECT, 5 + number)
    assert failures.are_final
    assert failures.barred([first, second, third]) == {third}


def test_tokens_beyond_the_place_of_a_failure_clear_the_request() -> None:
    failures, (first, second, third) = Failures(), replicas(3)
    failures.note(first, SUSPECT, 10)
    assert failures.barred([first, second, third]) == set()
    failures.note(second, SUSPECT, 10 + PROGRESS_TOKENS - 1)
    assert failures.at == {first, second}
    assert failures.barred([first, second, third]) == {third}
    failures.note(second, SUSPECT, 10 + 2 * PROGRESS_TOKENS)
    assert failures.at == {second}, "the first one was checked since"
    assert failures.barred([first, second, third]) == set(), "a replica has passed the place"
    for number in range(3, MAX_OF_ALL - 1):
        assert not failures.are_final
        failures.note((first, second)[number % 2], SUSPECT, 10 + number * PROGRESS_TOKENS)
    assert not failures.are_final
    failures.note(third, SUSPECT, 10 + MAX_OF_ALL * PROGRESS_TOKENS)
    assert failures.are_final


def test_shared_failures_keep_a_request_without_output_at_two_replicas() -> None:
    failures, (first, second, third) = Failures(), replicas(3)
    for number in range(MAX_IN_A_ROW):
        assert not failures.are_final
        fault = ReplicaFault("it was killed", is_suspect=True)
        fault.is_shared = True
        failures.note((first, second)[number % 2], fault, 0)
        assert failures.barred([first, second, third]) == ({third} if number else set())
    assert failures.are_final


def test_a_second_stop_of_a_process_with_a_request_at_one_place_is_a_failure() -> None:
    failures, (first, second, third) = Failures(), replicas(3)
    failures.note(first, ProcessStopped(), 10)
    failures.note(second, ProcessStopped(), 10)
    assert not failures.at, "the other processes of the replicas serve"
    failures.note(first, ProcessStopped(), 10 + PROGRESS_TOKENS)
    assert not failures.at, "it has passed the place"
    for one in (first, second, second):
        failures.note(one, ProcessStopped(), 10 + PROGRESS_TOKENS)
    assert failures.at == {first, second}
    assert failures.barred([first, second, third]) == {third}


def load(began_s: float) -> Load:
    return Load(
        tokens=1,
        cut=lambda fault: None,
        began_s=began_s,
        last_s=lambda: began_s,
        is_paused=lambda: False,
    )


def test_a_failure_is_evidence_against_few_requests_at_their_beginning() -> None:
    (replica,) = replicas(1)
    whole, older, newer = load(1.0), load(2.0), load(3.0)
    for one in (whole, older, newer):
        replica.begin(one)
    replica.gave_output(older)
    replica.is_fenced = False
    replica.failed()
    assert replica.num_beginning == 1
    assert [replica.is_shared(one) for one in (whole, older, newer)] == [True, True, False]
    replica.is_fenced = False
    for number in range(MAX_BEGINNING):
        replica.begin(load(4.0 + number))
    replica.failed()
    assert replica.is_shared(newer), "many others began as well"
    for one in list(replica.loads):
        replica.end(one)
    replica.failed()
    assert replica.is_shared(newer), "requests that end one after the other share one failure"


def test_a_replica_with_steady_steps_is_stalled_sooner() -> None:
    (replica,) = replicas(1)
    prompt, answer = load(0.0), load(1.0)
    replica.begin(answer)
    assert replica.stall_s(10.0) == 10.0, "nothing is known of its steps"
    for step in range(30):
        replica.progressed(1.0 + 0.05 * step)
    assert replica.stall_s(10.0) == 10.0, "its prompt may take long"
    replica.gave_output(answer)
    assert replica.stall_s(10.0) == STEADY_STALL_S
    prompt.began_s = 9.0
    replica.begin(prompt)
    assert replica.stall_s(10.0) == 10.0
    assert replica.stall_s(1.0) == 1.0


def test_many_prompts_long_gaps_and_an_unknown_past_are_waited_for_longer() -> None:
    (replica,) = replicas(1)
    for at in range(MAX_BEGINNING + 1):
        replica.begin(load(1.0 + at))
    assert replica.stall_s(2.0) == CROWDED_STALL_S
    assert replica.stall_s(10.0) == 10.0
    assert replica.stall_s(2.0, others_gap_s=1.5) == 6.0, "four times what is usual elsewhere"
    for one in list(replica.loads):
        replica.gave_output(one)
    for step in range(40):
        replica.progressed(20.0 + 0.1 * step)
    assert replica.stall_s(2.0, others_gap_s=1.5) == STEADY_STALL_S, "its own gaps are known"
    replica.progressed(30.0)
    assert replica.stall_s(2.0) == pytest.approx(1.5 * 6.1), "the longest one is among them"
    for step in range(1, 400):
        replica.progressed(30.0 + 0.1 * step)
    assert replica.stall_s(2.0) == STEADY_STALL_S, "it was long ago"
    replica.progressed(170.0)
    assert replica.stall_s(2.0) == 12.0, "six times the shortest at most"
    replica.fence("stalled", "silent")
    assert replica.stall_s(2.0) == 12.0, "it is as slow as before"
    replica.fence("restarted", "another process")
    assert replica.stall_s(2.0) == 2.0


def test_a_long_stream_outlives_failures_of_all_replicas() -> None:
    """Between two failures it has more tokens than lie behind any place where it failed."""
    others = [FakeReplica() for _ in range(3)]
    length = 4 * PROGRESS_TOKENS
    for one in others:
        one.length = length
        one.fails_after = PROGRESS_TOKENS

    async def story(router: Router) -> None:
        status, _, body = await router.post("/generate", {**STREAM, "max_tokens": length})
        wanted = b"".join(b'data: {"token": %d}\n\n' % at for at in range(100, 100 + length))
        assert (status, body) == (200, wanted + b"data: [DONE]\n\n")
        assert router.count("quire_router_resumed_streams_total") == 3

    run(others, story, resume_s=10.0)
    assert all(one.requests for one in others), "the third one got it, too"


POISON = 666


def killed_by_poison(replica: FakeReplica) -> None:
    """Let the poison request kill a replica with all that is open there; it is back soon."""

    def answer(method: str, path: str, fields: dict[str, Any]) -> None:
        if POISON in fields.get("tokens", ()):
            replica.stop_listening(cuts=True)
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: loop.create_task(replica.start()))

    replica.answer = answer


def test_a_poison_request_ends_after_two_replicas_and_no_other_one_with_it() -> None:
    others = [FakeReplica() for _ in range(4)]
    for one in others:
        killed_by_poison(one)
        one.length = 40 * PROGRESS_TOKENS

    async def story(router: Router) -> None:
        begun, num_begun = asyncio.Event(), 0

        def is_begun(piece: bytes) -> None:
            nonlocal num_begun
            num_begun += b"120}" in piece
            if num_begun == 24:
                begun.set()

        streams = [
            asyncio.ensure_future(router.post("/generate", STREAM, on_piece=is_begun))
            for _ in range(24)
        ]
        await begun.wait()
        status, headers, body = await router.post("/generate", {"tokens": [POISON]})
        assert (status, json.loads(body)["error"]["code"]) == (502, "replicas_failed")
        assert headers[b"x-should-retry"] == b"false", "clients would send it to two more"
        for one in streams:
            status, _, body = await one
            assert body.endswith(b"data: [DONE]\n\n")
            assert body.count(b"data: ") == 40 * PROGRESS_TOKENS + 1

    run(others, story, resume_s=15.0)
    tried = [sum(POISON in one["tokens"] for one in other.requests) for other in others]
    assert sorted(tried) == [0, 0, 1, 1]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_poison_request_is_counted_where_it_is_sent_by_an_idle_connection(
    is_stream: bool,
) -> None:
    """The server may have closed it before, so the request is sent again; and finds no server."""
    others = [FakeReplica() for _ in range(4)]

    async def story(router: Router) -> None:
        for _ in others:
            assert (await router.post("/generate", {"tokens": [1]}))[0] == 200
        for one in others:
            killed_by_poison(one)
        await asyncio.sleep(1.5)
        poison = {"tokens": [POISON], "stream": is_stream}
        status, headers, body = await router.post("/generate", poison)
        assert (status, json.loads(body)["error"]["code"]) == (502, "replicas_failed")
        assert headers[b"x-should-retry"] == b"false"
        await asyncio.sleep(0.1)  # they are back

    run(others, story, probe_s=10.0, stall_s=30.0, silence_s=60.0)
    tried = [sum(POISON in one["tokens"] for one in other.requests) for other in others]
    assert sorted(tried) == [0, 0, 1, 1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def killed(replica: FakeReplica, router: Router) -> None:
    replica.stop_listening(cuts=True)
    await until(lambda: router.fleet.num_available == 1)
    await replica.start()
    await until(lambda: router.fleet.num_available == 2)


def test_whole_answers_outlive_two_replicas_that_are_killed_with_many_others() -> None:
    """None has shown output, so each stays at the two replicas; and none is lost."""
    others = [FakeReplica() for _ in range(2)]
    gate = asyncio.Event()

    async def story(router: Router) -> None:
        for one in others:
            one.whole_gate = gate
        first, second = others
        count = 4 * (MAX_BEGINNING + 1)
        answers = [
            asyncio.ensure_future(router.post("/generate", {"tokens": [at]})) for at in range(count)
        ]
        await until(lambda: len(first.requests) + len(second.requests) == count)
        await killed(first, router)
        await until(lambda: len(second.requests) == count)
        await killed(second, router)
        await until(lambda: len(first.requests) == count + count // 2)
        gate.set()
        for answer in answers:
            status, _, body = await answer
            assert (status, body) == (200, b'{"choices":[]}')

    run(others, story, resume_s=10.0, max_retry_share=100.0)


def test_a_long_gap_counts_no_more_where_tokens_come_at_once() -> None:
    (replica,) = replicas(1)
    answer = load(1.0)
    replica.begin(answer)
    replica.gave_output(answer)
    for step in range(30):
        replica.progressed(1.0 + 0.1 * step)
    replica.progressed(12.0)
    assert replica.stall_s(10.0) == pytest.approx(1.5 * 8.1)
    for step in range(1, 2500):
        replica.progressed(12.0 + 0.009 * step)
    assert replica.stall_s(10.0) == STEADY_STALL_S


def test_a_refusal_of_the_request_that_tries_closes_no_breaker() -> None:
    """A server with a stopped engine can refuse what it has no room for."""
    only = FakeReplica()
    only.status, only.body = 503, b'{"error":{"message":"full","code":"overloaded"}}'

    async def story(router: Router) -> None:
        (replica,) = router.fleet.replicas.values()
        loop = asyncio.get_running_loop()
        replica.breaker.stalled(loop.time())
        await until(lambda: replica.is_available(loop.time()))
        assert (await router.post("/generate", STREAM))[0] == 503
        only.status, only.gate = 200, asyncio.Event()
        only.began.clear()
        trying = asyncio.ensure_future(router.post("/generate", STREAM))
        await only.began.wait()
        assert not replica.is_available(loop.time()), "one tries at a time"
        only.gate.set()
        assert (await trying)[0] == 200
        assert replica.is_available(loop.time())

    run([only], story)


def test_tokens_that_are_counted_between_failures_keep_no_breaker_closed() -> None:
    """Nor do refused bodies: neither is computed by the engine that fails."""
    broken, other = FakeReplica(), FakeReplica()

    def answer(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        if path == "/v1/messages/count_tokens":
            return 200, b'{"input_tokens":7}'
        if fields.get("tokens") == []:
            return 400, b'{"error":{"message":"no tokens","code":"invalid_value"}}'
        return 500, b'{"error":{"message":"it fails","code":"worker_error"}}'

    broken.answer = answer

    async def story(router: Router) -> None:
        replica, loop = router.fleet.replicas[broken.url], asyncio.get_running_loop()
        router.fleet.policy.choose = lambda able, key: able[0]  # type: ignore[method-assign]
        for _ in range(3):
            assert replica.breaker.allows(loop.time())
            for path, body, status in (
                ("/v1/messages/count_tokens", {"messages": []}, 200),
                ("/generate", {"tokens": []}, 400),
                ("/generate", {"tokens": [1]}, 200),
            ):
                assert (await router.post(path, body))[0] == status
                await until(lambda: replica.is_up)
        assert not replica.breaker.allows(loop.time())

    run([broken, other], story)
    assert len(broken.requests) == 9
    assert len(other.requests) == 3

"""Which failures of replicas end a request, and where it may go on."""

from __future__ import annotations

from typing import Any

from quire.base.server_url import server_url
from quire.router.failures import MAX_OF_ALL, MAX_OF_STREAM, PROGRESS_TOKENS, Failures
from quire.router.faults import ReplicaFault
from quire.router.replica import Replica
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


def test_a_stream_without_progress_ends_after_four_failures_of_two_replicas() -> None:
    failures, (first, second, third) = Failures(), replicas(3)
    for number in range(MAX_OF_STREAM):
        assert not failures.are_final
        failures.note((first, second)[number % 2], SUSPECT, 5 + number)
    assert failures.are_final
    assert failures.barred([first, second, third]) == {third}


def test_with_progress_in_between_a_stream_goes_on_but_at_no_third_replica() -> None:
    failures, (first, second, third) = Failures(), replicas(3)
    failures.note(first, SUSPECT, 10)
    assert failures.barred([first, second, third]) == set()
    failures.note(second, SUSPECT, 10 + PROGRESS_TOKENS)
    assert not failures.are_final
    assert failures.at == {second}, "the first one was checked since"
    assert failures.barred([first, second, third]) == {third}
    for number in range(2, MAX_OF_ALL):
        assert not failures.are_final
        failures.note((first, second)[number % 2], SUSPECT, 10 + number * PROGRESS_TOKENS)
    assert failures.are_final


def test_a_long_stream_survives_two_failures_without_a_third_replica() -> None:
    """As many tokens lie between the failures as show that no single one is the cause."""
    others = [FakeReplica() for _ in range(3)]
    length = 3 * PROGRESS_TOKENS
    for one in others:
        one.length = length

    def heal(one: FakeReplica) -> None:
        one.fails_after = None

    others[0].fails_after = others[1].fails_after = PROGRESS_TOKENS
    for one in others[:2]:
        one.before_token = lambda token, one=one: (  # type: ignore[misc]
            heal(one) if len(one.requests) > 1 else None
        )

    async def story(router: Router) -> None:
        status, _, body = await router.post("/generate", {**STREAM, "max_tokens": length})
        wanted = b"".join(b'data: {"token": %d}\n\n' % at for at in range(100, 100 + length))
        assert (status, body) == (200, wanted + b"data: [DONE]\n\n")
        assert router.count("quire_router_resumed_streams_total") == 2

    run(others, story, resume_s=10.0)
    used = [bool(one.requests) for one in others]
    assert used.count(True) == 2, "no third replica got it"

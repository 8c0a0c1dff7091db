"""Interruptions: what is measured of a stream that continues, and where such streams are sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.fleet.interruptions import interruptions
from quire.router.fleet import SPREAD_TOKENS
from quire.router.interruption import PHASES, Interruption
from quire.router.routed_request import RoutedRequest
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.made_replicas import made_replicas, open_load
from tests.unit.router.test_failover import ANSWER, STREAM, stream
from tests.unit.router.virtual_fleet import SteppedServer, VirtualFleet, run_virtual, whole_answer


def samples(router: Router) -> dict[str, float]:
    """Return all metrics by name and labels."""
    lines = router.metrics.text().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def test_the_phases_are_the_whole_interruption() -> None:
    found = Interruption("connection", last_s=10.0, noted_s=11.0)
    assert found.phases_s(14.0) == (1.0, 0.0, 3.0)
    found.sent(11.5)
    found.sent(12.0)  # the first attempt failed
    assert found.phases_s(14.0) == (1.0, 1.0, 2.0)
    assert sum(found.phases_s(14.0)) == found.whole_s(14.0) == 4.0
    assert found.resumed_s(14.0) == 3.0
    assert len(PHASES) == 3


ERROR_EVENT = (
    b'data: {"error":{"message":"it ends","code":"worker_error"}}\n\n: {"ended":"worker_error"}\n\n'
)


@pytest.mark.parametrize(("says", "cause"), [(b"", "connection"), (ERROR_EVENT, "error")])
def test_an_interruption_is_counted_once_by_its_cause(says: bytes, cause: str) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after, first.says = 4, says

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        found = samples(router)
        name = "quire_router_interruption_seconds_count"
        assert found[f'{name}{{cause="{cause}"}}'] == router.count(name) == 1
        phases = "quire_router_resume_phase_seconds"
        assert {phase: found[f'{phases}_count{{phase="{phase}"}}'] for phase in PHASES} == (
            dict.fromkeys(PHASES, 1)
        )
        total = router.count(f"{phases}_sum")
        assert total == pytest.approx(router.count("quire_router_interruption_seconds_sum"))
        assert router.count("quire_router_resume_seconds_sum") <= total
        shown = interruptions(found)
        assert shown["streams"] == shown["seconds_at_most"]["+Inf"] == 1
        assert shown["seconds_at_most"]["30.0"] == 1
        assert shown["causes"] == {cause: 1}
        assert set(shown["phases"]) == set(PHASES)

    run([first, second], story)


@pytest.mark.parametrize("reason", ["refused", "failed", "no_replica"])
def test_what_makes_a_placement_long_is_counted(reason: str) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 4

    def after(call: Any, times: list[int]) -> Any:
        """Call something else the first time that the second replica has the stream."""

        def answer(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
            if method != "POST":
                return None
            times.append(1)
            return call() if len(times) == 1 else None

        return answer

    if reason == "no_replica":
        second.health |= {"ok": False, "state": "starting"}
    else:
        status, code = (503, b"overloaded") if reason == "refused" else (500, b"worker_error")
        second.answer = after(lambda: (status, b'{"error":{"code":"%s"}}' % code), [])

    async def story(router: Router) -> None:
        found = asyncio.ensure_future(stream(router))
        await asyncio.sleep(1.0)
        second.health |= {"ok": True, "state": "ready"}
        assert (await found)[2] == ANSWER
        retries = interruptions(samples(router))["retries"]
        assert set(retries) <= {reason, "no_replica"}
        assert retries[reason] == 1

    run([first, second], story)


def test_a_refusal_before_the_stream_began_is_none_of_its_continuation() -> None:
    """The first replica that is asked is full, the second one fails in the middle."""
    replicas = [FakeReplica() for _ in range(3)]
    asked = list[FakeReplica]()

    def answers(replica: FakeReplica) -> Any:
        def answer(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
            if method == "POST":
                asked.append(replica)
                replica.fails_after = 4 if len(asked) == 2 else None
                if len(asked) == 1:
                    return 503, b'{"error":{"code":"overloaded"}}'
            return None

        return answer

    for one in replicas:
        one.answer = answers(one)

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        assert interruptions(samples(router))["retries"] == {}
        assert len(asked) == 3

    run(replicas, story)


def test_a_stream_that_ends_with_its_next_event_is_counted() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = STREAM["max_tokens"] - 1
    second.length = STREAM["max_tokens"] - 1  # nothing but its end is left

    async def story(router: Router) -> None:
        await stream(router)
        assert router.count("quire_router_interruption_seconds_count") == 1

    run([first, second], story)


def test_streams_without_a_failure_count_nothing() -> None:
    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER
        assert router.count("quire_router_interruption_seconds_count") == 0

    run([FakeReplica(), FakeReplica()], story)


def test_nothing_is_said_of_no_interruption() -> None:
    shown = interruptions({})
    assert shown["streams"] == 0
    assert shown["mean_s"] is shown["share_within_3_s"] is None


def test_most_streams_that_continue_go_to_the_server_with_less_to_do() -> None:
    """By load all would go to the server that was just started, which knows none of them."""

    async def story() -> list[int]:
        servers = [SteppedServer(number, lambda now_s, count: 0.15) for number in range(3)]
        fleet = VirtualFleet(servers, stall_s=2.0, probe_s=0.25, resume_s=30.0)
        await fleet.router.start()
        replicas = list(fleet.router.fleet.replicas.values())
        try:
            replicas[1].state = "paused"  # it joins later
            answers = fleet.open_streams(120, 200)
            await asyncio.sleep(0.1)  # nothing of the first step
            assert [len(one.requests) for one in servers] == [60, 0, 60]
            await asyncio.sleep(3.0)
            assert replicas[1].is_up
            servers[0].kill()
            for answer in answers:
                assert (await answer)[2] == whole_answer(200)
            return [len(one.requests) for one in servers]
        finally:
            await fleet.close()

    num_first, num_new, num_other = run_virtual(story())
    assert num_first == 60
    assert num_new + num_other == 120
    assert abs(num_new - 40) <= 5, "two thirds of those that continue"


def test_prompt_tokens_of_a_replica_are_those_without_output() -> None:
    [replica] = made_replicas(1)
    loads = [open_load(replica, 10) for _ in range(3)]
    assert replica.prompt_tokens == 0
    for load in loads:
        replica.end(load)
        load.prompt_tokens = SPREAD_TOKENS
        replica.begin(load)
    assert replica.prompt_tokens == 3 * SPREAD_TOKENS
    replica.gave_output(loads[0])
    replica.gave_output(loads[0])
    replica.end(loads[0])
    replica.end(loads[1])
    replica.end(loads[1])
    replica.gave_output(loads[1])  # a late piece
    assert replica.prompt_tokens == SPREAD_TOKENS
    replica.end(loads[2])
    assert replica.prompt_tokens == 0


@pytest.mark.parametrize("brings", [False, True])
def test_a_stream_that_continues_computes_its_prompt_and_its_output(brings: bool) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after, first.gate, second.gate = 4, asyncio.Event(), asyncio.Event()

    async def hand_over(
        request: RoutedRequest, client: object, failures: object
    ) -> dict[str, Any] | None:
        return {"do_remote_prefill": True} if brings else None

    async def story(router: Router) -> None:
        router.app._dispatcher._hand_over = hand_over  # type: ignore[assignment]
        answer = asyncio.ensure_future(stream(router))
        await first.began.wait()
        from_, to = router.fleet.replicas.values()
        [load] = from_.loads
        assert (load.prompt_tokens, load.new_tokens) == (2, 0 if brings else 2)
        assert first.gate is not None
        first.gate.set()
        await second.began.wait()
        [load] = to.loads
        assert load.prompt_tokens == load.new_tokens == to.queued_tokens == 2 + 4
        assert second.gate is not None
        second.gate.set()
        assert (await answer)[2] == ANSWER
        assert to.queued_tokens == to.prompt_tokens == to.backlog_tokens == 0

    run([first, second], story)

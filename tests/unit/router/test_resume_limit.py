"""How long a request waits for another replica: resume_s in all, until its next event.

Time at replicas that had it does not count, whatever they said at its end.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.router.virtual_time import run_virtual
from quire.router.continuation import Continuation
from quire.router.faults import ProcessStopped, ReplicaFault
from quire.router.placement import Placement
from quire.router.resumes import Resumes
from tests.unit.router.fake_replica import TICK_S, FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, ENDED, ERROR_EVENT, _until, stream


@pytest.mark.parametrize("in_stream", [True, False])
def test_a_drain_gives_a_stream_the_time_to_resume_again(in_stream: bool) -> None:
    """Whether the replica has begun to answer, with its event, or says it by its status."""
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 3
    if in_stream:
        second.gate = gate = asyncio.Event()
        second.says, second.fails_after = ERROR_EVENT % b"" + ENDED % b"shutting_down", 0
    else:
        second.whole_gate = gate = asyncio.Event()
        second.status, second.body = 503, b'{"error":{"code":"shutting_down"}}'

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(stream(router))
        await _until(lambda: len(second.requests) == 1)
        await asyncio.sleep(3.0)  # in its queue
        first.fails_after = None
        if not in_stream:
            second.health |= {"ok": False, "state": "draining"}
        gate.set()
        assert (await answering)[2] == ANSWER

    run([first, second], story, resume_s=2.0, stall_s=60.0)


def test_a_replica_that_says_again_and_again_that_it_drains_gives_the_time_once() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 3
    second.status, second.body = 503, b'{"error":{"code":"shutting_down"}}'

    async def story(router: Router) -> None:
        body = (await stream(router))[2]
        error = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert "has refused it" in error["message"]

    run([first, second], story, resume_s=2.0)


@pytest.mark.parametrize("num_delivered", [0, 3])
def test_a_replica_that_ends_streams_again_and_again_is_not_tried_for_ever(
    num_delivered: int,
) -> None:
    """It drains each time that it has begun to answer, and is ready at each probe."""
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = num_delivered
    second.says, second.fails_after = ERROR_EVENT % b"" + ENDED % b"shutting_down", 0

    async def story(router: Router) -> None:
        await _until(lambda: router.fleet.num_available == 2)
        loop = asyncio.get_running_loop()
        asked = asyncio.ensure_future(stream(router))
        await _until(lambda: bool(second.requests))
        first.stop_listening(cuts=True)
        began_s = loop.time()
        status, _, body = await asked
        assert loop.time() - began_s < 4.0, "the waits between the tries count together"
        assert status == (200 if num_delivered else 503)
        assert b'"code"' in body

    run([first, second], story, resume_s=3.0)


def test_waits_count_together_until_there_is_an_event_and_time_at_a_replica_does_not() -> None:
    async def story() -> None:
        settings = SimpleNamespace(resume_s=2.0)
        fleet = SimpleNamespace(settings=settings, resumes=Resumes())
        parts = SimpleNamespace(fleet=fleet, metrics=0, features=0)
        continuation = Continuation(Resumes(), cast(Any, None))
        state = SimpleNamespace(parts=parts, continuation=continuation, leave_place=lambda: None)
        placement, loop = Placement(cast(Any, state)), asyncio.get_running_loop()

        def left_s() -> float:
            placement.failed(ReplicaFault("cut", is_suspect=True))
            continuation.failed("connection", loop.time(), has_output=False)
            return placement._resume_until_s - loop.time()

        assert left_s() == pytest.approx(2.0)
        await asyncio.sleep(0.5)
        placement._chosen_s = loop.time()
        await asyncio.sleep(60.0)  # in its queue
        assert left_s() == pytest.approx(1.5, abs=0.01)
        await asyncio.sleep(1.4)
        placement._chosen_s = loop.time()
        assert left_s() == pytest.approx(0.25, abs=0.01), "to move at once"
        continuation.has_event(loop.time())
        assert left_s() == pytest.approx(2.0)

    run_virtual(story(), tick_s=TICK_S)


def test_an_unreachable_replica_gives_a_request_without_output_no_more_time() -> None:
    async def story() -> None:
        settings = SimpleNamespace(resume_s=2.0)
        parts = SimpleNamespace(fleet=SimpleNamespace(settings=settings), metrics=0, features=0)
        continuation = Continuation(Resumes(), cast(Any, None))
        state = SimpleNamespace(parts=parts, continuation=continuation, leave_place=lambda: None)
        placement = Placement(cast(Any, state))
        loop = asyncio.get_running_loop()

        async def until_s(fault: ReplicaFault) -> float:
            await asyncio.sleep(0.5)
            placement.failed(fault)
            continuation.failed(fault.cause, loop.time(), has_output=False)
            return placement._resume_until_s

        unreachable = ReplicaFault("no connection", is_suspect=False)
        first_s = await until_s(ReplicaFault("cut", is_suspect=True))
        assert [await until_s(unreachable) for _ in range(5)] == [first_s] * 5
        assert placement.why_refused == "no connection"
        assert await until_s(ProcessStopped()) > first_s
        assert not placement.why_refused
        second_s = placement._resume_until_s
        continuation.has_event(loop.time())
        assert await until_s(unreachable) > second_s, "it is the first failure again"

    run_virtual(story(), tick_s=TICK_S)

"""New requests wait for streams that continue: how many, which ones, and no longer than allowed."""

from __future__ import annotations

import asyncio

import pytest

from quire.router.resumes import EVENT_HOLD_S, MIN_STREAMS, Resumes
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, _until, stream


def test_only_many_streams_of_the_same_model_hold_a_request() -> None:
    async def story() -> None:
        resumes = Resumes()
        for _ in range(MIN_STREAMS - 1):
            resumes.began("a")
        assert not await resumes.hold("a")
        resumes.began("a")
        assert not await resumes.hold("b")
        held = asyncio.ensure_future(resumes.hold("a"))
        await asyncio.sleep(0)
        assert resumes.num_held == 1
        resumes.ended("a")
        assert await held
        assert resumes.num_held == 0
        for _ in range(MIN_STREAMS - 1):
            resumes.ended("a")
        assert not resumes._num_streams
        assert not resumes._waiting

    asyncio.run(story())


def test_streams_are_placed_in_the_order_of_their_last_events() -> None:
    """Of one turn of the event loop; one that has left meanwhile holds up no other."""

    async def story() -> None:
        resumes, placed = Resumes(), list[float]()

        async def place(last_s: float) -> None:
            await resumes.turn(last_s)
            placed.append(last_s)

        tasks = [asyncio.ensure_future(place(last_s)) for last_s in (5.0, 2.0, 4.0, 2.5, 3.0)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert placed == [2.0, 2.5, 3.0, 5.0]
        await asyncio.gather(place(9.0), place(1.0))
        assert placed[4:] == [1.0, 9.0]
        assert not resumes._turns

    asyncio.run(story())


def test_events_wait_until_many_streams_are_sent_and_not_for_a_few() -> None:
    async def story() -> None:
        resumes = Resumes()
        for _ in range(MIN_STREAMS - 1):
            resumes.begin_send()
        assert not resumes.holds_events
        await resumes.wait_for_sends()
        resumes.begin_send()
        assert resumes.holds_events
        event = asyncio.ensure_future(resumes.wait_for_sends())
        await asyncio.sleep(0)
        assert not event.done()
        resumes.end_send()
        await event
        assert not resumes.holds_events

    asyncio.run(story())


def test_events_are_not_held_for_ever_nor_again_by_the_same_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.router.resumes.EVENT_HOLD_S", 0.01)

    async def story() -> None:
        resumes = Resumes()
        turns = [asyncio.ensure_future(resumes.turn(1.0)) for _ in range(MIN_STREAMS)]
        await asyncio.sleep(0)
        assert resumes.holds_events
        await asyncio.gather(*turns)
        assert not resumes.holds_events
        for _ in range(MIN_STREAMS):
            resumes.begin_send()
        await resumes.wait_for_sends()
        resumes.begin_send()
        assert not resumes.holds_events, "these have had their time"

    asyncio.run(story())


def test_a_request_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.router.resumes.HOLD_S", 0.01)

    async def story() -> None:
        resumes = Resumes()
        for _ in range(MIN_STREAMS):
            resumes.began("a")
        assert await resumes.hold("a")
        assert resumes.num_held == 0

    asyncio.run(story())


@pytest.mark.parametrize("times_out", [False, True])
def test_a_new_request_is_sent_after_the_streams_that_continue(
    times_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.resumes.HOLD_S", 0.05 if times_out else 600.0)
    first, second = FakeReplica(), FakeReplica()
    first.gate, second.gate = asyncio.Event(), asyncio.Event()
    first.fails_after = 3
    second.health |= {"ok": False, "state": "draining"}

    async def story(router: Router) -> None:
        streams = [asyncio.ensure_future(stream(router)) for _ in range(MIN_STREAMS)]
        await _until(lambda: len(first.requests) == MIN_STREAMS)
        second.health |= {"ok": True, "state": "ready"}
        await _until(lambda: router.fleet.num_available == 2)
        first.gate.set()
        await _until(lambda: len(second.requests) == MIN_STREAMS)
        first.fails_after = None
        new = asyncio.ensure_future(stream(router, seed=77))
        if not times_out:
            await _until(lambda: router.count("quire_router_held_requests") == 1)
            assert all("output_ids" in request for request in second.requests)
            assert len(first.requests) == MIN_STREAMS
            assert (await router.post("/tokenize", {"prompt": "hello"}))[0] == 200
            second.gate.set()
        else:
            await _until(lambda: len(first.requests + second.requests) == 2 * MIN_STREAMS + 1)
            second.gate.set()
        for answer in (*streams, new):
            assert (await answer)[2] == ANSWER
        assert router.count("quire_router_held_requests") == 0
        assert router.count("quire_router_interruption_seconds_count") == MIN_STREAMS

    run([first, second], story)


def test_an_event_of_another_stream_is_passed_on_once_these_are_sent() -> None:
    replica = FakeReplica()
    replica.gate = asyncio.Event()

    async def story(router: Router) -> None:
        open_stream = asyncio.ensure_future(stream(router))
        await _until(lambda: len(replica.requests) == 1)
        resumes = router.fleet.resumes
        for _ in range(MIN_STREAMS):
            resumes.begin_send()
        replica.gate.set()
        await asyncio.sleep(EVENT_HOLD_S / 2)
        assert router.count("quire_router_streamed_tokens_total") == 0
        resumes.end_send()
        assert (await open_stream)[2] == ANSWER

    run([replica], story)


def test_streams_without_another_replica_hold_nothing() -> None:
    first, second = FakeReplica("fp_a"), FakeReplica("fp_b")
    first.fails_after, first.gate = 3, asyncio.Event()
    second.health |= {"ok": False, "state": "draining"}

    async def story(router: Router) -> None:
        streams = [asyncio.ensure_future(stream(router)) for _ in range(MIN_STREAMS)]
        await _until(lambda: len(first.requests) == MIN_STREAMS)
        second.health |= {"ok": True, "state": "ready"}
        await _until(lambda: router.fleet.num_available == 2)
        first.health |= {"ok": False, "state": "starting"}
        assert first.gate is not None
        first.gate.set()
        await _until(lambda: router.fleet.num_waiting == MIN_STREAMS)
        assert not router.fleet.resumes._num_streams
        assert not await router.fleet.resumes.hold("")
        assert (await stream(router))[2] == ANSWER
        first.fails_after = None
        first.health |= {"ok": True, "state": "ready"}
        for answer in streams:
            assert (await answer)[2] == ANSWER
        assert not router.fleet.resumes._num_streams

    run([first, second], story, resume_s=20.0)


def test_streams_whose_clients_leave_hold_nothing_any_more() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.fails_after, first.gate, second.gate = 3, asyncio.Event(), asyncio.Event()
    second.health |= {"ok": False, "state": "draining"}

    async def story(router: Router) -> None:
        streams = [asyncio.ensure_future(stream(router)) for _ in range(MIN_STREAMS)]
        await _until(lambda: len(first.requests) == MIN_STREAMS)
        second.health |= {"ok": True, "state": "ready"}
        await _until(lambda: router.fleet.num_available == 2)
        assert first.gate is not None
        first.gate.set()
        resumes = router.fleet.resumes
        await _until(lambda: resumes._num_streams.total() == MIN_STREAMS)
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        assert not resumes._num_streams

    run([first, second], story)

"""Beats: how long a replica may send none, and what it says between them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from itertools import pairwise
from typing import Any, cast

import pytest

from bench.router.virtual_time import VirtualLoop, run_virtual
from quire.router import beats as beats_module
from quire.router.beats import Beats
from quire.router.faults import ReplicaFault
from quire.router.http_client import Exchange
from quire.routing.beat_gaps import MIN_SILENT_S, AwakeTime
from tests.unit.router.fake_replica import TICK_S, FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, _until, stream


def test_events_are_read_however_they_are_cut_and_others_are_a_fault() -> None:
    async def story() -> None:
        said = list[Any]()
        beats, exchange = (
            Beats(said.append, AwakeTime()),
            Exchange(asyncio.get_running_loop(), may_be_stale=False),
        )
        raw = b':\n\ndata: {"ok":false,"state":"restarting","reason":"r","more":1}\n\n:\n\n'
        exchange.got_head(200, [(b"content-type", b"text/event-stream")])

        async def connect() -> Exchange:
            return exchange

        reading = asyncio.ensure_future(beats.follow(connect))
        await asyncio.sleep(0)
        for at in range(len(raw)):
            exchange.got(raw[at : at + 1])
            await asyncio.sleep(0)
        assert [(one.ok, one.state, one.reason) for one in said] == [(False, "restarting", "r")]
        exchange.got(b"x" * 70_000)
        with pytest.raises(ReplicaFault, match="no events"):
            await reading

    asyncio.run(story())


def test_an_engine_that_dies_is_an_event_and_its_streams_go_on_at_once() -> None:
    """No probe says so here: these are answered as before."""
    first, second = FakeReplica(), FakeReplica()
    first.has_beats = True
    first.silent_after = 5

    async def story(router: Router) -> None:
        await _until(lambda: first.beats is not None)
        open_stream = asyncio.ensure_future(stream(router))
        await _until(lambda: len(first.requests) == 1)
        first.health_gate = asyncio.Event()
        [one, _] = router.fleet.replicas.values()
        await _until(lambda: one in router.prober._probing)
        first.changes.put_nowait({"ok": False, "state": "restarting", "reason": "signal 9"})
        assert (await open_stream)[2] == ANSWER
        assert len(second.requests[0]["output_ids"]) == 5
        assert (one.state, one.reason) == ("restarting", "signal 9")
        text = router.metrics.text().decode()
        assert 'quire_router_interruption_seconds_count{cause="fence"} 1.0' in text
        asked = router.prober._probing[one]
        first.health_gate.set()  # this probe was sent before, and its answer says that all is well
        await asked
        assert not one.is_up
        await _until(lambda: one.is_up)

    run([first, second], story, probe_s=0.2, stall_s=30.0, silence_s=60.0)


def test_a_server_that_finds_its_engine_silent_is_given_up_without_a_probe() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.has_beats = True
    first.silent_after = 5

    async def story(router: Router) -> None:
        await _until(lambda: first.beats is not None)
        open_stream = asyncio.ensure_future(stream(router))
        await _until(lambda: len(first.requests) == 1)
        first.health_gate = asyncio.Event()
        [one, other] = router.fleet.replicas.values()
        silence = router.prober._silence
        silence.given_up(other, asyncio.get_running_loop().time())
        said = {"ok": True, "state": "ready", "silent_ms": 700}
        first.changes.put_nowait(said)
        first.changes.put_nowait({"ok": True, "state": "ready"})
        await _until(first.changes.empty)
        assert one.is_up, "another was silent, too: its answers decide"
        silence.keep([])
        await _until(lambda: one in router.prober._probing)
        asked = router.prober._probing[one]
        first.changes.put_nowait(said)
        assert (await open_stream)[2] == ANSWER
        assert (one.state, one.reason) == ("stalled", "its engine has sent nothing for 0.7 s")
        [fenced] = [line for line in router.lines if "replica fenced" in line]
        assert "open=1" in fenced, "one line for all of its requests"
        assert not any("failed with a request" in line for line in router.lines)
        text = router.metrics.text().decode()
        assert 'quire_router_interruption_seconds_count{cause="silence"} 1.0' in text
        first.health_gate.set()  # this probe was sent before, and knows of no silence
        await asked
        assert not one.is_up

    run([first, second], story, probe_s=0.2, stall_s=30.0, silence_s=60.0)


def test_silence_that_is_found_counts_from_the_engine_s_last_message() -> None:
    """A server passes on what had come before, also after its engine has stopped."""
    first, second = FakeReplica(), FakeReplica()
    first.has_beats = True
    first.silent_after = 5

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        await _until(lambda: first.beats is not None)
        open_stream = asyncio.ensure_future(stream(router))
        await _until(lambda: len(first.requests) == 1)
        [one, _] = router.fleet.replicas.values()
        router.prober._silence.factor = 2.0
        router.prober._silence._changed_s = loop.time()
        first.changes.put_nowait({"ok": True, "state": "ready", "silent_ms": 700})
        await _until(first.changes.empty)
        began_s = loop.time()
        one.progressed(began_s + 0.1)
        assert (await open_stream)[2] == ANSWER
        assert 1.2 < loop.time() - began_s < 1.4
        assert one.reason == "its engine has sent nothing for 2.0 s"

    run([first, second], story, probe_s=0.05, stall_s=30.0, silence_s=60.0)


@pytest.mark.parametrize("said", [{"ok": False, "state": "draining"}, {}])
def test_a_server_that_drains_or_has_no_more_beats_keeps_its_streams(said: dict[str, Any]) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.has_beats, first.gate = True, asyncio.Event()

    async def story(router: Router) -> None:
        await _until(lambda: first.beats is not None)
        open_stream = asyncio.ensure_future(stream(router))
        await _until(lambda: len(first.requests) == 1)
        first.health = {**first.health, **({"ok": False, "state": "draining"} if said else {})}
        first.changes.put_nowait(said)
        [one, _] = router.fleet.replicas.values()
        if said:
            await _until(lambda: one.state == "draining")
        else:
            await _until(lambda: router.prober._beats.quiet_s(one, 0.0) is None)
        assert first.gate is not None
        first.gate.set()
        assert (await open_stream)[2] == ANSWER
        assert not second.requests

    run([first, second], story, stall_s=30.0)


def test_beats_that_are_no_json_are_given_up_and_the_replica_is_not() -> None:
    first = FakeReplica()
    first.has_beats = True

    async def story(router: Router) -> None:
        await _until(lambda: first.beats is not None)
        first.changes.put_nowait({"ok": "what"})
        [one] = router.fleet.replicas.values()
        await _until(lambda: router.prober._beats.quiet_s(one, 0.0) is None)
        assert (await stream(router))[2] == ANSWER

    run([first], story)


def test_a_connection_that_only_looks_open_is_given_up_and_another_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a machine that was gone: the server that is there now has not heard of it."""
    monkeypatch.setattr(beats_module, "LOST_S", 0.3)
    monkeypatch.setattr(beats_module, "_AGAIN_S", 0.0)
    first = FakeReplica()
    first.has_beats = True

    async def story(router: Router) -> None:
        [one] = router.fleet.replicas.values()
        beats = router.prober._beats
        await _until(lambda: beats.quiet_s(one, 0.0) is not None)
        lost = first.beats
        assert lost is not None
        lost.clear()
        await _until(lambda: first.beats is not lost)
        await _until(lambda: beats.quiet_s(one, 0.0) is not None)
        assert one.is_up

    run([first], story, probe_s=0.1)


def test_while_beats_are_late_another_connection_is_opened_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several processes behind one port, one that has not stopped may accept it."""
    monkeypatch.setattr(beats_module, "_LATE_S", 0.2)
    first = FakeReplica()
    first.has_beats = True

    async def story(router: Router) -> None:
        [one] = router.fleet.replicas.values()
        beats = router.prober._beats
        await _until(lambda: beats.quiet_s(one, 0.0) is not None)
        reading, silent = beats._reading[one], first.beats
        assert silent is not None
        silent.clear()
        await _until(lambda: first.beats is not silent)
        last_s = beats._known[one].gaps.last_s
        await _until(lambda: beats._known[one].gaps.last_s > last_s)
        await _until(lambda: first.num_left == 1)
        assert beats._reading[one] is reading
        assert one.is_up

    run([first], story, probe_s=10.0, stall_s=30.0)


def test_time_in_which_the_router_is_busy_is_no_silence_of_a_replica() -> None:
    only = FakeReplica()
    only.has_beats = True

    async def story(router: Router) -> None:
        [one] = router.fleet.replicas.values()
        beats, loop = router.prober._beats, cast(VirtualLoop, asyncio.get_running_loop())
        await _until(lambda: beats.quiet_s(one, 0.0) is not None)
        gate = only.beats
        assert gate is not None
        await asyncio.sleep(0.2)
        gate.clear()
        await asyncio.sleep(0.1)
        loop._virtual.now_s += 0.7  # one turn of its event loop
        await asyncio.sleep(0.1)
        quiet_s = beats.quiet_s(one, loop.time())
        assert quiet_s is not None
        assert 0.1 < quiet_s < 0.3
        gate.set()
        await asyncio.sleep(0.3)
        quiet_s = beats.quiet_s(one, loop.time())
        assert quiet_s is not None
        assert 0.0 <= quiet_s < 0.1

    run([only], story, probe_s=10.0, stall_s=30.0)


def test_a_second_connection_that_fails_is_opened_again_after_growing_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beats_module, "_LATE_S", 0.2)

    async def story() -> list[float]:
        loop = asyncio.get_running_loop()
        times, silent = list[float](), Exchange(loop, may_be_stale=False)
        silent.got_head(200, [(b"content-type", b"text/event-stream")])

        async def connect() -> Exchange:
            times.append(loop.time())
            if len(times) == 3:  # it is accepted, and never answered
                await asyncio.Event().wait()
            if len(times) > 1:
                raise ReplicaFault("no connection", is_suspect=False)
            return silent

        with pytest.raises(ReplicaFault, match="sent nothing for 10 s"):
            await Beats(lambda health: None, AwakeTime()).follow(connect)
        return [after_s - before_s for before_s, after_s in pairwise(times[1:])]

    waits = run_virtual(story(), tick_s=TICK_S)
    wanted = [0.25, 2.0 + 0.5, 1.0, 2.0, 2.0]
    assert all(0 <= one - least < 0.3 for one, least in zip(waits, wanted, strict=True)), waits


STOPPED: dict[str, Any] = {"ok": True, "state": "ready", "stopped_processes": [2]}


async def _stop_second(router: Router, replica: FakeReplica) -> None:
    """Have the replica say that its process 2 has stopped; process 1 accepts from now on."""
    replica.process, replica.silent_after, replica.whole_gate = 1, None, None
    replica.changes.put_nowait(STOPPED)
    await _until(lambda: any("have stopped" in line for line in router.lines))


def test_streams_of_a_stopped_process_go_on_at_another_one_and_those_of_others_stay() -> None:
    only = FakeReplica()
    only.has_beats, only.process = True, 1

    async def story(router: Router) -> None:
        await _until(lambda: only.beats is not None)
        only.gate = asyncio.Event()
        kept = asyncio.ensure_future(stream(router))
        await _until(lambda: len(only.requests) == 1)
        gate, only.gate, only.process, only.silent_after = only.gate, None, 2, 5
        [one] = router.fleet.replicas.values()
        router.fleet.pool(one).close()
        lost = asyncio.ensure_future(stream(router))
        await _until(lambda: router.count("quire_router_streamed_tokens_total") == 5)
        await _stop_second(router, only)
        assert (await lost)[2] == ANSWER
        assert [len(sent.get("output_ids", ())) for sent in only.requests] == [0, 0, 5]
        gate.set()
        assert (await kept)[2] == ANSWER
        assert len(only.requests) == 3
        assert router.count("quire_router_replica_faults_total") == 1, "it may be the cause"
        assert not any("fenced" in line for line in router.lines)
        assert one.is_up
        names = {b"x-quire-process"} & (await stream(router))[1].keys()
        assert not names, "of a replica's process, and no client's business"

    run([only], story, probe_s=10.0, stall_s=30.0, silence_s=60.0)


def test_a_process_that_stops_gives_the_streams_in_its_queue_the_time_to_resume_again() -> None:
    """They have waited there for longer, since another replica failed with them."""
    first, second = FakeReplica(), FakeReplica()
    second.has_beats, second.process, second.gate = True, 2, asyncio.Event()
    first.fails_after = 5

    async def story(router: Router) -> None:
        await _until(lambda: second.beats is not None)
        answering = asyncio.ensure_future(stream(router))
        await _until(lambda: len(second.requests) == 1)
        first.health |= {"ok": False, "state": "draining"}
        await asyncio.sleep(3.0)
        second.gate = None
        await _stop_second(router, second)
        assert (await answering)[2] == ANSWER
        assert [len(sent["output_ids"]) for sent in second.requests] == [5, 5]

    run([first, second], story, resume_s=2.0, probe_s=1.0, stall_s=30.0, silence_s=60.0)


# Of a request without an answer, when it is known that a process has stopped: it may have been sent
# before the stop, or was sent after it.
EARLY_S, LATE_S = 0.75 * MIN_SILENT_S, 0.25 * MIN_SILENT_S


async def _whole_answer(router: Router, replica: FakeReplica) -> asyncio.Future[Any]:
    """Ask for an answer that is held back, over a new connection."""
    [one] = router.fleet.replicas.values()
    router.fleet.pool(one).close()
    replica.whole_gate = asyncio.Event()
    asked = len(replica.requests)
    answer = asyncio.ensure_future(router.post("/v1/completions", {"prompt": "a"}))
    await _until(lambda: len(replica.requests) == asked + 1)
    return answer


def test_a_request_that_was_sent_after_the_stop_is_sent_once() -> None:
    only = FakeReplica()
    only.has_beats, only.process = True, 1

    async def story(router: Router) -> None:
        await _until(lambda: only.beats is not None)
        answer, gate = await _whole_answer(router, only), only.whole_gate
        await asyncio.sleep(LATE_S)
        await _stop_second(router, only)
        await asyncio.sleep(LATE_S)
        assert gate is not None
        gate.set()
        assert (await answer)[0] == 200
        assert len(only.requests) == 1

    run([only], story, probe_s=10.0, stall_s=30.0)


def test_what_is_open_is_ended_once_for_each_stop_of_a_process() -> None:
    """Each event names all processes that have stopped, those of earlier events too."""
    only = FakeReplica()
    only.has_beats, only.process = True, 1

    async def story(router: Router) -> None:
        await _until(lambda: only.beats is not None)
        await _stop_second(router, only)
        answer = await _whole_answer(router, only)
        await asyncio.sleep(EARLY_S)
        only.changes.put_nowait({**STOPPED, "reason": "changed"})
        await _until(only.changes.empty)
        await asyncio.sleep(0.1)
        assert len(only.requests) == 1
        only.changes.put_nowait({"ok": True, "state": "ready"})  # it goes on, and stops again
        await _until(only.changes.empty)
        only.whole_gate = None
        only.changes.put_nowait(STOPPED)
        assert (await answer)[0] == 200
        assert len(only.requests) == 2

    run([only], story, probe_s=10.0, stall_s=30.0)


def test_an_answer_outlives_the_stops_of_two_processes() -> None:
    """One after the other has the request and stops, before it has answered."""
    only = FakeReplica()
    only.has_beats, only.process = True, 1

    async def story(router: Router) -> None:
        await _until(lambda: only.beats is not None)
        answer = await _whole_answer(router, only)
        await asyncio.sleep(EARLY_S)
        only.changes.put_nowait(STOPPED)
        await _until(lambda: len(only.requests) == 2)
        assert not router.count("quire_router_replica_faults_total")
        await asyncio.sleep(EARLY_S)
        only.whole_gate = None
        only.changes.put_nowait({**STOPPED, "stopped_processes": [2, 3]})
        assert (await answer)[0] == 200
        assert len(only.requests) == 3
        assert not any("fenced" in line for line in router.lines)

    run([only], story, probe_s=10.0, stall_s=30.0)


def test_a_request_that_stops_processes_ends_after_two_of_each_of_two_replicas() -> None:
    replicas = [FakeReplica() for _ in range(3)]
    for one in replicas:
        one.has_beats, one.process = True, 1

    async def story(router: Router) -> None:
        await _until(lambda: all(one.beats is not None for one in replicas))
        for replica in router.fleet.replicas.values():
            router.fleet.pool(replica).close()
        for one in replicas:
            one.whole_gate = asyncio.Event()
        answer = asyncio.ensure_future(router.post("/v1/completions", {"prompt": "a"}))
        stopped = dict[FakeReplica, list[int]]()
        while not answer.done():
            for one in replicas:
                numbers = stopped.setdefault(one, [])
                if len(one.requests) > len(numbers):
                    await asyncio.sleep(EARLY_S)
                    numbers.append(2 + len(numbers))
                    one.changes.put_nowait({**STOPPED, "stopped_processes": list(numbers)})
            await asyncio.sleep(0.05)
        status, _, body = await answer
        assert (status, json.loads(body)["error"]["code"]) == (502, "replicas_failed")

    run(replicas, story, probe_s=10.0, stall_s=30.0, silence_s=60.0)
    assert sorted(len(one.requests) for one in replicas) == [0, 2, 2]


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_answer_that_a_stopped_process_may_have_is_asked_for_again(is_kept: bool) -> None:
    """By a connection that is kept it is known which process has it; by a new one it is not."""
    only = FakeReplica()
    only.has_beats, only.process = True, 2

    async def story(router: Router) -> None:
        await _until(lambda: only.beats is not None)
        [one] = router.fleet.replicas.values()
        body = {"prompt": "a"}
        if is_kept:
            assert (await router.post("/v1/completions", body))[0] == 200
        else:
            router.fleet.pool(one).close()
        only.whole_gate = asyncio.Event()
        asked = len(only.requests)
        answer = asyncio.ensure_future(router.post("/v1/completions", body))
        await _until(lambda: len(only.requests) == asked + 1)
        await asyncio.sleep(EARLY_S)
        await _stop_second(router, only)
        assert (await answer)[0] == 200
        assert len(only.requests) == asked + 2
        assert not any("fenced" in line for line in router.lines)

    run([only], story, probe_s=10.0, stall_s=30.0)


def test_nothing_is_kept_of_a_removed_replica_and_none_is_fenced_sooner_over_tls() -> None:
    first = FakeReplica()
    first.has_beats = True

    async def story(router: Router) -> None:
        [one] = router.fleet.replicas.values()
        beats = router.prober._beats
        await _until(lambda: beats.quiet_s(one, 0.0) is not None)
        beats._known[one].gaps._longest_s.extend([0.1] * 3)
        assert beats.limit_s(one, 20.0) < 20.0
        one.url = dataclasses.replace(one.url, is_secure=True)
        assert beats.limit_s(one, 20.0) == 20.0
        beats.keep(())
        await _until(lambda: not beats._reading)
        assert not beats._again_s

    run([first], story, probe_s=10.0, stall_s=30.0)

"""A silent engine behind a server that answers: which reports of it count."""

from __future__ import annotations

import asyncio

from quire.routing.engine_silence import MAX_SILENT_S, MIN_SILENT_S, EngineSilence
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, _until, stream


def test_one_report_is_not_enough() -> None:
    """A server that was late has unread messages, and its next report says so."""
    engine = EngineSilence()
    known = []
    for silent_s in (0.1, 1.5, 0.1, 0.4, 1.2, 1.4, 1.6, 0.0):
        engine.report(silent_s)
        known.append(engine.known_s)
    assert known == [0.0, 0.0, 0.0, 0.0, 0.0, 1.4, 1.6, 0.0]


def test_what_is_usual_is_learned_within_bounds() -> None:
    engine = EngineSilence()
    assert engine.usual_s == MAX_SILENT_S
    for _ in range(8):
        engine.report(0.1)
        engine.report(0.0)
    assert engine.usual_s == MIN_SILENT_S
    engine.report(0.5)
    assert engine.usual_s == MIN_SILENT_S, "it has not ended"
    engine.report(0.0)
    assert engine.usual_s == 1.5
    engine.report(5.0)
    engine.report(0.0)
    assert engine.usual_s == MAX_SILENT_S


def test_a_silent_engine_is_fenced_until_it_sends_something() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.silent_after = 3
    first.health |= {"pending": 1, "silent_ms": 0}

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(stream(router))
        await first.began.wait()
        replica = next(iter(router.fleet.replicas.values()))
        first.steps_total += 1  # its stall time is not what ends the stream
        first.health["silent_ms"] = 700
        await _until(lambda: router.prober._engines[replica].reported_s == 0.7)
        first.health["silent_ms"] = 2500
        assert (await answering)[2] == ANSWER
        assert any("its engine has sent nothing for 2.5 s" in line for line in router.lines)
        assert replica.state == "stalled"
        first.health["silent_ms"] = 0
        first.steps_total += 1
        await _until(lambda: not replica.is_fenced)

    run([first, second], story, stall_s=600.0)
    assert second.requests[0]["output_ids"] == [100, 101, 102]


def test_a_server_that_answers_late_reads_its_engine_late() -> None:
    """Its reports count only above the time that its own answers take."""
    first, second = FakeReplica(), FakeReplica()
    first.health |= {"pending": 1, "silent_ms": 2500}

    async def story(router: Router) -> None:
        replica = next(iter(router.fleet.replicas.values()))
        times = router.prober._answer_times[replica]
        times.clear()
        times.extend(times.maxlen * [2.0])
        await _until(lambda: times.count(2.0) < 20)
        assert router.prober._engines[replica].known_s == 2.5
        assert not replica.is_fenced
        times.clear()
        await _until(lambda: replica.state == "stalled")

    run([first, second], story, stall_s=600.0)

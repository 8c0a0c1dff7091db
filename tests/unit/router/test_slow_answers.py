"""Answers without a byte before their end: waited for while their replica works, in virtual time.

Streams have heartbeats, so one that is silent for too long has lost its connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.router.prober import MAX_SILENCES
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, STREAM, _until
from tests.unit.router.test_prefill_pairs import LONG, PairRouter
from tests.unit.router.test_prefill_pairs import run as run_pair

SETTINGS: dict[str, Any] = {"probe_s": 0.5, "stall_s": 10.0, "silence_s": 120.0, "within_s": 1000.0}
OLLAMA = "/api/generate"
WHOLE = {"prompt": "a", "max_tokens": LENGTH}
# Longer than a stream may be silent.
SLOW_S = 200.0


def _slow() -> FakeReplica:
    """Return a replica with a request that it answers once its gates are set."""
    replica = FakeReplica()
    replica.gate, replica.whole_gate = asyncio.Event(), asyncio.Event()
    replica.health["pending"] = 1
    return replica


async def _compute(replica: FakeReplica, seconds: float) -> None:
    """Let a replica make steps for some time, and answer then."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        replica.steps_total += 1
        await asyncio.sleep(1.0)
    assert replica.gate is not None
    assert replica.whole_gate is not None
    replica.gate.set()
    replica.whole_gate.set()


def _replica_lines(router: Router) -> list[str]:
    return [line for line in router.lines if "fenced" in line or "failed" in line]


@pytest.mark.parametrize("path", ["/v1/completions", OLLAMA, "/v1/embeddings"])
def test_an_answer_without_heartbeats_may_take_longer_than_a_stream_is_silent(path: str) -> None:
    first, second = _slow(), FakeReplica()
    first.event_end = b"\n"

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post(path, {**WHOLE, "stream": path == OLLAMA}))
        await first.began.wait()
        await _compute(first, SLOW_S)
        status, _, body = await answering
        assert status == 200
        assert body.startswith(b'{"token": 100}' if path == OLLAMA else first.body)
        assert not _replica_lines(router)

    run([first, second], story, **SETTINGS)
    assert not second.requests


@pytest.mark.parametrize("state", ["draining", "paused"])
def test_a_replica_that_takes_no_requests_ends_a_long_answer(state: str) -> None:
    """One that is paused may hold it before it is counted as open."""
    first, second = _slow(), FakeReplica()

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post("/v1/completions", WHOLE))
        await first.began.wait()
        first.health |= {"ok": False, "state": state, "pending": int(state == "draining")}
        if state == "paused":
            await asyncio.sleep(SLOW_S)
        await _compute(first, 1.0 if state == "paused" else SLOW_S)
        assert (await answering)[::2] == (200, first.body)

    run([first, second], story, **SETTINGS)
    assert not second.requests


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_an_answer_that_its_replica_knows_nothing_of_goes_elsewhere(state: str) -> None:
    """The replica is idle, so its answer was lost on the way."""
    first, second = _slow(), FakeReplica()
    first.health["pending"] = 0
    first.answer = lambda *asked: first.health.update(ok=state == "ready", state=state)

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (await router.post("/v1/completions", WHOLE))[::2] == (200, second.body)
        assert 120.0 < loop.time() - began_s < 122.0
        assert any("no byte came for 120." in line for line in router.lines)

    run([first, second], story, **SETTINGS)


@pytest.mark.parametrize("path", ["/v1/completions", OLLAMA])
def test_an_answer_that_is_lost_at_a_replica_with_other_work_goes_elsewhere(path: str) -> None:
    """Its requests and steps say nothing of this one, so the time for it is bounded."""
    first, second = _slow(), FakeReplica()
    first.event_end = second.event_end = b"\n"

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asked = router.post(path, {**WHOLE, "stream": path == OLLAMA})
        answering = asyncio.ensure_future(asked)
        while not answering.done():
            first.steps_total += 1
            await asyncio.sleep(1.0)
        status, _, body = await answering
        assert status == 200
        assert body.startswith(b'{"token": 100}' if path == OLLAMA else second.body)
        assert 0.0 < loop.time() - began_s - MAX_SILENCES * 120.0 < 3.0

    run([first, second], story, **{**SETTINGS, "within_s": 2000.0})
    assert len(second.requests) == 1


def test_a_stream_without_heartbeats_that_has_output_is_not_waited_for_so_long() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.event_end = second.event_end = b"\n"
    first.silent_after, first.health["pending"] = 3, 1

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answering = asyncio.ensure_future(router.post(OLLAMA, {**WHOLE, "stream": True}))
        while not answering.done():
            first.steps_total += 1
            await asyncio.sleep(1.0)
        assert (await answering)[2].count(b'{"token": ') == LENGTH
        assert 120.0 < loop.time() - began_s < 123.0

    run([first, second], story, **SETTINGS)
    assert second.requests[0]["output_ids"] == [100, 101, 102]


def test_a_replica_that_drains_without_progress_is_stalled() -> None:
    """Streams there may have heartbeats of a server with a stopped engine."""
    first, second = FakeReplica(), FakeReplica()
    first.silent_after, first.health["pending"] = 3, 1
    first.before_token = lambda token: first.health.update(ok=False, state="draining")

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (await router.post("/generate", STREAM))[2] == ANSWER
        assert loop.time() - began_s < 60.0
        assert any("no progress" in line for line in router.lines)

    run([first, second], story, **SETTINGS)


def test_an_answer_of_a_replica_without_progress_goes_elsewhere_sooner() -> None:
    first, second = _slow(), FakeReplica()

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (await router.post("/v1/completions", WHOLE))[::2] == (200, second.body)
        assert loop.time() - began_s < 60.0
        assert any("no progress" in line for line in router.lines)

    run([first, second], story, **SETTINGS)


def test_a_stream_without_a_heartbeat_goes_elsewhere_although_its_replica_works() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.silent_after, first.health["pending"] = 3, 1

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post("/generate", STREAM))
        await _until(lambda: bool(first.requests))
        while not answering.done():
            first.steps_total += 1
            await asyncio.sleep(1.0)
        assert (await answering)[2] == ANSWER
        assert any("no byte came for 120." in line for line in router.lines)

    run([first, second], story, **SETTINGS)
    assert second.requests[0]["output_ids"] == [100, 101, 102]


def test_the_answer_of_a_prefill_replica_has_no_heartbeats() -> None:
    """It is whole, whatever the client has asked for."""
    decode, prefill = FakeReplica(), FakeReplica()
    prefill.whole_gate = gate = asyncio.Event()

    async def story(router: PairRouter) -> None:
        asked = router.post("/v1/completions", {**LONG, "stream": True})
        answering = asyncio.ensure_future(asked)
        await prefill.began.wait()
        (replica,) = router.pairs.fleet.replicas.values()
        (load,) = replica.loads
        assert not load.has_heartbeats
        gate.set()
        assert (await answering)[0] == 200

    run_pair(decode, prefill, story)

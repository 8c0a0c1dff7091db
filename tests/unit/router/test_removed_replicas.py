"""Replicas that the discovery no longer names: they end what they have, and nothing of them stays.

The number of such a replica is soon that of another one, which must not be forgotten with it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.base.server_url import server_url
from quire.router.faults import ReplicaFault
from quire.router.replica import MAX_BEGINNING, REMOVED, Replica
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.made_replicas import made_replicas, open_load
from tests.unit.router.test_failover import ANSWER, STREAM, _until, stream

WHOLE = {"prompt": "a"}
# The health that a last probe reads.
LAST_WORDS: dict[str, dict[str, Any]] = {
    "nonsense": {"ok": 3},
    "dead": {"ok": False, "state": "dead"},
    "ready": {},
}


def _remove(router: Router, replica: FakeReplica) -> Replica:
    """Let the discovery drop a replica."""
    gone = router.fleet.replicas[replica.url]
    kept = tuple(one for one in router.discovery.urls if one.shown != replica.url)
    assert len(kept) < len(router.discovery.urls)
    router.discovery.urls = kept
    router.fleet.follow()
    assert gone.state == REMOVED
    return gone


async def _until_forgotten(router: Router, gone: Replica) -> None:
    prober = router.prober
    known: tuple[dict[Replica, Any], ...]
    known = (prober._asked_s, prober._answer_times, prober._engines, prober._read_models_s)
    known += (prober._heard_s, prober._silent_s, prober._probing, router.fleet._pools)
    for _ in range(200):
        if not any(gone in one for one in known):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{[gone in one for one in known]} {gone.state}")


@pytest.mark.parametrize("end", ["fault", "timeout", "nonsense", "dead", "ready"])
def test_its_last_probe_changes_nothing(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = FakeReplica(), FakeReplica(), FakeReplica()

    async def story(router: Router) -> None:
        forgotten, policy = list[Replica](), router.fleet.policy
        monkeypatch.setattr(policy, "forget", forgotten.append)
        first.health_gate = gate = asyncio.Event()
        gone = router.fleet.replicas[first.url]
        await _until(lambda: gone in router.prober._asked_s and gone in router.prober._probing)
        if end in ("fault", "timeout", "ready"):  # it was suspected just before
            router.fleet.suspect(gone)
        _remove(router, first)
        await third.start()
        router.discovery.urls += (server_url(third.url),)
        router.fleet.follow()
        assert router.fleet.replicas[third.url].number == gone.number
        assert forgotten == [gone]
        if end == "fault":
            first.stop_listening(cuts=True)
        elif end != "timeout":
            first.health |= LAST_WORDS[end]
            gate.set()
        await _until(lambda: gone not in router.prober._probing)
        await _until_forgotten(router, gone)
        assert gone.state == REMOVED
        assert not gone.is_up
        assert forgotten == [gone]
        assert not any("fenced" in line for line in router.lines)
        assert (await stream(router))[2] == ANSWER

    run([first, second], story)
    third.stop_listening(cuts=True)


def test_one_that_is_removed_while_its_models_are_read_stays_removed() -> None:
    first, second = FakeReplica(), FakeReplica()

    async def story(router: Router) -> None:
        gone, read = router.fleet.replicas[first.url], router.prober._read_models

        async def read_late(replica: Replica) -> bool:
            found = await read(replica)
            if replica is gone and gone.state != REMOVED:
                _remove(router, first)
            return found

        router.prober._read_models = read_late  # type: ignore[method-assign]
        router.fleet.suspect(gone)
        await _until(lambda: gone.state == REMOVED)
        await _until_forgotten(router, gone)
        assert not gone.is_up
        assert sum("replica ready" in line for line in router.lines) == 2, "at the start"

    run([first, second], story)


def test_one_that_drains_when_it_is_removed_is_forgotten() -> None:
    """Its refusal says that it drains, which is its state no more."""
    first, second = FakeReplica(), FakeReplica()
    first.whole_gate = gate = asyncio.Event()

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post("/generate", WHOLE))
        await first.began.wait()
        gone = _remove(router, first)
        first.status, first.body = 503, b'{"error":{"code":"shutting_down"}}'
        gate.set()
        assert (await answering)[::2] == (200, second.body)
        await _until_forgotten(router, gone)

    run([first, second], story)


def test_it_may_compute_a_long_answer_to_its_end() -> None:
    """Longer than it might be without progress: it is probed as before."""
    first, second = FakeReplica(), FakeReplica()
    first.whole_gate = gate = asyncio.Event()
    first.health["pending"] = 1

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post("/generate", WHOLE))
        await first.began.wait()
        gone = _remove(router, first)
        for _ in range(60):
            first.steps_total += 1
            await asyncio.sleep(0.2)
        gate.set()
        assert (await answering)[::2] == (200, first.body)
        await _until_forgotten(router, gone)

    run([first, second], story, silence_s=2.0, within_s=60.0)
    assert not second.requests


@pytest.mark.parametrize("fault", ["stalls", "answers nothing", "is suspected"])
def test_what_it_cannot_end_goes_elsewhere(fault: str) -> None:
    first, second = FakeReplica(), FakeReplica()
    first.whole_gate = asyncio.Event()
    first.health["pending"] = 1

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post("/generate", WHOLE))
        await first.began.wait()
        if fault == "answers nothing":
            first.health_gate = asyncio.Event()
        if fault == "is suspected":
            router.fleet.suspect(router.fleet.replicas[first.url])
        gone = _remove(router, first)
        assert (await answering)[::2] == (200, second.body)
        await _until_forgotten(router, gone)
        assert not any("replica fenced" in line for line in router.lines)

    run([first, second], story, within_s=60.0)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_pause_is_no_stall_of_it(resumes: bool) -> None:
    """It reports the pause as any other replica does; without one it stalls again."""
    first, second = FakeReplica(), FakeReplica()
    first.whole_gate = gate = asyncio.Event()

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post("/generate", WHOLE))
        await first.began.wait()
        gone = _remove(router, first)
        first.health |= {"ok": False, "state": "paused", "pending": 1}
        await asyncio.sleep(5.0)  # several times its stall time
        assert (gone.said, gone.state) == ("paused", REMOVED)
        assert not answering.done()
        if resumes:
            first.health |= {"ok": True, "state": "ready"}
        else:
            gate.set()
        body = second.body if resumes else first.body
        assert (await answering)[::2] == (200, body)
        await _until_forgotten(router, gone)

    second.body = b'{"choices":["second"]}'
    run([first, second], story)


def test_it_is_given_up_once_while_a_client_does_not_read() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.silent_after, first.health["pending"] = 3, 1

    async def story(router: Router) -> None:
        reads, num_pieces = asyncio.Event(), 0

        async def read(piece: bytes) -> None:
            nonlocal num_pieces
            num_pieces += 1
            await reads.wait()

        asked = router.post("/generate", STREAM, on_piece=read)
        answering = asyncio.ensure_future(asked)
        await _until(lambda: num_pieces == 1)
        gone = _remove(router, first)
        await asyncio.sleep(5.0)
        assert gone.loads
        given_up = [line for line in router.lines if "silent replica given up" in line]
        assert len(given_up) == 1, given_up
        reads.set()
        assert (await answering)[2] == ANSWER
        await _until_forgotten(router, gone)

    run([first, second], story)


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_its_next_failure_is_another_one(state: str) -> None:
    """What was open at the first one says nothing of the next."""
    first, second = FakeReplica(), FakeReplica()
    first.whole_gate = gate = asyncio.Event()

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(router.post("/generate", WHOLE))
        await first.began.wait()
        gone = router.fleet.replicas[first.url]
        router.fleet.suspect(gone)
        gone.num_beginning = MAX_BEGINNING + 1
        gone.has_stopped = True
        _remove(router, first)
        first.health |= {"ok": state == "ready", "state": state}
        await _until(lambda: not gone.is_fenced)
        assert not gone.is_up
        router.fleet.suspect(gone)
        assert gone.num_beginning == 1
        assert not any(gone.is_shared(load) for load in gone.loads)
        gate.set()
        assert (await answering)[::2] == (200, first.body)

    run([first, second], story)


def test_its_silence_is_a_silence() -> None:
    """It counts half where many requests were open."""
    (gone,) = made_replicas(1)
    load, faults = open_load(gone, 1), list[ReplicaFault]()
    load.cut = faults.append
    gone.state = REMOVED
    gone.fence("stalled", "no progress")
    gone.fence("dead", "its engine is gone")
    assert [one.is_silence for one in faults] == [True, False]
    assert [one.cause for one in faults] == ["silence", "fence"]

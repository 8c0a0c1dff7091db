"""Replicas that the discovery no longer names: they end what they have, and nothing of them stays.

The number of such a replica is soon that of another one, which must not be forgotten with it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.base.server_url import server_url
from quire.router.replica import REMOVED, Replica
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, _until, stream

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

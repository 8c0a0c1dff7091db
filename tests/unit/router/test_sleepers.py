"""Replicas that sleep: which is put to sleep for a request, and what keeps one awake."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router import sleepers as sleepers_module
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.replica import ASLEEP
from quire.router.route_file import SleepTable
from quire.router.service import RouterService
from quire.router.settings import RouterSettings
from quire.router.sleepers import Sleepers
from tests.unit.router.fake_replica import FakeReplica, Listed, Router, run
from tests.unit.router.test_failover import _until
from tests.unit.router.test_hedging import Late, _count, _fill, _learn

AWAKE = {"ok": True, "state": "ready", "reason": "", "pending": 0}
SLEEPING = {"ok": False, "state": "asleep", "reason": "the engine sleeps", "pending": 0}


class Sleeper(FakeReplica):
    """A replica of its own model. obeys: whether it can be put to sleep."""

    def __init__(self, model: str, *, is_asleep: bool, obeys: bool = True) -> None:
        super().__init__("fp_" + model, model)
        self.obeys = obeys
        self.health = dict(SLEEPING if is_asleep else AWAKE)
        self.said: list[str] = []
        self.answer = self._obey

    @property
    def is_asleep(self) -> bool:
        return self.health["state"] == ASLEEP

    def _obey(self, method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        if path not in ("/admin/sleep", "/admin/wake"):
            assert not self.is_asleep, "the router wakes it first"
            return None
        self.said.append(path.removeprefix("/admin/"))
        if path == "/admin/sleep" and not self.obeys:
            return 400, b"{}"
        self.health = dict(SLEEPING if path == "/admin/sleep" else AWAKE)
        return 200, b"{}"


def ask(router: Router, model: str, **fields: Any) -> Any:
    return router.post("/generate", {"tokens": [1], "model": model, **fields})


def test_the_least_recently_used_replica_sleeps_for_another() -> None:
    names = ("a", "b", "c")
    replicas = [Sleeper(name, is_asleep=name == "c") for name in names]
    first, second, third = replicas

    async def story(router: Router) -> None:
        for model in ("b", "a"):
            assert (await ask(router, model))[0] == 200
        assert (await ask(router, "c"))[0] == 200
        assert [one.is_asleep for one in replicas] == [False, True, False]
        for _ in range(3):
            assert (await ask(router, "a"))[0] == 200
        assert first.said == []
        answers = await asyncio.gather(*(ask(router, "b") for _ in range(4)))
        assert {status for status, _, _ in answers} == {200}
        assert third.said == ["wake", "sleep"]
        assert second.said == ["sleep", "wake"], "once for all of them"

    run(replicas, story, Features(sleepers=Sleepers(SleepTable(max_awake=2))))


def hang(sleeper: Sleeper) -> asyncio.Event:
    """Have a replica answer only once the event is set."""
    sleeper.answer = lambda method, path, fields: None
    sleeper.whole_gate = gate = asyncio.Event()
    return gate


def paths(sleeper: Sleeper) -> list[bytes]:
    return [head.split(b" ")[1] for head in sleeper.heads]


def test_replicas_that_started_awake_are_put_to_sleep_until_few_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sleepers_module, "_AGAIN_S", 3.0)
    names = ("a", "b", "c", "d")
    replicas = [Sleeper(name, is_asleep=False, obeys=name != "c") for name in names]
    sleepers = Sleepers(SleepTable(max_awake=2))

    async def story(router: Router) -> None:
        running = asyncio.ensure_future(sleepers.run(router.fleet))
        async with asyncio.timeout(10):
            while not (replicas[3].is_asleep and replicas[1].is_asleep):
                await asyncio.sleep(0.01)
        assert not replicas[0].is_asleep, "of those that were never used, the first stay awake"
        assert replicas[2].said == ["sleep"], "one that refuses is not asked again at once"
        await asyncio.sleep(3.5)
        replicas[1].health = dict(AWAKE)  # as after a start by its supervisor
        await _until(lambda: replicas[1].is_asleep)
        assert replicas[2].said == ["sleep"] * 2, "it is asked first, and refuses again"
        assert sum("does not sleep" in line for line in router.lines) == 1
        assert (await ask(router, "d"))[0] == 200
        assert [one.is_asleep for one in replicas] == [True, True, False, False]
        replicas[1].health = dict(AWAKE)
        replicas[2].obeys = True
        replicas[3].gate = asyncio.Event()
        stream = asyncio.ensure_future(ask(router, "d", stream=True))
        await replicas[3].began.wait()
        async with asyncio.timeout(60):
            while sum(one.is_asleep for one in replicas) < 2:
                await asyncio.sleep(0.01)
        assert not replicas[3].is_asleep, "it has an open request"
        replicas[3].gate.set()
        assert (await stream)[0] == 200
        running.cancel()

    run(replicas, story, Features(sleepers=sleepers))


def test_nothing_is_put_to_sleep_just_after_the_start() -> None:
    """Streams of the router before this one may be open."""
    replicas = [Sleeper(name, is_asleep=False) for name in ("a", "b")]
    sleepers = Sleepers(SleepTable(max_awake=1))

    async def story(router: Router) -> None:
        running = asyncio.ensure_future(sleepers.run(router.fleet))
        await asyncio.sleep(9.5)
        assert not any(one.said for one in replicas)
        await _until(lambda: replicas[1].said == ["sleep"])
        running.cancel()

    run(replicas, story)


def test_a_replica_that_gets_a_request_while_another_goes_to_sleep_stays_awake() -> None:
    replicas = [Sleeper(name, is_asleep=False) for name in ("a", "b", "c")]
    first, second, third = replicas
    sleepers = Sleepers(SleepTable(max_awake=1))

    async def story(router: Router) -> None:
        gate = hang(third)
        running = asyncio.ensure_future(sleepers.run(router.fleet))
        await third.began.wait()
        second.gate = asyncio.Event()
        stream = asyncio.ensure_future(ask(router, "b", stream=True))
        await second.began.wait()
        await asyncio.sleep(0.2)  # a probe finds it awake
        third.health = dict(SLEEPING)
        gate.set()
        await _until(lambda: first.said == ["sleep"])
        assert second.said == []
        assert paths(third) == [b"/admin/sleep"], "it sleeps now, whatever a probe found before"
        second.gate.set()
        assert (await stream)[0] == 200
        running.cancel()

    run(replicas, story, Features(sleepers=sleepers))


@pytest.mark.parametrize("state", ["dead", "draining"])
def test_the_state_of_a_replica_that_fails_while_it_goes_to_sleep_stays(state: str) -> None:
    """And one that is fenced is waited for no longer: the story ends after 20 s."""
    slow, other = Sleeper("a", is_asleep=False), Sleeper("b", is_asleep=True)

    async def story(router: Router) -> None:
        gate = hang(slow)
        asked = asyncio.ensure_future(ask(router, "b"))
        await slow.began.wait()
        slow.health = {**AWAKE, "ok": False, "state": state}
        slow.status = 400
        replica = router.fleet.replicas[slow.url]
        await _until(lambda: replica.state == state)
        if state == "draining":
            gate.set()
        assert (await asked)[0] == 200
        assert replica.state == state
        assert other.said == ["wake"]

    run([slow, other], story, Features(sleepers=Sleepers(SleepTable(max_awake=1))))


def test_replicas_with_open_requests_stay_awake() -> None:
    busy, other = Sleeper("a", is_asleep=False), Sleeper("b", is_asleep=True)

    async def story(router: Router) -> None:
        busy.gate = asyncio.Event()
        stream = asyncio.ensure_future(ask(router, "a", stream=True))
        async with asyncio.timeout(10):
            await busy.began.wait()
        waiting = asyncio.ensure_future(ask(router, "b"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert busy.said == []
        busy.gate.set()
        assert (await stream)[0] == (await waiting)[0] == 200
        assert busy.said == ["sleep"]

    run([busy, other], story, Features(sleepers=Sleepers(SleepTable(max_awake=1))))


def test_a_request_waits_only_so_long_for_a_place() -> None:
    busy, other = Sleeper("a", is_asleep=False), Sleeper("b", is_asleep=True)

    async def story(router: Router) -> None:
        busy.gate = asyncio.Event()
        stream = asyncio.ensure_future(ask(router, "a", stream=True))
        await busy.began.wait()
        status, headers, body = await ask(router, "b")
        assert status == 503
        assert b"retry-after" in headers
        assert "max-awake" in json.loads(body)["error"]["message"]
        busy.gate.set()
        await stream

    table = SleepTable(max_awake=1, max_wait_seconds=0.2)
    run([busy, other], story, Features(sleepers=Sleepers(table)))


def test_replicas_that_cannot_sleep_are_an_error_with_advice() -> None:
    stubborn = Sleeper("a", is_asleep=False, obeys=False)

    async def story(router: Router) -> None:
        status, _, body = await ask(router, "b")
        assert status == 503
        assert "--restart-engine" in json.loads(body)["error"]["message"]
        assert (await ask(router, "a"))[0] == 200

    replicas = [stubborn, Sleeper("b", is_asleep=True)]
    run(replicas, story, Features(sleepers=Sleepers(SleepTable(max_awake=1))))


def test_without_a_limit_the_request_itself_wakes_the_replica() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    replicas[0].health = dict(SLEEPING)

    async def story(router: Router) -> None:
        for _ in range(2):
            assert (await router.post("/generate", {"tokens": [1]}))[0] == 200
        assert not replicas[0].requests, "one that is awake is preferred"
        replicas[1].health = {**AWAKE, "ok": False, "state": "draining"}
        async with asyncio.timeout(10):
            while router.fleet.num_available != 1:
                await asyncio.sleep(0.01)
        assert (await router.post("/generate", {"tokens": [1]}))[0] == 200
        assert len(replicas[0].requests) == 1

    run(replicas, story)


def test_a_request_that_waits_no_longer_leaves_the_waking_to_its_end() -> None:
    """Else another would be woken beside it, and both would share the memory of one."""
    slow, other = Sleeper("a", is_asleep=True), Sleeper("b", is_asleep=True)
    slow.answer = lambda method, path, fields: None  # wakes once its gate is open
    slow.whole_gate = asyncio.Event()
    sleepers = Sleepers(SleepTable(max_awake=1))

    async def story(router: Router) -> None:
        replica = router.fleet.replicas[slow.url]
        first = asyncio.ensure_future(sleepers.wake(router.fleet, replica, lambda: False))
        await slow.began.wait()
        first.cancel()
        gone = asyncio.ensure_future(sleepers.wake(router.fleet, replica, lambda: False))
        second = asyncio.ensure_future(ask(router, "b"))
        await asyncio.sleep(0.05)
        assert first.cancelled()
        gone.cancel()
        assert other.said == [], "one at a time"
        assert slow.whole_gate is not None
        slow.health = dict(AWAKE)
        slow.whole_gate.set()
        assert (await second)[0] == 200
        assert other.said == ["wake"]
        assert [head.split(b" ")[1] for head in slow.heads] == [b"/admin/wake", b"/admin/sleep"]

    run([slow, other], story, Features(sleepers=sleepers))


def test_an_error_in_a_task_of_the_router_names_it() -> None:
    class Broken(Sleepers):
        async def run(self, fleet: Fleet) -> None:
            raise ValueError("of a test")

    async def story() -> None:
        features = Features(sleepers=Broken(SleepTable(max_awake=1)))
        log = Log("router", io.StringIO())
        service = await RouterService.open(RouterSettings(), Listed(()), log, features)
        await asyncio.wait({service.probing})
        assert service.why_ended() == "[sleep]: ValueError('of a test')"
        await service.close()
        assert len(asyncio.all_tasks()) == 1, "the prober has ended as well"

    asyncio.run(story())


def test_no_replica_is_woken_for_a_hedge() -> None:
    """It would be awake beside max-awake others."""
    first, second = Sleeper("a", is_asleep=False), Sleeper("a", is_asleep=True)
    first.gate, late = asyncio.Event(), Late()

    async def story(router: Router) -> None:
        _learn(router)
        _fill(late)
        late.has_passed.set()
        answer = asyncio.ensure_future(ask(router, "a", tokens=[1, 2], stream=True))
        await _until(lambda: _count(router, "no_replica") == 1)
        assert first.gate is not None
        first.gate.set()
        assert (await answer)[0] == 200
        assert second.is_asleep

    sleepers = Sleepers(SleepTable(max_awake=1))
    run([first, second], story, Features(hedger=late.hedger, sleepers=sleepers))
    assert not second.requests


@pytest.mark.parametrize("end", ["removed", "dead"])
def test_a_replica_that_is_gone_once_it_wakes_gets_no_request(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be that of another one, which would be believed to have the prompt."""
    slow, other, third = (Sleeper("a", is_asleep=True) for _ in range(3))
    sleepers = Sleepers(SleepTable(max_awake=2))

    async def story(router: Router) -> None:
        gate = hang(slow)
        sent, policy = list[str](), router.fleet.policy
        monkeypatch.setattr(policy, "sent", lambda replica, key: sent.append(replica.name))
        asked = asyncio.ensure_future(ask(router, "a"))
        await slow.began.wait()
        replica = router.fleet.replicas[slow.url]
        if end == "removed":
            await third.start()
            for named in ([other], [third, other]):
                router.discovery.urls = tuple(server_url(one.url) for one in named)
                router.fleet.follow()
            assert router.fleet.replicas[third.url].number == replica.number
        else:
            slow.health = {**AWAKE, "ok": False, "state": "dead"}
            await _until(lambda: replica.is_fenced)
        gate.set()
        assert (await asked)[0] == 200
        assert paths(slow) == [b"/admin/wake"]
        assert sent == [other.url]

    run([slow, other], story, Features(sleepers=sleepers))
    if end == "removed":
        third.stop_listening(cuts=True)

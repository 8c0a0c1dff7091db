"""Lanes: long prompts wait for each other, short ones pass, and the limit follows its target."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from bench.router.virtual_time import run_virtual
from quire.router.features import Features
from quire.router.lanes import WINDOW, Lanes
from quire.router.route_file import LanesTable
from tests.unit.router.fake_replica import FakeReplica, Router, run

LONG: dict[str, Any] = {"tokens": [1] * 200, "stream": True, "max_tokens": 5}
SHORT: dict[str, Any] = {"tokens": [1], "stream": True, "max_tokens": 5}


def _features(**settings: Any) -> Features:
    table = {"long_prompt_tokens": 100, "max_long_per_replica": 1, **settings}
    return Features(lanes=Lanes(LanesTable(**table)))


def _num_long(*replicas: FakeReplica) -> int:
    return sum(len(request["tokens"]) > 100 for one in replicas for request in one.requests)


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_long_prompts_wait_for_each_other_and_short_ones_pass() -> None:
    first, second = FakeReplica(), FakeReplica()
    features = _features()
    lanes = features.lanes
    assert lanes is not None

    async def story(router: Router) -> None:
        first.gate, second.gate = asyncio.Event(), asyncio.Event()
        long = [asyncio.ensure_future(router.post("/generate", LONG)) for _ in range(4)]
        await _until(lambda: lanes.num_waiting == 2 and _num_long(first, second) == 2)
        assert (_num_long(first), _num_long(second)) == (1, 1)
        short = [asyncio.ensure_future(router.post("/generate", SHORT)) for _ in range(4)]
        await _until(lambda: len(first.requests) + len(second.requests) == 6)
        first.gate.set()
        second.gate.set()
        for answering in (*long, *short):
            assert (await answering)[0] == 200
        assert _num_long(first, second) == 4
        assert all(not one.num_long for one in router.fleet.replicas.values())

    run([first, second], story, features)


def test_a_place_is_free_with_the_first_token_or_a_failure() -> None:
    only = FakeReplica()
    features = _features()

    async def story(router: Router) -> None:
        only.silent_after = 1  # one token, and then nothing
        open_ = [asyncio.ensure_future(router.post("/generate", LONG)) for _ in range(3)]
        await _until(lambda: _num_long(only) == 3)
        for one in open_:
            one.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
        only.silent_after = None
        only.status, only.body = 400, b'{"error":{"message":"no","code":"invalid_value"}}'
        for _ in range(3):
            assert (await router.post("/generate", LONG))[0] == 400

    run([only], story, features, stall_s=5.0)


def test_prompts_wait_in_turn_and_those_that_leave_make_room() -> None:
    only = FakeReplica()
    features = _features()
    lanes = features.lanes
    assert lanes is not None

    async def story(router: Router) -> None:
        only.gate = asyncio.Event()
        open_ = []
        for at in range(4):
            fields = {**LONG, "seed": at}
            open_.append(asyncio.ensure_future(router.post("/generate", fields)))
            await _until(lambda at=at: len(only.requests) + lanes.num_waiting == at + 1)
        open_[1].cancel()
        await asyncio.gather(open_[1], return_exceptions=True)
        only.gate.set()
        await asyncio.gather(*open_, return_exceptions=True)
        assert [request["seed"] for request in only.requests] == [0, 2, 3]

    run([only], story, features)


def test_only_the_first_prompt_that_waits_is_woken() -> None:
    num_waiting = 50
    lanes, looks, free = Lanes(LanesTable()), Counter[int](), list[Any]()

    async def story() -> None:
        changed = asyncio.Event()

        async def wait_for_change(limit_s: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await changed.wait()
            changed.clear()

        def prompt(number: int) -> Any:
            def is_gone() -> bool:
                looks[number] += 1
                return False

            fleet: Any = SimpleNamespace(wait_for_change=wait_for_change)
            return lanes.place(fleet, lambda: free.pop() if free else None, lambda: True, is_gone)

        asked = [asyncio.ensure_future(prompt(number)) for number in range(num_waiting)]
        await asyncio.sleep(0.001)
        for number in range(3):
            looks.clear()
            free.append(number)
            changed.set()
            await asyncio.sleep(0.001)
            assert [at for at, one in enumerate(asked) if one.done()] == list(range(number + 1))
            assert set(looks) == {number, number + 1}, "and the one that is first then"
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert not lanes.num_waiting

    run_virtual(story())


def test_a_prompt_that_waits_too_long_or_beside_too_many_is_refused() -> None:
    only = FakeReplica()
    features = _features(max_waiting=1, max_wait_seconds=0.2)
    lanes = features.lanes
    assert lanes is not None

    async def story(router: Router) -> None:
        only.gate = asyncio.Event()
        first = asyncio.ensure_future(router.post("/generate", LONG))
        await _until(lambda: _num_long(only) == 1)
        waiting = asyncio.ensure_future(router.post("/generate", LONG))
        await _until(lambda: lanes.num_waiting == 1)
        status, headers, body = await router.post("/generate", LONG)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "overloaded")
        assert "1 long prompts wait" in error["message"]
        assert b"retry-after" in headers
        status, _, body = await waiting
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        assert "found no place" in json.loads(body)["error"]["message"]
        only.gate.set()
        assert (await first)[0] == 200

    run([only], story, features, stall_s=5.0)


def test_a_model_that_no_replica_serves_is_not_waited_for() -> None:
    async def story(router: Router) -> None:
        status, _, _ = await router.post("/generate", {**LONG, "model": "other"})
        assert status == 404

    run([FakeReplica()], story, _features())


def test_the_limit_is_halved_when_short_prompts_are_late_and_recovers() -> None:
    lanes = Lanes(LanesTable(max_long_per_replica=8, ttft_ms=200))

    def window(num_late: int) -> int:
        for at in range(WINDOW):
            lanes.began_short(0.3 if at < num_late else 0.1)
        return lanes.limit

    assert [window(late) for late in (0, 2, 3, 40, 40, 40, 0, 0)] == [8, 8, 4, 2, 1, 1, 2, 3]
    fixed = Lanes(LanesTable(max_long_per_replica=8))
    for _ in range(4 * WINDOW):
        fixed.began_short(100.0)
    assert fixed.limit == 8


def test_the_first_tokens_of_short_streams_are_the_measure() -> None:
    only = FakeReplica()
    features = _features(ttft_ms=3_600_000, max_long_per_replica=4)
    lanes = features.lanes
    assert lanes is not None

    async def story(router: Router) -> None:
        lanes.limit = 1
        for _ in range(WINDOW):
            await router.post("/generate", SHORT)
        assert lanes.limit == 2
        text = router.metrics.text().decode()
        assert "quire_router_long_prompt_limit 2.0" in text
        assert "quire_router_long_prompts_waiting 0.0" in text

    run([only], story, features)

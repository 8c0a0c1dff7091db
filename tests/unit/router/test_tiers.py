"""Tiers: which requests wait, what replicas see of it, and how limits follow the targets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from bench.router.virtual_time import run_virtual
from quire.router.admission import Admission
from quire.router.faults import ClientGone
from quire.router.features import Features
from quire.router.route_file import TiersTable
from quire.router.routed_request import RoutedRequest
from quire.router.settings import RouterSettings
from quire.router.tiers import LIMITED, PRESETS, Tiers
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run

STREAM: dict[str, Any] = {"tokens": [1, 2], "seed": 5, "stream": True, "max_tokens": LENGTH}


def feed(tiers: Tiers, windows: int, *, ttft_s: float, tier: str = "default") -> None:
    for _ in range(windows * tiers._preset.window):
        tiers.ended(tier, ttft_s, 0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_limits_give_way_from_the_lowest_tier_on_and_come_back(preset: Any) -> None:
    tiers = Tiers(TiersTable(preset=preset, ttft_ms=100, max_default=40, max_flex=40))
    floors = {tier: int(PRESETS[preset].floors[tier] * 40) for tier in LIMITED}
    seen = []
    for _ in range(40):
        feed(tiers, 1, ttft_s=0.2)
        seen.append(dict(tiers.limits))
    assert tiers.limits == floors
    first_cut = next(at for at, one in enumerate(seen) if one["default"] < 40)
    assert seen[first_cut]["flex"] == floors["flex"], "the lower tier first"
    feed(tiers, 200, ttft_s=0.05)
    assert tiers.limits == {"default": 40, "flex": 40}


def test_presets_differ_in_what_they_protect() -> None:
    tables = [TiersTable(preset=name, ttft_ms=100, max_flex=40) for name in PRESETS]
    latency, throughput = map(Tiers, tables)
    for tiers in (latency, throughput):
        for at in range(320):  # one in ten is late
            tiers.ended("default", 0.2 if at % 10 == 0 else 0.05, 0.0)
    assert latency.limits["flex"] < 40
    assert throughput.limits["flex"] == 40


def test_slow_tokens_count_and_flex_streams_do_not() -> None:
    tiers = Tiers(TiersTable(tpot_ms=50, max_flex=40))
    for _ in range(40):
        tiers.ended("flex", 9.0, 9.0)
    assert tiers.limits["flex"] == 40
    for _ in range(20):
        tiers.ended("default", 9.0, 0.06)
    assert tiers.limits["flex"] == 20


def test_flex_waits_and_other_tiers_pass() -> None:
    replica = FakeReplica()

    async def story(router: Router) -> None:
        replica.gate = asyncio.Event()
        ask = [
            asyncio.ensure_future(router.post("/generate", {**STREAM, "service_tier": tier}))
            for tier in ("flex", "flex", "default", "priority", "flex")
        ]
        async with asyncio.timeout(10):
            while len(replica.requests) < 3:
                await asyncio.sleep(0.01)
        assert router.count("quire_router_flex_waiting") == 2
        assert router.count("quire_router_flex_open") == 1
        assert [one.get("priority") for one in replica.requests] == [1, None, -1]
        replica.gate.set()
        answers = await asyncio.gather(*ask)
        assert {status for status, _, _ in answers} == {200}
        assert len({body for _, _, body in answers}) == 1
        assert not any("service_tier" in one for one in replica.requests)
        assert router.count("quire_router_flex_waiting") == 0

    run([replica], story, Features(tiers=Tiers(TiersTable(max_flex=1))))


def test_a_place_wakes_only_the_request_that_gets_it() -> None:
    """In the order in which they came, however many wait; those that left are passed over."""
    num_waiting = 500
    tiers = Tiers(TiersTable(max_default=2, max_waiting=num_waiting))
    fleet = SimpleNamespace(num_available=1)
    tiers.follow(fleet)  # type: ignore[arg-type]
    looks, gone, entered = Counter[int](), set[int](), list[int]()

    async def request(number: int) -> None:
        def is_gone() -> bool:
            looks[number] += 1
            return number in gone

        with suppress(ClientGone):
            await tiers.enter("default", is_gone)
            entered.append(number)

    async def story() -> None:
        for _ in range(2):
            await tiers.enter("default", lambda: False)
        asked = [asyncio.ensure_future(request(number)) for number in range(num_waiting)]
        await asyncio.sleep(0.001)
        assert tiers.num_waiting("default") == num_waiting
        looks.clear()
        for count in range(1, 11):
            tiers.leave("default")
            await asyncio.sleep(0.001)
            assert entered == list(range(count))
        assert not looks
        gone.add(10)
        asked[11].cancel()
        await asyncio.sleep(0.3)
        fleet.num_available = 2  # and the limit is for each
        fleet.on_available()
        await asyncio.sleep(0.001)
        assert entered[10:] == [12, 13]
        tiers.leave("default")
        asked[14].cancel()  # it has its place, and does not know
        await asyncio.sleep(0.001)
        assert entered[12:] == [15]
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (tiers.num_open("default"), tiers.num_waiting("default")) == (4, 0)

    run_virtual(story())


def test_refusals_and_clients_that_leave() -> None:
    replica = FakeReplica()
    tiers = Tiers(TiersTable(max_flex=1, max_waiting=1, max_wait_seconds=0.3))

    async def story(router: Router) -> None:
        replica.gate = asyncio.Event()
        flex = {**STREAM, "service_tier": "flex"}
        first = asyncio.ensure_future(router.post("/generate", flex))
        async with asyncio.timeout(10):
            while not replica.requests:
                await asyncio.sleep(0.01)
        second = asyncio.ensure_future(router.post("/generate", flex))
        while not tiers.num_waiting("flex"):
            await asyncio.sleep(0)
        status, headers, body = await router.post("/generate", flex)
        assert status == 503
        assert b"retry-after" in headers
        assert "max-waiting" in json.loads(body)["error"]["message"]
        assert "no place for tier flex" in json.loads((await second)[2])["error"]["message"]
        status, _, body = await router.post("/generate", {**STREAM, "service_tier": "gold"})
        assert status == 400
        assert "auto, priority, default, flex" in json.loads(body)["error"]["message"]
        replica.gate.set()
        await first
        assert tiers.num_open("flex") == 0

    run([replica], story, Features(tiers=tiers))


def test_streams_teach_the_controller() -> None:
    replica = FakeReplica()
    tiers = Tiers(TiersTable(ttft_ms=1, max_flex=40))

    async def story(router: Router) -> None:
        for _ in range(PRESETS["latency-first"].window):
            replica.gate = asyncio.Event()
            asyncio.get_running_loop().call_later(0.01, replica.gate.set)
            assert (await router.post("/generate", STREAM))[0] == 200
        assert tiers.limits["flex"] == 20

    run([replica], story, Features(tiers=tiers))


def test_the_wait_for_a_place_does_not_keep_the_limit_low() -> None:
    replica = FakeReplica()
    tiers = Tiers(TiersTable(ttft_ms=15, max_default=4, max_flex=4))
    tiers.limits.update(default=1)

    async def story(router: Router) -> None:
        async def client() -> None:
            for _ in range(PRESETS["latency-first"].window):
                assert (await router.post("/generate", STREAM))[0] == 200

        async def compute() -> None:  # each first token takes up to 10 ms at the replica
            while True:
                replica.gate = asyncio.Event()
                await asyncio.sleep(0.01)
                replica.gate.set()

        computing = asyncio.ensure_future(compute())
        await asyncio.gather(*(client() for _ in range(3)))
        computing.cancel()
        assert tiers.limits["default"] > 1

    run([replica], story, Features(tiers=tiers))


def _admission() -> Admission:
    fleet = SimpleNamespace(settings=RouterSettings(), replicas={})
    return Admission(fleet)  # type: ignore[arg-type]


def _retry_after_s(admission: Admission, tokens: int) -> float:
    with admission.waiting(tokens):
        return admission.retry_after_s()


def test_the_rate_is_that_of_the_time_with_open_requests() -> None:
    admission, now_s = _admission(), 1000.0
    assert _retry_after_s(admission, 10**6) == 1.0, "no rate is known"
    for _ in range(3):
        key = admission.admit([], b"", now_s)
        for _ in range(4):  # 2 s at 100 tokens a second
            now_s += 0.5
            admission.drained(50, now_s)
            assert round(_retry_after_s(admission, 1000), 6) == 10.0
        admission.leave(key)
        now_s += 3600.0  # idle
    first, now_s = admission.admit([], b"", now_s), now_s + 20.0
    admission.drained(200, now_s)  # one answer in 20 s
    assert _retry_after_s(admission, 200) == 20.0, "what was before has faded"
    second = admission.admit([], b"", now_s + 1.0)
    admission.drained(10, now_s + 1.0)
    assert round(_retry_after_s(admission, 200), 6) == 20.0, "a second request changes no time"
    for key in (first, second):
        admission.leave(key)


def test_retry_after_is_the_time_of_open_and_waiting_tokens_at_the_rate_of_whole_answers() -> None:
    replica = FakeReplica()
    tiers = Tiers(TiersTable(max_default=1, max_waiting=1, max_wait_seconds=300))
    whole = {"tokens": [1] * 300, "max_tokens": 200}

    async def story(router: Router) -> None:
        replica.whole_gate = asyncio.Event()
        first = asyncio.ensure_future(router.post("/generate", whole))
        await asyncio.sleep(9.99)
        replica.whole_gate.set()
        assert (await first)[0] == 200  # 500 tokens in 10 s
        replica.whole_gate.clear()
        asked = [asyncio.ensure_future(router.post("/generate", whole)) for _ in range(2)]
        while not tiers.num_waiting("default"):
            await asyncio.sleep(0)
        status, headers, _ = await router.post("/generate", whole)
        assert status == 503
        assert int(headers[b"retry-after"]) in (20, 21), "1000 tokens at 50/s"
        replica.whole_gate.set()
        assert [(await one)[0] for one in asked] == [200, 200]
        assert router.admission.retry_after_s() == 1.0, "nothing is open or waits"

    run([replica], story, Features(tiers=tiers))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"tokens": [1] * 300, "max_tokens": 200}),
        ("/generate", {**STREAM, "prompt_logprobs": 1}),  # a stream without cursors
        ("/v1/embeddings", {"input": "a" * 4000}),
    ],
)
def test_answers_of_each_kind_count_for_the_rate(path: str, body: dict[str, Any]) -> None:
    tokens = RoutedRequest(path, [], json.dumps(body).encode()).expected_tokens

    async def story(router: Router) -> None:
        began_s = asyncio.get_running_loop().time()
        assert (await router.post(path, body))[0] == 200
        longest_s = asyncio.get_running_loop().time() - began_s
        num_answers = round(30 / longest_s)  # at the rate of this one at most 30 s
        assert 1.0 < _retry_after_s(router.admission, num_answers * tokens) <= 30.1
        assert _retry_after_s(router.admission, 10**9) == 60.0

    run([FakeReplica()], story)

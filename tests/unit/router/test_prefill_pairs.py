"""Prefill replicas before decode replicas: what each is sent, and what happens without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bench.router.virtual_time import run_virtual
from quire.base.errors import PoisonRequest
from quire.base.server_url import server_url
from quire.router.app import RouterApp
from quire.router.discovery import StaticList
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.prefill_pairs import PARAMS, PrefillPairs
from quire.router.prober import Prober
from quire.router.quotas import LocalBuckets, Quotas
from quire.router.replica import MAX_BEGINNING
from quire.router.route_file import QuotaTable
from quire.router.routed_request import RoutedRequest
from quire.routing.prefix_history import PrefixHistory
from quire.routing.ttft_model import MIN_SAMPLES
from quire.routing.warm_cache import WarmCache
from tests.cases import each_case
from tests.unit.base.test_http_apis import dialect_of
from tests.unit.router.fake_replica import TICK_S, FakeReplica, Router, response
from tests.unit.router.test_final_errors import BROKEN

OFFER = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 7001}
LONG = {"prompt": "word " * 800, "max_tokens": 40, "min_tokens": 3}


class PairRouter(Router):
    """A router over decode replicas, with prefill replicas."""

    def __init__(
        self, decode: list[FakeReplica], prefill: list[FakeReplica], features: Features
    ) -> None:
        super().__init__(decode, features)
        urls = tuple(server_url(one.url) for one in prefill)
        fleet = Fleet(self.fleet.settings, StaticList(urls), self.fleet.log)
        self.pairs = PrefillPairs(fleet, self.metrics, min_tokens=512)
        self.app = RouterApp(
            self.fleet,
            self.admission,
            self.metrics,
            self.fleet.log,
            features,
            hand_over=self.pairs.hand_over,
        )

    async def start(self) -> None:
        await super().start()
        await Prober(self.pairs.fleet).first_round()

    async def close(self) -> None:
        self.pairs.fleet.close()
        await super().close()


def run(
    decode: FakeReplica,
    prefill: FakeReplica,
    story: Callable[[PairRouter], Awaitable[Any]],
    *others: FakeReplica,
    features: Features | None = None,
) -> PairRouter:
    """Run a story; no request may be left open at either side. others: further decode replicas."""

    async def go() -> PairRouter:
        for replica in (decode, prefill, *others):
            await replica.start()
        router = PairRouter([decode, *others], [prefill], features or Features())
        try:
            await router.start()
            async with asyncio.timeout(20):
                await story(router)
            for fleet in (router.fleet, router.pairs.fleet):
                assert not any(one.loads for one in fleet.replicas.values())
            return router
        finally:
            await router.close()
            for one in (decode, prefill, *others):
                one.stop_listening(cuts=True)
            await asyncio.sleep(0.01)

    return run_virtual(go(), tick_s=TICK_S)


def handing(**answer: Any) -> FakeReplica:
    replica = FakeReplica()
    replica.body = json.dumps({"choices": [], PARAMS: OFFER, **answer}).encode()
    return replica


def outcomes(router: PairRouter) -> dict[str, float]:
    found = {}
    for line in router.metrics.text().decode().splitlines():
        if line.startswith("quire_router_prefills_total{"):
            found[line.split('"')[1]] = float(line.rpartition(" ")[2])
    return found


def test_a_long_prompt_goes_to_a_prefill_replica_first() -> None:
    decode, prefill = FakeReplica(), handing()
    body = {**LONG, "temperature": 0.5}
    router = run(decode, prefill, lambda router: router.post("/v1/completions", body))
    assert len(prefill.requests) == len(decode.requests) == 1
    first, second = prefill.requests[0], decode.requests[0]
    assert first[PARAMS] == {"do_remote_decode": True}
    assert (first["max_tokens"], first["prompt"], first["temperature"]) == (1, LONG["prompt"], 0.5)
    assert "min_tokens" not in first
    assert second == {**body, PARAMS: OFFER}
    assert outcomes(router) == {"handed_over": 1}


def test_a_stream_is_one_whole_token_at_the_prefill_replica() -> None:
    decode, prefill = FakeReplica(), handing()
    body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}

    async def story(router: PairRouter) -> None:
        status, _, raw = await router.post("/v1/completions", body)
        assert (status, raw.count(b"token")) == (200, 12)

    run(decode, prefill, story)
    assert not {"stream", "stream_options"} & prefill.requests[0].keys()
    assert decode.requests[0][PARAMS] == OFFER


def test_a_prefill_is_waited_for_no_longer_than_the_deadline() -> None:
    decode, prefill = FakeReplica(), handing()
    prefill.whole_gate = asyncio.Event()

    async def story(router: PairRouter) -> None:
        status, _, raw = await router.post("/v1/completions", {**LONG, "deadline_ms": 60})
        assert (status, json.loads(raw)["error"]["code"]) == (503, "deadline_missed")

    run(decode, prefill, story)
    assert not decode.requests


def test_a_stream_that_continues_elsewhere_fetches_nothing() -> None:
    decode, prefill = FakeReplica(), handing()
    decode.fails_after = 3

    async def story(router: PairRouter) -> None:
        def again(token: int) -> None:
            decode.fails_after = None

        decode.before_token = again
        await router.post("/v1/completions", {**LONG, "stream": True})

    run(decode, prefill, story)
    assert len(prefill.requests) == 1
    for later in decode.requests[1:]:
        assert later["output_ids"]
        assert PARAMS not in later


@each_case(
    "change",
    [
        {"prompt": "short"},
        {"prompt": ["a" * 4000, "b" * 4000]},
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"max_tokens": 0},
        {"prompt_logprobs": 1},
        {"output_ids": [5]},
        {PARAMS: {"do_remote_prefill": True}},
    ],
    ids=str,
)
def test_other_requests_go_to_the_decode_replica_as_they_are(change: dict[str, Any]) -> None:
    decode, prefill = FakeReplica(), handing()
    body = {**LONG, **change}
    router = run(decode, prefill, lambda router: router.post("/v1/completions", body))
    assert not prefill.requests
    assert decode.requests == [body]
    assert not outcomes(router)


def _refuses(replica: FakeReplica) -> None:
    replica.status = 400


def _says_nothing(replica: FakeReplica) -> None:
    replica.body = b'{"choices": []}'


def _is_no_json(replica: FakeReplica) -> None:
    replica.body = b"[" * 3000


def _lost_its_engine(replica: FakeReplica) -> None:
    replica.status, replica.body = 500, b'{"error":{"message":"it died","code":"worker_error"}}'


def _is_no_http(replica: FakeReplica) -> None:
    replica.raw_answer = b"SSH-2.0-OpenSSH\r\n"


@pytest.mark.parametrize(
    ("harm", "outcome"),
    [
        (_refuses, "refused"),
        (_says_nothing, "refused"),
        (_is_no_json, "refused"),
        (_is_no_http, "failed"),
        (_lost_its_engine, "failed"),
    ],
)
def test_a_prefill_replica_that_fails_is_done_without(
    harm: Callable[[FakeReplica], None], outcome: str
) -> None:
    decode, prefill = FakeReplica(), handing()
    harm(prefill)

    async def story(router: PairRouter) -> None:
        status, _, _ = await router.post("/v1/completions", LONG)
        assert status == 200

    router = run(decode, prefill, story)
    assert decode.requests == [LONG]
    assert outcomes(router) == {outcome: 1}


def test_without_an_available_prefill_replica_requests_are_decoded() -> None:
    decode, prefill = FakeReplica(), handing()
    prefill.health["ok"] = False
    prefill.health["state"] = "draining"
    router = run(decode, prefill, lambda router: router.post("/v1/completions", LONG))
    assert decode.requests == [LONG]
    assert outcomes(router) == {"no_replica": 1}


def test_a_client_that_leaves_ends_the_prefill() -> None:
    decode, prefill = FakeReplica(), handing()

    async def story(router: PairRouter) -> None:
        began = asyncio.Event()
        waits = asyncio.Event()
        exchange = prefill._exchange

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            if not began.is_set():
                began.set()
                await waits.wait()
            return await exchange(reader, writer)

        prefill._exchange = slow  # type: ignore[method-assign]
        task = asyncio.ensure_future(router.post("/v1/completions", LONG))
        await began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        waits.set()

    run(decode, prefill, story)
    assert not decode.requests


def test_the_time_of_a_prefill_is_learned_as_that_of_a_first_token() -> None:
    """A replica that fetches a prompt's blocks computes nothing of it, so it teaches nothing."""

    async def story(router: PairRouter) -> None:
        router.pairs.fleet.policy = WarmCache(PrefixHistory(1000), None)
        router.fleet.policy = WarmCache(PrefixHistory(1000), None)
        for number in range(MIN_SAMPLES):
            body = {**LONG, "prompt": f"{number} {LONG['prompt']}", "stream": True}
            assert (await router.post("/v1/completions", body))[0] == 200
        learned, nothing = (
            {one.name: one.value for one in fleet.policy.counts()}["new_token_seconds"]
            for fleet in (router.pairs.fleet, router.fleet)
        )
        assert learned > 0
        assert nothing == 0

    run(FakeReplica(), handing(), story)


def test_another_model_is_not_given_the_blocks() -> None:
    request = RoutedRequest("/v1/completions", [], json.dumps({**LONG, "model": "small"}).encode())
    request.transfer = OFFER
    request.use_model("small")
    assert request.brings_blocks
    request.use_model("large")
    assert not request.brings_blocks
    assert PARAMS not in json.loads(request.body())


def _dies(replica: FakeReplica) -> None:
    replica.answer = lambda method, path, fields: replica.stop_listening(cuts=True)


@pytest.mark.parametrize("harm", [_dies, _lost_its_engine])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prefill_replica_is_one_of_the_two_that_a_request_may_make_fail(
    harm: Callable[[FakeReplica], None], is_stream: bool
) -> None:
    decode, prefill, other = FakeReplica(), handing(), FakeReplica()
    for one in (decode, prefill, other):
        harm(one)

    async def story(router: PairRouter) -> None:
        status, headers, raw = await router.post("/v1/completions", {**LONG, "stream": is_stream})
        assert (status, json.loads(raw)["error"]["code"]) == (502, "replicas_failed")
        assert headers[b"x-should-retry"] == b"false"

    run(decode, prefill, story, other)
    assert len(prefill.requests) == 1
    assert len(decode.requests) + len(other.requests) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_request_that_ends_engines_of_a_prefill_replica_goes_no_further(path: str) -> None:
    decode, prefill = FakeReplica(), handing()
    prefill.raw_answer = response(PoisonRequest("two engines died"), dialect_of(path))

    async def story(router: PairRouter) -> None:
        status, headers, raw = await router.post(path, {**LONG, "messages": []})
        assert (status, headers[b"x-should-retry"]) == (500, b"false")
        assert headers[b"x-quire-error-code"] == b"poison_request"
        assert json.loads(raw)["error"]["message"] == "two engines died"
        _check_unharmed(router)

    assert outcomes(run(decode, prefill, story)) == {"refused": 1}
    assert not decode.requests


def _check_unharmed(router: PairRouter) -> None:
    (replica,) = router.pairs.fleet.replicas.values()
    assert replica.is_available(asyncio.get_running_loop().time())
    assert not any("prefill replica failed" in line for line in router.lines)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_other_final_errors_of_a_prefill_replica_are_refusals(path: str) -> None:
    """They are evidence neither against it nor against the request."""
    decode, prefill, other = FakeReplica(), handing(), FakeReplica()
    prefill.raw_answer = response(BROKEN, dialect_of(path))

    async def story(router: PairRouter) -> None:
        for _ in range(4):
            assert (await router.post(path, LONG))[0] == 200
            _check_unharmed(router)
        decode.answer = lambda method, path, fields: decode.stop_listening(cuts=True)
        for _ in range(2):
            assert (await router.post(path, LONG))[0] == 200, "its first failure"

    assert outcomes(run(decode, prefill, story, other)) == {"refused": 6}
    assert {PARAMS in one for one in decode.requests} == {False}


def test_a_prefill_replica_that_many_lose_is_not_one_of_their_two() -> None:
    """It is weak evidence against each. A decode replica fails with many as well, and all of them
    go on at the other one."""
    decode, prefill, other = FakeReplica(), handing(), FakeReplica()
    count = 2 * (MAX_BEGINNING + 2)

    async def story(router: PairRouter) -> None:
        prefill.whole_gate = asyncio.Event()
        decode.whole_gate = asyncio.Event()
        other.whole_gate = asyncio.Event()
        answers = [
            asyncio.ensure_future(router.post("/v1/completions", LONG)) for _ in range(count)
        ]
        await _until(lambda: len(prefill.requests) == count)
        prefill.stop_listening(cuts=True)
        await _until(lambda: len(decode.requests) + len(other.requests) == count)
        assert len(decode.requests) == count // 2
        decode.stop_listening(cuts=True)
        await _until(lambda: len(other.requests) == count)
        other.whole_gate.set()
        assert {status for status, _, _ in await asyncio.gather(*answers)} == {200}

    run(decode, prefill, story, other)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("model", "code"), [("box", "no_replica"), ("else", "model_not_found")])
def test_a_failure_of_a_prefill_replica_hides_no_other_reason(model: str, code: str) -> None:
    decode, prefill = FakeReplica("fp_a", "box"), handing()
    prefill.models = ("box", "else")
    _dies(prefill)
    if model == "box":
        decode.health |= {"ok": False, "state": "draining"}

    async def story(router: PairRouter) -> None:
        _, _, raw = await router.post("/v1/completions", {**LONG, "model": model})
        assert json.loads(raw)["error"]["code"] == code

    assert outcomes(run(decode, prefill, story)) == {"failed": 1}


def test_a_client_that_leaves_during_its_prefill_pays_its_prompt() -> None:
    decode, prefill = FakeReplica(), handing()
    quotas = Quotas(QuotaTable(tokens_per_minute=60_000), {}, LocalBuckets(lambda: 0.0))

    async def story(router: PairRouter) -> None:
        prefill.whole_gate = gate = asyncio.Event()
        prompt = [7] * 900
        await router.leave("/v1/completions", {"prompt": prompt, "max_tokens": 500}, 1.0)
        text = router.metrics.text().decode()
        assert 'quire_router_quota_tokens_total{kind="used"} 900.0' in text
        gate.set()

    run(decode, prefill, story, features=Features(quotas=quotas))
    assert not decode.requests

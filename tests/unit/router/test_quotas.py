"""Quotas in tokens: reserved, settled, refused with the time of the refill."""

from __future__ import annotations

import asyncio
import hashlib
import json
from random import Random
from typing import Any

import pytest

from quire.router.features import Features
from quire.router.quotas import LocalBuckets, Quota, Quotas, Reservation
from quire.router.route_file import QuotaTable, TenantTable
from quire.router.routed_request import RoutedRequest
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run
from tests.unit.router.test_heartbeats import HEARTBEAT, Heartbeating


class Clock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def _features(
    clock: Clock, per_minute: int | None, **tenants: tuple[int, tuple[str, ...]]
) -> Features:
    default = None if per_minute is None else QuotaTable(tokens_per_minute=per_minute)
    tables = {
        name: TenantTable(tokens_per_minute=rate, key_digests=tuple(map(_digest, keys)))
        for name, (rate, keys) in tenants.items()
    }
    return Features(quotas=Quotas(default, tables, LocalBuckets(clock)))


# ---- buckets


def test_a_bucket_equals_a_plain_model_of_it() -> None:
    clock, drawn = Clock(), Random(4)
    buckets, quota = LocalBuckets(clock), Quota("one", 10.0, 500)
    level = 500.0

    async def go() -> None:
        nonlocal level
        open_: list[Reservation] = []
        for _ in range(2000):
            passed_s = drawn.choice((0.0, 0.5, 3.0))
            clock.now_s += passed_s
            level = min(level + passed_s * 10.0, 500.0)
            if open_ and drawn.random() < 0.5:
                one = open_.pop(drawn.randrange(len(open_)))
                used = drawn.randint(0, 2 * one.tokens)
                await one.settle(used)
                level = min(level + one.tokens - used, 500.0)
                continue
            tokens = drawn.randint(1, 200)
            found = await buckets.reserve(quota, tokens)
            if level >= tokens:
                assert isinstance(found, Reservation)
                open_.append(found)
                level -= tokens
            else:
                assert found == pytest.approx((tokens - level) / 10.0)

    asyncio.run(go())


def test_buckets_of_many_keys_are_bounded() -> None:
    buckets = LocalBuckets(Clock())

    async def go() -> None:
        for at in range(100_100):
            await buckets.reserve(Quota(f"key {at}", 1.0, 10), 1)

    asyncio.run(go())
    assert len(buckets._levels) == 100_000


# ---- requests


def test_a_request_reserves_what_it_may_use_and_pays_what_it_used() -> None:
    clock, only = Clock(), FakeReplica()
    only.body = b'{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":60}}'

    async def story(router: Router) -> None:
        key = _bearer("a")
        body = {"prompt": [7] * 100, "max_tokens": 800}
        assert (await router.post("/v1/completions", body, headers=key))[0] == 200
        # 1000 less 100 that were used are as much as this may use.
        assert (await router.post("/v1/completions", body, headers=key))[0] == 200
        status, headers, raw = await router.post("/v1/completions", body, headers=key)
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["type"]) == (429, "quota_exceeded", "rate_limit_error")
        assert 6 <= int(headers[b"retry-after"]) <= 7, "100 of 900 are missing at 1000 a minute"
        assert "1000 a minute" in error["message"]
        assert (await router.post("/v1/completions", body, headers=_bearer("b")))[0] == 200
        clock.now_s += 6.01
        assert (await router.post("/v1/completions", body, headers=key))[0] == 200
        assert router.count("quire_router_quota_tokens_total") == 4 * 900 + 4 * 100

    run([only], story, _features(clock, 1000))
    assert len(only.requests) == 4


def test_streams_pay_their_prompt_and_what_was_delivered() -> None:
    clock, only = Clock(), FakeReplica()
    only.prompt_tokens = 30
    features = _features(clock, 6000)
    assert features.quotas is not None

    async def story(router: Router) -> None:
        fields = {"tokens": [1] * 30, "stream": True, "max_tokens": 500}
        await router.post("/generate", fields)
        assert _used(router) == 30 + LENGTH
        only.prompt_tokens = 41  # what the replica says counts
        await router.post("/generate", fields)
        assert _used(router) == 30 + 41 + 2 * LENGTH
        only.silent_after = 6
        await router.post("/generate", fields, leaves_after=60)
        charged = _used(router) - (30 + 41 + 2 * LENGTH)
        assert 41 < charged <= 41 + 6, "a client that leaves pays for what it got"

    run([only], story, features)


def _used(router: Router) -> float:
    wanted = 'quire_router_quota_tokens_total{kind="used"}'
    text = router.metrics.text().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(wanted))


UNCONTINUED = {"mirostat": 2}  # such streams are passed on as they are


@pytest.mark.parametrize(
    ("path", "fields", "tail"),
    [
        (
            "/v1/messages",
            {"messages": [], **UNCONTINUED},
            b'{"usage":{"input_tokens":40,"output_tokens":2}}',
        ),
        (
            "/api/chat",
            {"messages": [], "options": UNCONTINUED},
            b'{"done":true,"prompt_eval_count":40,"eval_count":2}',
        ),
        (
            "/completion",
            {"prompt": "a", **UNCONTINUED},
            b'{"tokens_predicted":2,"tokens_evaluated":40}',
        ),
    ],
)
def test_streams_of_other_dialects_pay_their_usage(
    path: str, fields: dict[str, Any], tail: bytes
) -> None:
    clock, only = Clock(), FakeReplica()
    only.fails_after, only.says = 3, b"data: %b\n\n" % tail

    async def story(router: Router) -> None:
        assert (await router.post(path, {**fields, "stream": True}))[0] == 200
        assert _used(router) == 42

    run([only], story, _features(clock, 6000))


def test_what_reports_no_usage_is_charged_by_its_events_or_its_limit() -> None:
    clock, only = Clock(), FakeReplica()

    async def story(router: Router) -> None:
        fields = {"prompt": [7] * 10, "n": 2, "max_tokens": 50, "mirostat": 2}  # not continuable
        await router.post("/v1/completions", {**fields, "stream": True})
        streamed = _used(router) - 10
        assert LENGTH <= streamed <= 2 * (LENGTH + 1)
        await router.post("/v1/completions", fields)
        assert _used(router) == 10 + streamed + 10 + 2 * 50

    run([only], story, _features(clock, 6000))


def test_several_answers_of_llama_cpps_form_are_charged_together() -> None:
    clock, only = Clock(), FakeReplica()
    one = b'{"tokens_predicted":20,"tokens_evaluated":5}'
    only.body = b"[%b,%b,%b]" % (one, one, one)

    async def story(router: Router) -> None:
        fields = {"prompt": [1, 2], "n_cmpl": 3, "n_predict": 400}
        assert (await router.post("/completion", fields))[0] == 429, "1,200 tokens"
        assert (await router.post("/completion", {**fields, "n_predict": 300}))[0] == 200
        assert _used(router) == 3 * 25
        only.fails_after, only.says = 3, b"data: %b\n\n" % one
        several = {"prompt": ["a", "b"], "n_predict": 8, "stream": True}
        before = _used(router)
        assert (await router.post("/completion", several))[0] == 200
        assert _used(router) - before != 25, "not the counts of the last answer alone"

    run([only], story, _features(clock, 1000))


def test_refused_requests_and_free_routes_pay_nothing() -> None:
    clock, only = Clock(), FakeReplica()
    only.status, only.body = 401, b'{"error":{"message":"no key","code":"invalid_api_key"}}'

    async def story(router: Router) -> None:
        body = {"prompt": "a", "max_tokens": 900}
        for _ in range(20):
            assert (await router.post("/v1/completions", body))[0] == 401
        only.status = 200
        for _ in range(200):
            assert (await router.post("/tokenize", {"prompt": "a" * 900}))[0] == 200
        assert (await router.post("/v1/completions", body))[0] == 200

    run([only], story, _features(clock, 1000))


def test_keys_of_a_tenant_share_its_quota_and_others_may_have_none() -> None:
    clock, only = Clock(), FakeReplica()
    only.body = b'{"usage":{"prompt_tokens":0,"completion_tokens":500}}'

    async def story(router: Router) -> None:
        body = {"prompt": [1], "max_tokens": 499}
        for key, status in (("a", 200), ("b", 200), ("a", 429), ("other", 200), ("other", 200)):
            got = await router.post("/v1/completions", body, headers=_bearer(key))
            assert got[0] == status, key
        got = await router.post("/v1/completions", body, headers=[(b"x-api-key", b"b")])
        assert got[0] == 429, "the same key in the other header"
        for _ in range(3):
            assert (await router.post("/v1/completions", body))[0] == 200, "no key, no limit"

    run([only], story, _features(clock, None, acme=(1000, ("a", "b"))))


def test_a_request_beyond_the_burst_says_so_and_is_not_to_be_sent_again() -> None:
    clock, only = Clock(), FakeReplica()

    async def story(router: Router) -> None:
        for fields in ({"max_tokens": 5000}, {"max_tokens": 400, "n": 4}):
            status, headers, body = await router.post("/v1/completions", {"prompt": [1], **fields})
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (429, "quota_exceeded")
            asked = 1 + fields["max_tokens"] * fields.get("n", 1)
            assert f"may use {asked} tokens" in error["message"]
            assert "holds 1000 at most (1000 a minute)" in error["message"]
            assert "lower max_tokens, send fewer prompts" in error["message"]
            assert b"retry-after" not in headers
            assert headers[b"x-should-retry"] == b"false"
        large = {"prompt": [1], "max_tokens": 900}
        only.body = b'{"usage":{"prompt_tokens":1,"completion_tokens":900}}'
        assert (await router.post("/v1/completions", large))[0] == 200
        status, headers, _ = await router.post("/v1/completions", large)
        assert status == 429
        assert b"x-should-retry" not in headers, "it passes once the bucket is full again"

    run([only], story, _features(clock, 1000))
    assert len(only.requests) == 1


@pytest.mark.parametrize(
    ("path", "fields", "num_answers"),
    [
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/completions", {"prompt": [[1, 2], [3], [4]]}, 3),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 1, "best_of": 3}, 6),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1),
        ("/v1/completions", {"prompt": "abc"}, 1),
        ("/v1/completions", {"prompt": []}, 1),
        ("/completion", {"prompt": ["a", [1, "b"]], "n_cmpl": 2}, 4),
        ("/completion", {"prompt": [1, "a", "b"]}, 1),
        ("/generate", {"tokens": [1, 2, 3]}, 1),
    ],
)
def test_each_answer_to_each_prompt_is_reserved(
    path: str, fields: dict[str, Any], num_answers: int
) -> None:
    request = RoutedRequest(path, [], json.dumps({**fields, "max_tokens": 400}).encode())
    assert request.reserved_tokens == request.prompt_tokens + 400 * num_answers


def test_a_thousand_prompts_do_not_pass_as_one() -> None:
    clock, only = Clock(), FakeReplica()
    only.body = b'{"usage":{"prompt_tokens":1000,"completion_tokens":1024000}}'

    async def story(router: Router) -> None:
        fields = {"prompt": ["a"] * 1000, "max_tokens": 4096}
        assert (await router.post("/v1/completions", fields))[0] == 429
        fields["max_tokens"] = 64
        assert (await router.post("/v1/completions", fields))[0] == 200

    run([only], story, _features(clock, 100_000))
    assert len(only.requests) == 1


# ---- clients that leave


def test_a_whole_answer_that_is_left_pays_what_the_fastest_would_have_had() -> None:
    clock, only = Clock(), FakeReplica()
    only.whole_gate = gate = asyncio.Event()
    path, fields = "/v1/completions", {"prompt": [7] * 10, "max_tokens": 500}

    async def story(router: Router) -> None:
        charged = 0.0

        def charge() -> float:
            nonlocal charged
            before, charged = charged, _used(router)
            return charged - before

        await router.leave(path, fields, 0.5)
        assert charge() == 10 + 500, "its limit, while no rate is known"
        for num_tokens, taken_s in ((90, 3.0), (100, 1.0), (80, 2.0), (5, 0.01)):
            usage = {"prompt_tokens": 10, "completion_tokens": num_tokens}
            only.body = json.dumps({"usage": usage}).encode()
            gate.clear()
            asyncio.get_running_loop().call_later(taken_s, gate.set)
            assert (await router.post(path, fields))[0] == 200
            assert charge() == 10 + num_tokens
        gate.clear()
        await router.leave(path, fields, 2.0)
        assert charge() == pytest.approx(10 + 200, abs=10), "100 tokens a second"
        await router.leave(path, {**fields, "n": 2}, 2.0)
        assert charge() == pytest.approx(10 + 2 * 200, abs=20)
        await router.leave(path, fields, 20.0)
        assert charge() == 10 + 500, "no more than its limit"
        await router.leave("/v1/embeddings", {"input": [7] * 10}, 2.0)
        assert charge() < 20, "no output"
        router.discovery.urls = ()
        router.fleet.follow()
        await router.leave(path, fields, 2.0)
        assert charge() == 0, "no replica had it"

    run([only], story, _features(clock, 60_000), within_s=100.0, wait_s=50.0)


def test_a_stream_that_is_left_before_its_first_token_pays_its_prompt() -> None:
    clock, only = Clock(), FakeReplica()
    only.gate = asyncio.Event()

    async def story(router: Router) -> None:
        await router.leave("/generate", {"tokens": [1] * 30, "stream": True}, 1.0)
        assert _used(router) == 30

    run([only], story, _features(clock, 60_000))


@pytest.mark.parametrize("is_full", [False, True])
def test_a_request_that_no_replica_took_pays_nothing_where_its_client_leaves(
    is_full: bool,
) -> None:
    """It was sent to no replica, or refused by all, and waits for one."""
    clock, gone, full = Clock(), FakeReplica(), FakeReplica()
    full.status, full.body = 503, b'{"error":{"message":"full","code":"overloaded"}}'
    replicas = [gone, full] if is_full else [gone]

    async def story(router: Router) -> None:
        for one in router.fleet.replicas.values():
            router.fleet.pool(one).close()  # it is sent on a new connection, which is not made
        gone.stop_listening(cuts=True)
        await router.leave("/v1/completions", {"prompt": [7] * 10, "max_tokens": 500}, 1.0)
        assert _used(router) == 0

    run(replicas, story, _features(clock, 60_000))
    assert bool(full.requests) == is_full


def test_heartbeats_of_a_stream_that_is_left_are_no_tokens() -> None:
    """Of one that cannot be continued, each event counts as a token while no usage is known."""
    clock, only = Clock(), Heartbeating()
    only.gate = asyncio.Event()
    fields = {"tokens": [1] * 30, "stream": True, "prompt_logprobs": 0}

    async def story(router: Router) -> None:
        beats = 0

        def left(piece: bytes) -> None:
            nonlocal beats
            beats += piece.count(HEARTBEAT)

        await router.post("/generate", fields, leaves_after=5 * len(HEARTBEAT), on_piece=left)
        assert beats >= 5
        assert _used(router) == 30

    run([only], story, _features(clock, 60_000))


def test_tokens_that_are_taken_as_the_router_stops_are_given_back() -> None:
    clock, only, took, gate = Clock(), FakeReplica(), asyncio.Event(), asyncio.Event()

    class Slow(LocalBuckets):
        async def reserve(self, quota: Quota, tokens: int) -> Reservation | float:
            found = await super().reserve(quota, tokens)
            took.set()
            await gate.wait()
            return found

    buckets = Slow(clock)
    quotas = Quotas(QuotaTable(tokens_per_minute=1000), {}, buckets)

    async def story(router: Router) -> None:
        body = {"prompt": [1], "max_tokens": 900}
        asking = asyncio.ensure_future(router.post("/v1/completions", body))
        await took.wait()
        router.app.cut.set_result(None)
        await asyncio.sleep(0.01)
        gate.set()
        status, _, answer = await asking
        assert (status, b"shutting_down" in answer) == (503, True)
        quota = quotas.quota_of(b"")
        assert quota is not None
        assert buckets._level(quota) == 1000

    run([only], story, Features(quotas=quotas))
    assert not only.requests

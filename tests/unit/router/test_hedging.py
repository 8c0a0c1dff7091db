"""Hedging: a late first token is computed by a second replica, within a budget, and once delivered.

Lateness is an event of the test: `wait` of the hedger returns when the test says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from quire.router.features import Features
from quire.router.first_token_times import MIN_SAMPLES, FirstTokenTimes
from quire.router.hedging import HedgeBudget, Hedger
from quire.router.replica import Replica
from quire.router.routed_request import RoutedRequest
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run
from tests.unit.router.made_replicas import made_replicas

STREAM: dict[str, Any] = {"tokens": [1, 2], "seed": 5, "stream": True, "max_tokens": LENGTH}
ANSWER = (
    b"".join(b'data: {"token": %d}\n\n' % token for token in range(100, 100 + LENGTH))
    + b"data: [DONE]\n\n"
)


class Late:
    """A hedger for which the usual time has passed once the test says so."""

    def __init__(self, share: float = 0.5, *, whole_answers: bool = False) -> None:
        self.has_passed = asyncio.Event()
        self.asked_s: list[float] = []
        self.hedger = Hedger(share, 95.0, self._wait, whole_answers=whole_answers)
        self.features = Features(hedger=self.hedger)

    async def _wait(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        await self.has_passed.wait()


def _learn(router: Router, seconds: float = 0.5) -> None:
    for replica in router.fleet.replicas.values():
        for _ in range(MIN_SAMPLES):
            replica.first_token_times.note(2, seconds)


def _fill(late: Late, tokens: float = 1000.0) -> None:
    late.hedger.budget._free_tokens = tokens


def stream(router: Router, **fields: Any) -> Awaitable[tuple[int, dict[bytes, bytes], bytes]]:
    return router.post("/generate", {**STREAM, **fields})


def _noted(router: Router) -> list[str]:
    """Return the names of replicas that the policy learns the first tokens of, from now on."""
    names = list[str]()
    policy: Any = router.fleet.policy
    policy.note_first_token = lambda replica, *times: names.append(replica.name)
    return names


def _count(router: Router, outcome: str) -> float:
    text = router.metrics.text().decode()
    wanted = f'quire_router_hedges_total{{outcome="{outcome}"}}'
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(wanted))


def test_a_late_first_token_is_hedged_and_the_loser_is_cancelled() -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late()

    async def story(router: Router) -> None:
        first.gate = asyncio.Event()  # never set: the first has no first token
        _learn(router, 0.25)
        _fill(late)
        noted = _noted(router)
        answering = asyncio.ensure_future(stream(router))
        await first.began.wait()
        assert not second.requests
        late.has_passed.set()
        assert (await answering)[2] == ANSWER
        assert noted == [first.url, second.url], "a slow one that always loses is known to be slow"
        assert late.asked_s == [0.25]
        assert _count(router, "won") == 1
        assert router.count("quire_router_hedged_tokens_total") == 2
        assert router.count("quire_router_replica_faults_total") == 0
        while first.num_left == 0:  # its connection was closed, so it stops computing
            await asyncio.sleep(0)
        slow = next(iter(router.fleet.replicas.values()))
        assert slow.is_available(asyncio.get_running_loop().time()), "slow is not failed"

    run([first, second], story, late.features)
    assert first.requests == second.requests, "the same body, seed included"


def test_the_first_replica_may_still_win() -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late()

    async def story(router: Router) -> None:
        first.gate, second.gate = asyncio.Event(), asyncio.Event()
        _learn(router)
        _fill(late)
        late.has_passed.set()
        noted = _noted(router)
        answering = asyncio.ensure_future(stream(router))
        await second.began.wait()
        first.gate.set()
        assert (await answering)[2] == ANSWER
        assert noted == [first.url], "the other one was not waited for"
        assert _count(router, "lost") == 1
        assert router.count("quire_router_streamed_tokens_total") == LENGTH
        second.gate.set()

    run([first, second], story, late.features)


def test_a_stream_in_time_is_not_hedged() -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late()

    async def story(router: Router) -> None:
        _learn(router)
        _fill(late)
        for _ in range(4):
            assert (await stream(router))[2] == ANSWER
        assert len(late.asked_s) == 4
        assert router.count("quire_router_hedges_total") == 0

    run([first, second], story, late.features)
    assert len(first.requests) + len(second.requests) == 4


def test_nothing_is_hedged_before_the_replica_is_known() -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late()
    late.has_passed.set()

    async def story(router: Router) -> None:
        _fill(late)
        for _ in range(2 * MIN_SAMPLES):
            await stream(router)
        assert not late.asked_s
        for replica in router.fleet.replicas.values():
            assert replica.first_token_times.predicted_s(2, 95.0) is not None
            assert replica.first_token_times.predicted_s(900, 95.0) is None

    run([first, second], story, late.features)


def test_hedges_stay_within_their_share_of_the_prompt_tokens() -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late(share=0.03)
    late.has_passed.set()

    async def story(router: Router) -> None:
        _learn(router)
        for _ in range(200):
            first.gate, second.gate = asyncio.Event(), asyncio.Event()
            first.began.clear()
            second.began.clear()
            before = len(late.asked_s)
            answering = asyncio.ensure_future(stream(router))
            while len(late.asked_s) < before + 2:  # the budget is always low
                await asyncio.sleep(0)
            first.gate.set()
            second.gate.set()
            assert (await answering)[2] == ANSWER
        base = router.count("quire_router_hedge_base_tokens_total")
        hedged = router.count("quire_router_hedged_tokens_total")
        assert base == 400
        assert hedged == 12, "3 percent, and no more"
        assert _count(router, "no_budget") == 200 - 6

    run([first, second], story, late.features)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_replica_that_fails_during_the_race_loses_it(is_first: bool) -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late()
    late.has_passed.set()
    failing, other = (first, second) if is_first else (second, first)

    async def story(router: Router) -> None:
        first.gate, second.gate = asyncio.Event(), asyncio.Event()
        failing.fails_after = 0
        _learn(router)
        _fill(late)
        answering = asyncio.ensure_future(stream(router))
        await first.began.wait()
        await second.began.wait()
        assert failing.gate is not None
        assert other.gate is not None
        failing.gate.set()
        while router.count("quire_router_replica_faults_total") == 0:
            await asyncio.sleep(0)
        other.gate.set()
        assert (await answering)[2] == ANSWER
        assert router.count("quire_router_replica_faults_total") == 1

    run([first, second], story, late.features)


def test_two_failures_of_a_race_try_no_third_replica() -> None:
    replicas = [FakeReplica() for _ in range(3)]
    late = Late()
    late.has_passed.set()

    async def story(router: Router) -> None:
        gate = asyncio.Event()
        for replica in replicas:
            replica.gate, replica.fails_after = gate, 0
        _learn(router)
        _fill(late)
        answering = asyncio.ensure_future(stream(router))
        await replicas[0].began.wait()
        await replicas[1].began.wait()
        gate.set()
        status, _, body = await answering
        assert (status, json.loads(body)["error"]["code"]) == (502, "replicas_failed")
        assert _count(router, "failed") == 1

    run(replicas, story, late.features)
    assert not replicas[2].requests


def test_a_full_second_replica_leaves_the_first_one_alone() -> None:
    first, second = FakeReplica(), FakeReplica()
    second.status, second.body = 503, b'{"error":{"message":"full","code":"overloaded"}}'
    late = Late()
    late.has_passed.set()

    async def story(router: Router) -> None:
        first.gate = asyncio.Event()
        _learn(router)
        _fill(late)
        answering = asyncio.ensure_future(stream(router))
        while not second.requests:
            await asyncio.sleep(0)
        first.gate.set()
        assert (await answering)[2] == ANSWER

    run([first, second], story, late.features)


def test_a_hedge_that_has_won_is_resumed_like_any_stream() -> None:
    replicas = [FakeReplica() for _ in range(3)]
    late = Late()
    late.has_passed.set()

    async def story(router: Router) -> None:
        replicas[0].gate = asyncio.Event()
        replicas[1].fails_after = 4
        _learn(router)
        _fill(late)
        assert (await stream(router))[2] == ANSWER
        assert router.count("quire_router_resumed_streams_total") == 1
        replicas[0].gate.set()

    run(replicas, story, late.features)


def test_a_client_that_leaves_during_a_race_ends_both() -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late()
    late.has_passed.set()

    async def story(router: Router) -> None:
        first.gate, second.gate = asyncio.Event(), asyncio.Event()
        _learn(router)
        _fill(late)
        answering = asyncio.ensure_future(stream(router))
        await first.began.wait()
        await second.began.wait()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        while first.num_left == 0 or second.num_left == 0:
            await asyncio.sleep(0)

    run([first, second], story, late.features)


def test_replicas_of_other_fingerprints_get_no_hedge() -> None:
    first, second = FakeReplica("fp_a"), FakeReplica("fp_b")
    late = Late()
    late.has_passed.set()

    async def story(router: Router) -> None:
        first.gate, second.gate = asyncio.Event(), asyncio.Event()
        _learn(router)
        _fill(late)
        answering = asyncio.ensure_future(stream(router))
        while _count(router, "no_replica") == 0:
            await asyncio.sleep(0)
        first.gate.set()
        second.gate.set()
        assert (await answering)[2] == ANSWER

    run([first, second], story, late.features)
    assert len(first.requests) + len(second.requests) == 1


# ---- the parts


def test_the_prediction_is_a_percentile_of_prompts_of_such_a_length() -> None:
    times = FirstTokenTimes()
    for at in range(100):
        times.note(600, at / 100)
        times.note(10, 9.0)
    assert times.predicted_s(900, 95.0) == 0.95
    assert times.predicted_s(1030, 95.0) is None
    for _ in range(300):
        times.note(600, 7.0)
    assert times.predicted_s(600, 50.0) == 7.0, "old times are forgotten"


def test_the_last_of_the_budget_is_kept_for_requests_that_are_much_later() -> None:
    request = RoutedRequest("/generate", [], json.dumps(STREAM).encode())
    hedger, cost = Hedger(0.5, 95.0), 2
    assert hedger.is_low(request)
    hedger.budget.requested(2 * 17 * cost)
    low = []
    while hedger.budget.has(cost):
        low.append(hedger.is_low(request))
        hedger.budget.take(cost)
    assert low == [*[False] * 2, *[True] * 15]


def test_a_whole_budget_is_not_low_for_a_long_prompt() -> None:
    fields = {**STREAM, "tokens": [1] * 30_000}
    request = RoutedRequest("/generate", [], json.dumps(fields).encode())
    hedger = Hedger(0.5, 95.0)
    for num in (10**5, 10**9):
        hedger.budget.requested(num)
        assert hedger.is_low(request) == (num == 10**5)
    cost = hedger.cost_tokens(request)
    num_hedges = 0
    while hedger.budget.take(cost):
        num_hedges += 1
    assert num_hedges == 262_144 // cost, "what is saved up is bounded"


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_low_budget_waits_as_long_once_more(is_answered: bool) -> None:
    """It is asked when the usual time has passed: others have taken hedges meanwhile."""
    first, second = FakeReplica(), FakeReplica()
    late = Late()

    async def story(router: Router) -> None:
        first.gate = asyncio.Event()
        _learn(router, 0.25)
        _fill(late)
        answering = asyncio.ensure_future(stream(router))
        await first.began.wait()
        _fill(late, 2.0)
        late.has_passed.set()
        await asyncio.sleep(0)
        late.has_passed.clear()
        while len(late.asked_s) < 2:
            await asyncio.sleep(0)
        assert not second.requests
        (first.gate if is_answered else late.has_passed).set()
        assert (await answering)[2] == ANSWER
        assert late.asked_s == [0.25, 0.25]
        assert _count(router, "won") == (not is_answered)
        first.gate.set()

    run([first, second], story, late.features)
    assert len(second.requests) == (not is_answered)


def test_a_replica_that_is_always_slow_is_late_by_the_median_of_others() -> None:
    slow, *others = made_replicas(5)
    request = RoutedRequest("/generate", [], json.dumps(STREAM).encode())
    hedger = Hedger(0.5, 95.0)
    assert hedger.delay_s(slow, request, others) is None, "nothing is known of it"

    def learn(replica: Replica, seconds: float) -> None:
        for _ in range(MIN_SAMPLES):
            replica.first_token_times.note(2, seconds)

    learn(slow, 4.0)
    assert hedger.delay_s(slow, request, others) == 4.0, "nor of the others"
    for replica, seconds in zip(others, (9.0, 0.2, 0.1, 0.3), strict=True):
        learn(replica, seconds)
    assert hedger.delay_s(slow, request, others) == 0.2
    assert hedger.delay_s(others[2], request, [slow, *others[:2], others[3]]) == 0.1


def test_what_computes_nothing_adds_nothing_to_the_budget() -> None:
    late = Late()

    async def story(router: Router) -> None:
        await router.post("/tokenize", {"prompt": "a" * 4000})
        assert router.count("quire_router_hedge_base_tokens_total") == 0
        assert not late.hedger.budget.has(1)
        await router.post("/v1/embeddings", {"input": "a" * 4000})
        assert router.count("quire_router_hedge_base_tokens_total") >= 1000

    run([FakeReplica()], story, late.features)


def test_the_budget_never_exceeds_its_share() -> None:
    budget, used, asked = HedgeBudget(0.03), 0, 0
    for at in range(5000):
        tokens = 1 + at * 37 % 900
        asked += tokens
        budget.requested(tokens)
        if budget.take(tokens):
            used += tokens
        assert used <= 0.03 * asked + 1e-6
    assert used > 0.025 * asked


WHOLE: dict[str, Any] = {"tokens": [1, 2], "seed": 5, "max_tokens": 60}


def _learn_whole(router: Router, answer_tokens: int) -> None:
    for replica in router.fleet.replicas.values():
        for _ in range(MIN_SAMPLES):
            replica.first_token_times.note(2, 0.5, answer_tokens)


@pytest.mark.parametrize("whole_answers", [True, False])
def test_late_whole_answers_are_hedged_where_that_is_set(whole_answers: bool) -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late(whole_answers=whole_answers)

    async def story(router: Router) -> None:
        first.whole_gate = asyncio.Event()
        _learn_whole(router, 60)
        _fill(late)
        noted = _noted(router)
        late.has_passed.set()
        answering = asyncio.ensure_future(router.post("/generate", WHOLE))
        await first.began.wait()
        if not whole_answers:
            await asyncio.sleep(0.05)
            assert not second.requests
            first.whole_gate.set()
        status, _, body = await answering
        assert (status, body) == (200, second.body)
        assert not noted, "a whole answer has no first token"
        assert _count(router, "won") == int(whole_answers)
        tokens = 62 if whole_answers else 0
        assert router.count("quire_router_hedged_tokens_total") == tokens
        assert router.count("quire_router_replica_faults_total") == 0
        first.whole_gate.set()

    run([first, second], story, late.features)
    assert len(second.requests) == int(whole_answers)


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/responses", {"input": "a", "model": "box"}), ("/v1/embeddings", {"input": "a"})],
)
def test_what_leaves_something_behind_or_computes_no_answer_is_not_hedged(
    path: str, fields: dict[str, Any]
) -> None:
    first, second = FakeReplica(), FakeReplica()
    late = Late(whole_answers=True)

    async def story(router: Router) -> None:
        first.whole_gate = asyncio.Event()
        _fill(late, 1e6)
        late.has_passed.set()
        answering = asyncio.ensure_future(router.post(path, fields))
        await first.began.wait()
        await asyncio.sleep(0.05)
        first.whole_gate.set()
        assert (await answering)[0] == 200

    run([first, second], story, late.features)
    assert not second.requests


def test_whole_answers_are_predicted_by_their_own_class() -> None:
    times = FirstTokenTimes()
    for _ in range(MIN_SAMPLES):
        times.note(100, 0.1)
        times.note(100, 2.0, 256)
    assert times.predicted_s(100, 95.0) == 0.1
    assert times.predicted_s(100, 95.0, 300) == 2.0
    assert times.predicted_s(100, 95.0, 100) is None

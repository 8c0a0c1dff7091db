"""What counts as queued at a replica: whole answers, and streams that are divided by their work."""

from __future__ import annotations

import asyncio

from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router.fleet import Fleet
from quire.router.replica import MAX_OVERTAKEN_TOKENS, Load, Replica
from quire.router.settings import RouterSettings
from quire.routing.policy import RouteKey
from tests.unit.router.fake_replica import FakeReplica, Listed, Router, run
from tests.unit.router.made_replicas import key_of, made_replicas
from tests.unit.router.test_failover import _until, stream


def _made(began_s: float, tokens: int, *, is_whole: bool) -> Load:
    return Load(
        tokens=tokens + 50,
        cut=lambda reason: None,
        began_s=began_s,
        last_s=lambda: 0.0,
        is_paused=lambda: False,
        is_whole=is_whole,
        prompt_tokens=tokens,
        new_tokens=tokens,
    )


def _load(replica: Replica, began_s: float, tokens: int, *, is_whole: bool = True) -> Load:
    load = _made(began_s, tokens, is_whole=is_whole)
    replica.begin(load)
    return load


def test_whole_answers_leave_the_queue_when_a_later_request_has_output() -> None:
    [replica] = made_replicas(1)
    loads = [_load(replica, at, tokens) for at, tokens in ((1.0, 100), (2.0, 200), (4.0, 400))]
    long = _load(replica, 2.5, MAX_OVERTAKEN_TOKENS + 1)
    later = _load(replica, 3.0, 300, is_whole=False)
    replica.gave_output(later)
    assert replica.queued_tokens == 400 + MAX_OVERTAKEN_TOKENS + 1, "a long one may be overtaken"
    replica.reduce(later, 300)  # as with each delta
    assert replica.expected_tokens == 5 * 50
    replica.gave_answer(loads[2])
    assert replica.queued_tokens == MAX_OVERTAKEN_TOKENS + 1
    for load in (*loads, long, later):
        replica.end(load)
    assert (replica.queued_tokens, replica.prompt_tokens, replica.backlog_tokens) == (0, 0, 0)
    assert not replica._whole
    assert replica.computed_tokens == 4 * 50 + 100 + 200 + 400 + 300 + MAX_OVERTAKEN_TOKENS + 1


def test_whole_answers_that_fail_leave_nothing_behind() -> None:
    [replica] = made_replicas(1)
    for _ in range(3):
        replica.end(_load(replica, 1.0, 10))
    assert not replica._whole


def test_an_open_whole_answer_is_no_queue_for_the_next_prompts() -> None:
    replica = FakeReplica()
    replica.whole_gate = asyncio.Event()

    async def story(router: Router) -> None:
        body = {"tokens": list(range(100)), "seed": 1}
        whole = [asyncio.ensure_future(router.post("/generate", body)) for _ in range(3)]
        [one] = router.fleet.replicas.values()
        await _until(lambda: one.queued_tokens == 300)
        await stream(router)
        assert one.queued_tokens == 0
        assert len(one.loads) == 3
        assert replica.whole_gate is not None
        replica.whole_gate.set()
        assert [status for status, _, _ in await asyncio.gather(*whole)] == [200] * 3

    run([replica], story)


def test_streams_that_continue_go_where_their_prompt_is_cached_as_far_as_that_pays() -> None:
    """By counts of tokens to compute. Of 30 prompts of 1,024 tokens each of two replicas has some,
    and each stream has 200 tokens of output, which no replica has."""

    async def place(policy: str, *, both: bool) -> tuple[list[int], int]:
        urls = tuple(server_url(f"http://10.0.0.{at}:1") for at in (1, 2))
        fleet = Fleet(RouterSettings(policy=policy), Listed(urls), Log("test"))
        replicas = list(fleet.replicas.values())
        keys = []
        for one in replicas:
            one.state, one.is_fenced, one.models = "ready", False, {"box": "fp"}
        for at in range(30):
            blocks = key_of(f"{at} " * 2048).blocks[:16]
            keys.append(RouteKey(blocks=blocks, tokens=1280, prompt_tokens=1024))
            fleet.policy.sent(replicas[at // 3 % 2 if both else 0], keys[-1])
        num_sent, computed = [0, 0], 0
        for key in keys:
            found = fleet.choose(key, "box", fingerprint="fp", spreads=True)
            assert found is not None
            load = _made(began_s=1.0, tokens=1224, is_whole=False)
            fleet.weigh(found, key, load)
            found.begin(load)
            fleet.policy.sent(found, key)
            computed += load.new_tokens
            num_sent[found.number] += 1
        return num_sent, computed

    assert asyncio.run(place("least-tokens", both=True)) == ([15, 15], 30 * 1224)
    num_sent, computed = asyncio.run(place("warm-cache", both=True))
    assert num_sent == [15, 15]
    assert computed < 30 * 300, "nearly all find their prompt"
    num_sent, computed = asyncio.run(place("warm-cache", both=False))
    assert 15 < num_sent[0] < 29, "the only warm one gets more, and not all"
    assert computed < 30 * 1224 / 2

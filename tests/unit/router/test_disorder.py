"""Everything at once: hedges, lanes, quotas and aliases while replicas fail at random.

Each stream is whole or ends with an error; no byte is lost or repeated; nothing stays open, and the
quota has been charged for what was used only.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

import pytest

from quire.router.features import Features
from quire.router.first_token_times import MIN_SAMPLES
from quire.router.hedging import Hedger
from quire.router.lanes import Lanes
from quire.router.model_names import ModelNames
from quire.router.quotas import LocalBuckets, Quotas
from quire.router.route_file import LanesTable, ModelTable, QuotaTable, Target
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run

EVENTS = [b'data: {"token": %d}' % token for token in range(100, 100 + LENGTH)]
FULL = b'{"error":{"message":"full","code":"overloaded"}}'
PER_MINUTE = 10**9


@pytest.mark.parametrize("seed", range(3))
def test_streams_are_whole_or_end_with_an_error(seed: int) -> None:
    drawn = Random(seed)
    replicas = [FakeReplica("fp_a", "box", "one") for _ in range(4)]
    buckets = LocalBuckets(lambda: 0.0)
    features = Features(
        names=ModelNames({"chat": ModelTable(targets=(Target(model="box"), Target(model="one")))}),
        hedger=Hedger(0.5, 95.0, lambda seconds: asyncio.sleep(drawn.choice((0.0, 0.001)))),
        lanes=Lanes(LanesTable(long_prompt_tokens=50, max_long_per_replica=1, ttft_ms=1)),
        quotas=Quotas(QuotaTable(tokens_per_minute=PER_MINUTE), {}, buckets),
    )
    outcomes: Counter[str] = Counter()

    async def disturb() -> None:
        while True:
            one = drawn.choice(replicas)
            one.fails_after = drawn.choice((*[None] * 8, 0, 3, 7, 11))
            one.status = drawn.choice((*[200] * 7, 503))
            one.body = FULL
            one.gate = drawn.choice((None, None, asyncio.Event()))
            await asyncio.sleep(0.002)
            if one.gate is not None:
                one.gate.set()

    async def client(router: Router, at: int) -> None:
        fields: dict[str, Any] = {"model": drawn.choice(("chat", "box")), "stream": True}
        fields |= {"tokens": [1] * drawn.choice((5, 60)), "seed": at, "max_tokens": LENGTH}
        leaves = drawn.choice((None, None, None, 40))
        status, _, body = await router.post("/generate", fields, leaves_after=leaves)
        if status != 200:
            assert json.loads(body)["error"]["code"] in ("overloaded", "no_replica") or (
                json.loads(body)["error"]["code"] in ("replicas_failed", "replica_failed")
            )
            outcomes["refused"] += 1
            return
        *events, last = [one for one in body.split(b"\n\n") if one]
        if last == b"data: [DONE]":
            assert events == EVENTS
            outcomes["whole"] += 1
        elif leaves is not None:
            assert [*events, last] == EVENTS[: len(events) + 1]
            outcomes["left"] += 1
        else:
            assert events == EVENTS[: len(events)]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
            outcomes["broken"] += 1

    async def story(router: Router) -> None:
        for replica in router.fleet.replicas.values():
            for _ in range(MIN_SAMPLES):
                replica.first_token_times.note(5, 0.01)
                replica.first_token_times.note(60, 0.01)
        disturbing = asyncio.ensure_future(disturb())
        for at in range(0, 240, 40):
            await asyncio.gather(*(client(router, number) for number in range(at, at + 40)))
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        assert outcomes["whole"] > 20, outcomes
        assert router.count("quire_router_resumed_streams_total") > 0
        hedged = router.count("quire_router_hedged_tokens_total")
        assert 0 < hedged <= 0.5 * router.count("quire_router_hedge_base_tokens_total")
        (level, _), *others = buckets._levels.values()
        assert not others
        text = router.metrics.text().decode()
        wanted = 'quire_router_quota_tokens_total{kind="used"}'
        used = next(line.split()[1] for line in text.splitlines() if line.startswith(wanted))
        assert level == PER_MINUTE - float(used)

    run(replicas, story, features, resume_s=1.0, stall_s=2.0)

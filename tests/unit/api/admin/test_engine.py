"""GET /v1/engine: its form, its access, and that only a request for it computes anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from quire.base.engine_stats import EngineStats
from quire.config.tenants import Tenant, key_digest
from tests.unit.api.fake_engine import FakeEngine, Site

PATH = "/v1/engine"


def run(story: Callable[[], Awaitable[Any]]) -> Any:
    async def told() -> Any:
        return await story()

    return asyncio.run(told())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_snapshot_is_told_as_it_is() -> None:
    async def story() -> Any:
        reply = await Site().get(PATH)
        assert reply.headers["cache-control"] == "no-store"
        return reply.json

    told = run(story)
    assert told["object"] == "engine"
    assert (told["running_total"], told["slots_total"]) == (1, 8)
    assert told["running"][0]["request"] == 3
    assert told["running"][0]["computed_tokens"] == 23
    assert told["blocks"]["run_lengths"] == [2, 7]
    assert told["blocks"]["run_owners"] == [1, 0]
    assert [owner["use"] for owner in told["blocks"]["owners"]] == ["free", "running"]
    assert told["tiers"][0]["tier"] == "disk"
    assert told["blocks"]["bytes_each"] == 2048
    assert told["limits"]["max_num_batched_tokens"] == 64
    assert told["step_prices"]["steps_timed"] == 40
    assert told["step_prices"]["fixed_ms"] == 2.0


def test_only_admins_get_it() -> None:
    tenants = [
        Tenant(name="plain", key_digests=(key_digest("sk-plain"),)),
        Tenant(name="boss", key_digests=(key_digest("sk-boss"),), is_admin=True),
    ]

    async def story() -> None:
        site = Site(tenants=tenants)
        assert (await site.get(PATH)).status == 401
        refused = await site.get(PATH, headers=bearer("sk-plain"))
        assert (refused.status, refused.error["code"]) == (403, "not_admin")
        assert site.engine.num_snapshots == 0
        assert (await site.get(PATH, headers=bearer("sk-boss"))).status == 200
        elsewhere = await Site().get(PATH, client=("192.0.2.1", 5))
        assert elsewhere.status == 403
        assert site.engine.num_snapshots == 1

    run(story)


def test_requests_and_metrics_ask_the_engine_for_no_snapshot() -> None:
    async def story() -> int:
        site = Site()
        await site.post("/v1/completions", {"prompt": "a"})
        await site.get("/metrics")
        await site.get("/")
        return site.engine.num_snapshots

    assert run(story) == 0


def test_it_takes_no_parameters_and_is_answered_while_draining_and_not_while_loading() -> None:
    async def story() -> None:
        site = Site()
        assert (await site.get(PATH, query=b"n=1")).error["code"] == "invalid_value"
        site.server_state.lifecycle.refuse_new()
        assert (await site.get(PATH)).status == 200
        site = Site()
        site.server_state._engine = None
        assert (await site.get(PATH)).error["code"] == "overloaded"

    run(story)


def test_metrics_show_the_counters_that_came_before_requests_are_accepted() -> None:
    async def story() -> float:
        engine = FakeEngine()
        engine.stats = EngineStats(blocks_total=6)
        return Site(engine).metric("quire_kv_blocks")

    assert run(story) == 6

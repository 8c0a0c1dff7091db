"""The cache routes, and the cached tokens that a response reports; without an engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quire.base.cache_usage import CacheUsage, Miss, MissReason, OwnerUsage, PrefixUsage
from quire.config.tenants import ONLY_TENANT, Tenant, key_digest
from tests.unit.api.fake_engine import Reply, Site

COMPLETIONS = "/v1/completions"
FLUSHES = ("/v1/cache/flush", "/reset_prefix_cache", "/flush_cache")
DIFFERS = CacheUsage(
    pool_tokens=16,
    host_tokens=8,
    disk_tokens=32,
    miss=Miss(reason=MissReason.FIRST_DIFFERENCE, token=53),
)


def run(story: Any) -> Any:
    async def cache_details() -> Any:
        return await story()

    return asyncio.run(cache_details())


def cache_details(body: dict[str, Any], *, use: CacheUsage | None = DIFFERS, **site: Any) -> Any:
    """Return usage.prompt_tokens_details of a completion with the key k1, where keys are
    required.
    """

    async def story() -> Reply:
        place = Site(**site)
        place.engine.cache_use = use
        headers = {"Authorization": "Bearer k1"}
        return await place.post(COMPLETIONS, {"prompt": "a", **body}, headers=headers)

    reply = run(story)
    assert reply.status == 200, reply.body
    details = reply.json["usage"]["prompt_tokens_details"]
    assert details.pop("cache_write_tokens") == 0
    return details


def test_cache_details_have_tokens_by_tier_and_the_miss_reason() -> None:
    assert cache_details({"return_cached_tokens_details": True}) == {
        "cached_tokens": 2,
        "cached_tokens_details": {
            "pool": 16,
            "host": 8,
            "disk": 32,
            "misses": [{"reason": "first_difference", "token": 53}],
        },
    }


def test_each_prompt_has_its_own_miss_and_tokens_are_summed() -> None:
    found = replace(DIFFERS, miss=None)
    told_of = cache_details({"prompt": ["a", "b"], "return_cached_tokens_details": True}, use=found)
    details = told_of["cached_tokens_details"]
    assert details == {"pool": 32, "host": 16, "disk": 64, "misses": [None, None]}


def test_without_a_report_of_the_engine_there_are_no_details() -> None:
    assert cache_details({}, use=None) == {"cached_tokens": 2}


def test_the_field_reaches_the_engine_and_must_be_a_boolean() -> None:
    async def story() -> tuple[Site, Reply]:
        site = Site()
        await site.post(COMPLETIONS, {"prompt": "a", "return_cached_tokens_details": True})
        await site.post(COMPLETIONS, {"prompt": "a", "return_cached_tokens_details": None})
        return site, await site.post(
            COMPLETIONS, {"prompt": "a", "return_cached_tokens_details": "yes"}
        )

    site, refused = run(story)
    asked = [each.terms.return_cached_tokens_details for each in site.engine.asked]
    assert asked == [True, False]
    assert refused.status == 400
    assert refused.error["param"] == "return_cached_tokens_details"


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [
        ({}, True),
        ({"api_key": ("k1",)}, True),
        ({"api_key": ("k1", "k2")}, True),
        ({"api_key": ("k1", "k2"), "share_prefixes": True}, False),
        ({"insecure": True}, False),
        (
            {
                "api_key": ("k1",),
                "tenants": (ONLY_TENANT, Tenant(name="a", key_digests=("ab",))),
                "share_prefixes": True,
            },
            False,
        ),
    ],
    ids=["one person", "one key", "two keys", "two keys share", "open to all", "a tenant shares"],
)
def test_with_shared_prefixes_a_miss_reveals_no_more_than_timing(
    settings: Any, is_exact: bool
) -> None:
    exact = {"reason": "first_difference", "token": 53}
    coarse = {"reason": "not_found", "token": 48}
    asked = {"return_cached_tokens_details": True}
    misses = cache_details(asked, **settings)["cached_tokens_details"]["misses"]
    assert misses == [exact if is_exact else coarse]
    misses = cache_details({**asked, "cache_salt": "ours"}, **settings)["cached_tokens_details"][
        "misses"
    ]
    assert misses == [exact]


def test_a_tenant_with_an_isolated_cache_gets_details() -> None:
    mine = Tenant(name="mine", key_digests=(key_digest("k1"),), isolate_cache=True)
    settings: Any = {"api_key": ("root", "k2"), "tenants": (ONLY_TENANT, mine)}
    details = cache_details({"return_cached_tokens_details": True}, **settings)[
        "cached_tokens_details"
    ]
    assert details["misses"] == [{"reason": "first_difference", "token": 53}]


def test_the_report_has_sizes_states_and_rates_and_no_text() -> None:
    async def story() -> tuple[Site, Reply, Reply]:
        site = Site()
        empty = await site.get("/v1/cache")
        prefix = PrefixUsage(
            digest="ab" * 16, tokens=32, hits=3, tenant="t", salt="", protected=True
        )
        site.engine.cache = replace(
            site.engine.cache,
            queried_tokens_total=200,
            hit_tokens_total=150,
            host_hit_tokens_total=20,
            disk_hit_tokens_total=30,
            prefixes=(prefix,),
            owners=(OwnerUsage(tenant="t", salt="", blocks=5),),
        )
        return site, empty, await site.call("GET", "/v1/cache", b"", query=b"prefixes=3")

    site, empty, full = run(story)
    assert empty.status == 200
    assert empty.json["tokens"]["hit_rate"] == {
        "all": None,
        "pool": None,
        "host": None,
        "disk": None,
    }
    assert empty.json["blocks"] == {
        "total": 9,
        "used": 2,
        "free_used_once": 3,
        "free_used_again": 1,
        "free_used_again_most": 7,
        "free_pinned": 0,
        "free_plain": 3,
        "findable": 5,
    }
    assert full.json["tokens"] == {
        "queried_total": 200,
        "found_total": {"pool": 100, "host": 20, "disk": 30},
        "hit_rate": {"all": 0.75, "pool": 0.5, "host": 0.1, "disk": 0.15},
    }
    assert full.json["prefixes"][0]["hits"] == 3
    assert full.json["owners"] == [{"tenant": "t", "salt": "", "blocks": 5}]
    assert site.engine.num_prefixes_asked == [20, 3]
    assert full.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("query", [b"prefixes=-1", b"prefixes=1001", b"prefixes=x", b"top=3"])
def test_unknown_parameters_of_the_report_are_rejected(query: bytes) -> None:
    async def story() -> Reply:
        return await Site().call("GET", "/v1/cache", b"", query=query)

    reply = run(story)
    assert (reply.status, reply.error["param"]) == (400, query.split(b"=")[0].decode())


@pytest.mark.parametrize("path", FLUSHES)
def test_a_flush_has_three_paths_no_body_and_reports_its_count(path: str) -> None:
    async def story() -> tuple[Site, list[Reply]]:
        site = Site()
        replies = [await site.post(path, b""), await site.post(path, {})]
        replies.append(await site.post(path, {"reset_running_requests": True}))
        replies.append(await site.call("POST", path, b"", query=b"reset_external=true"))
        replies.append(await site.get(path))
        return site, replies

    site, replies = run(story)
    assert [reply.status for reply in replies] == [200, 200, 400, 400, 405]
    assert replies[0].json == {"flushed_blocks": 5}
    assert site.engine.num_flushes == 2


@pytest.mark.parametrize("path", ["/v1/cache", *FLUSHES])
def test_only_admins_may_read_and_flush(path: str) -> None:
    async def story(key: str) -> tuple[int, int]:
        guest = Tenant(name="guest", key_digests=(key_digest("g"),))
        site = Site(tenants=(ONLY_TENANT, guest), api_key=("root",))
        headers = {"Authorization": f"Bearer {key}"}
        method = "GET" if path == "/v1/cache" else "POST"
        reply = await site.call(method, path, b"", headers=headers)
        return reply.status, site.engine.num_flushes + len(site.engine.num_prefixes_asked)

    assert run(lambda: story("root")) == (200, 1)
    assert run(lambda: story("g")) == (403, 0)
    assert run(lambda: story("nobody")) == (401, 0)

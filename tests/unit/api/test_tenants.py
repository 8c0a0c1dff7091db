"""Tenants in the API: identified by keys, bounded priorities, isolated prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.api.admin.reload import reload_tenants
from quire.base.errors import SettingError
from quire.base.scheduling_params import SchedulingParams
from quire.config.tenants import ONLY_TENANT, Tenant, key_digest
from tests.cases import each_case
from tests.unit.api.fake_engine import Reply, Site

SEARCH = Tenant(name="search", key_digests=(key_digest("s1"), key_digest("s2")), priority_min=-5)
BATCH = Tenant(
    name="batch",
    key_digests=(key_digest("b"),),
    priority=7,
    priority_min=3,
    priority_max=9,
    isolate_cache=True,
)
OPERATOR = Tenant(name="operator", key_digests=(key_digest("o"),), is_admin=True)
TENANTS = (ONLY_TENANT, SEARCH, BATCH, OPERATOR)
PATH = "/v1/completions"


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def asked(as_key: str, **fields: Any) -> tuple[Reply, Site]:
    """Send a completion with a key."""

    async def exchange() -> tuple[Reply, Site]:
        site = Site(tenants=TENANTS, api_key=("root",))
        body = {"prompt": "a", **fields}
        return await site.post(PATH, body, headers=key(as_key)), site

    return asyncio.run(exchange())


@pytest.mark.parametrize(
    ("as_key", "terms"),
    [
        ("s1", SchedulingParams(tenant="search")),
        ("s2", SchedulingParams(tenant="search")),
        ("b", SchedulingParams(tenant="batch", priority=7)),
        ("root", SchedulingParams()),
    ],
)
def test_a_key_identifies_its_tenant(as_key: str, terms: SchedulingParams) -> None:
    reply, site = asked(as_key)
    assert reply.status == 200
    assert site.engine.asked[0].terms == terms


def test_the_log_names_the_tenant() -> None:
    _, site = asked("s1")
    assert "tenant=search" in site.log.getvalue()


@pytest.mark.parametrize("as_key", ["", "s", "search", "s1 s2"])
def test_an_unknown_key_is_rejected(as_key: str) -> None:
    reply, site = asked(as_key)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert site.engine.asked == []


def test_objectives_reach_the_engine_as_requested() -> None:
    reply, site = asked("s1", priority=-5, deadline_ms=900, ttft_slo_ms=100.5, tpot_slo_ms=20)
    assert reply.status == 200
    assert site.engine.asked[0].terms == SchedulingParams(
        tenant="search", priority=-5, deadline_ms=900.0, ttft_slo_ms=100.5, tpot_slo_ms=20.0
    )


@each_case("name", ["deadline_ms", "ttft_slo_ms", "tpot_slo_ms"])
@each_case("value", [0, -1, 1e11, True, "5", float("inf")])
def test_an_absurd_time_is_rejected_before_anything_runs(name: str, value: Any) -> None:
    reply, site = asked("s1", **{name: value})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert "above 0 to 31536000000" in reply.error["message"]
    assert site.engine.asked == []


@pytest.mark.parametrize(("as_key", "priority"), [("s1", -6), ("b", 2), ("b", 10)])
def test_a_priority_beyond_the_tenants_bounds_is_rejected_with_them(
    as_key: str, priority: int
) -> None:
    reply, _ = asked(as_key, priority=priority)
    assert (reply.status, reply.error["param"]) == (400, "priority")
    tenant = SEARCH if as_key == "s1" else BATCH
    said = f"tenant {tenant.name} may ask for {tenant.priority_min} to {tenant.priority_max}"
    assert said in reply.error["message"]


def test_null_selects_the_tenants_default_priority() -> None:
    _, site = asked("b", priority=None, deadline_ms=None)
    assert site.engine.asked[0].terms == SchedulingParams(tenant="batch", priority=7)


def test_an_isolated_tenants_salt_cannot_be_sent_by_others() -> None:
    _, mine = asked("b", cache_salt="x")
    _, bare = asked("b")
    salts = {mine.engine.asked[0].cache_salt, bare.engine.asked[0].cache_salt}
    assert len(salts) == 2
    assert all("batch" in salt for salt in salts)
    for salt in salts:
        reply, _ = asked("s1", cache_salt=salt)
        assert (reply.status, reply.error["param"]) == (400, "cache_salt")
    _, other = asked("s1", cache_salt="x")
    assert other.engine.asked[0].cache_salt not in {"x", *salts}


@pytest.mark.parametrize(
    ("as_key", "status"), [("s1", 403), ("b", 403), ("o", 200), ("root", 200), ("no", 401)]
)
def test_routes_that_show_all_tenants_are_for_admins(as_key: str, status: int) -> None:
    async def exchange() -> Reply:
        site = Site(tenants=TENANTS, api_key=("root",))
        return await site.get("/metrics", headers=key(as_key))

    reply = asyncio.run(exchange())
    assert reply.status == status
    if status == 403:
        assert reply.error["code"] == "not_admin"


def test_every_tenant_may_see_the_model() -> None:
    async def exchange() -> Reply:
        return await Site(tenants=TENANTS).get("/v1/models", headers=key("s1"))

    assert asyncio.run(exchange()).status == 200


def test_with_tenants_a_page_without_a_key_is_rejected() -> None:
    async def exchange() -> Reply:
        return await Site(tenants=TENANTS).post(PATH, {"prompt": "a"})

    assert asyncio.run(exchange()).status == 401


def after_reading_again(read: Any) -> tuple[list[int], str]:
    """Return statuses of an old and a new key of `batch` after its file was reloaded, and
    the log.
    """

    async def exchange() -> tuple[list[int], str]:
        site = Site(tenants=TENANTS, api_key=("root",))
        await reload_tenants(site.server_state, read)
        body = {"prompt": "a", "priority": 4}
        replies = [await site.post(PATH, body, headers=key(name)) for name in ("b", "new")]
        return [reply.status for reply in replies], site.log.getvalue()

    return asyncio.run(exchange())


def test_a_reloaded_file_changes_keys_from_the_next_request_on() -> None:
    tenants = (ONLY_TENANT, SEARCH, replace(BATCH, key_digests=(key_digest("new"),)), OPERATOR)
    statuses, log = after_reading_again(lambda: tenants)
    assert statuses == [401, 200]
    assert "reloaded" in log
    assert key_digest("new") not in log


def test_an_invalid_file_or_changed_limits_are_not_applied() -> None:
    def is_wrong() -> Sequence[Tenant]:
        raise SettingError("the tenants file t.toml: it is not TOML")

    bounded = replace(BATCH, key_digests=(key_digest("new"),), max_running=2)
    for read, reason in (
        (is_wrong, "it is not TOML"),
        (lambda: (ONLY_TENANT, SEARCH, bounded, OPERATOR), "max_running of tenant batch"),
        (lambda: (ONLY_TENANT, SEARCH, BATCH), "tenant operator is removed"),
    ):
        statuses, log = after_reading_again(read)
        assert statuses == [200, 401]
        assert reason in log
        assert "is not used" in log

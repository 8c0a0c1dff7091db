"""GET /v1/requests/{id}/timeline: access, retention, and what it may reveal of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.api import server_state
from quire.base.timeline import TimelineReport
from quire.config.tenants import Tenant, key_digest
from tests.unit.api.fake_engine import Site
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup

COMPLETIONS = "/v1/completions"
TENANTS = (
    Tenant(name="one", key_digests=(key_digest("sk-one"),)),
    Tenant(name="two", key_digests=(key_digest("sk-two"),)),
    Tenant(name="boss", key_digests=(key_digest("sk-boss"),), is_admin=True),
)


@pytest.fixture(scope="module")
def report() -> TimelineReport:
    """Return the timeline of a request beside another's prompt, with a miss to explain."""
    harness = Harness(Setup())
    harness.add(make_request("known", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=2))
    harness.drain()
    harness.add(make_request("asked", [1, 2, 3, 4, 9, 9, 9, 9, 9], max_tokens=8))
    harness.step()
    harness.add(make_request("other", [7] * 10, max_tokens=2))
    harness.drain()
    return harness.timelines(["asked"])[0]


def run(story: Callable[[], Awaitable[Any]]) -> Any:
    async def told() -> Any:
        return await story()

    return asyncio.run(told())


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


async def answered(site: Site, key: str, name: str = "") -> str:
    """Send a request; return the id of its answer."""
    headers = bearer(key, **({"x-request-id": name} if name else {}))
    reply = await site.post(COMPLETIONS, {"prompt": "a"}, headers=headers)
    return str(reply.json["id"])


async def read(site: Site, key: str, id_: str) -> Any:
    return await site.get(f"/v1/requests/{id_}/timeline", headers=bearer(key))


def test_a_timeline_is_read_with_the_key_of_its_request_by_id_and_by_name(
    report: TimelineReport,
) -> None:
    async def story() -> None:
        site = Site(tenants=TENANTS)
        site.engine.reports = (report,)
        id_ = await answered(site, "sk-one", "mine")
        for asked in (id_, "mine"):
            reply = await read(site, "sk-one", asked)
            assert (reply.status, reply.json["id"]) == (200, id_)
            assert reply.headers["cache-control"] == "no-store"
            assert len(reply.json["streams"][0]["gaps"]) == 7
        assert site.engine.timelines_asked == [id_, id_]

    run(story)


def test_another_key_finds_nothing_and_an_admin_key_finds_all(report: TimelineReport) -> None:
    async def story() -> None:
        site = Site(tenants=TENANTS)
        site.engine.reports = (report,)
        id_ = await answered(site, "sk-one", "mine")
        for asked in (id_, "mine"):
            refused = await read(site, "sk-two", asked)
            assert (refused.status, refused.error["code"]) == (404, "unknown_request")
            assert (await read(site, "sk-boss", asked)).json["id"] == id_
        # The same name of two senders: each has its own.
        other = await answered(site, "sk-two", "mine")
        assert (await read(site, "sk-two", "mine")).json["id"] == other
        assert (await read(site, "sk-one", "mine")).json["id"] == id_

    run(story)


def test_with_several_users_others_are_not_counted_and_misses_not_explained(
    report: TimelineReport,
) -> None:
    async def story() -> None:
        site = Site(tenants=TENANTS)
        site.engine.reports = (report,)
        id_ = await answered(site, "sk-one")
        told = (await read(site, "sk-one", id_)).json["streams"][0]
        assert {gap["other_prefill_tokens"] for gap in told["gaps"]} == {None}
        assert told["cache"]["first_miss"]["reason"] == "not_found"
        shown = (await read(site, "sk-boss", id_)).json["streams"][0]
        assert max(gap["other_prefill_tokens"] for gap in shown["gaps"]) == 10
        assert shown["cache"]["first_miss"]["reason"] == "first_difference"
        alone = Site()
        alone.engine.reports = (report,)
        id_ = (await alone.post(COMPLETIONS, {"prompt": "a"})).json["id"]
        told = (await alone.get(f"/v1/requests/{id_}/timeline")).json["streams"][0]
        assert told["cache"]["first_miss"]["reason"] == "first_difference"

    run(story)


def test_a_missing_timeline_says_how_long_they_are_kept_and_what_changes_that() -> None:
    async def story() -> None:
        site = Site()
        reply = await site.get("/v1/requests/nobodys/timeline")
        assert reply.status == 404
        for said in ("512 steps", "1.5 minutes", "8,192 requests", "--timeline-steps"):
            assert said in reply.error["message"]
        site.engine.kept_ms = 2900.0  # nothing was computed for long: no time is said
        idle = (await site.get("/v1/requests/nobodys/timeline")).error["message"]
        assert (
            "the last 512 steps or the last 8,192 requests; check the id and the key (--api-k"
            in idle
        )
        id_ = (await site.post(COMPLETIONS, {"prompt": "a"})).json["id"]  # the engine has none
        assert (await site.get(f"/v1/requests/{id_}/timeline")).status == 404
        site.engine.kept_steps = 0
        off = await site.get("/v1/requests/nobodys/timeline")
        assert "--timeline-steps 0" in off.error["message"]
        refused = await site.get("/v1/requests/nobodys/timeline", query=b"full=1")
        assert refused.error["code"] == "invalid_value"

    run(story)


def test_a_timeline_is_found_after_the_request_itself_is_forgotten(
    report: TimelineReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "ENDED_S", 0.0)
    monkeypatch.setattr(server_state, "MAX_HISTORIES", 2)

    async def story() -> None:
        site = Site()
        site.engine.reports = (report,)
        ids = [(await site.post(COMPLETIONS, {"prompt": "a"})).json["id"] for _ in range(4)]
        assert (await site.get(f"/v1/requests/{ids[-1]}")).status == 404
        found = [(await site.get(f"/v1/requests/{id_}/timeline")).status for id_ in ids]
        assert found == [404, 404, 200, 200]

    run(story)

"""/v1/messages/batches with a scripted engine: results, cancels, pages, keys, restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from quire.api.batches import message_batches, stored_batches, worker
from tests.unit.api.batches.test_batches import BATCHES, FILES, on_site
from tests.unit.api.fake_engine import FakeEngine, Reply, Site

PATH, MESSAGES = "/v1/messages/batches", "/v1/messages"


def params(text: str = "hi", **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    return {"model": "fake", "max_tokens": 4, "seed": 1, "messages": said, **more}


def request(custom_id: str, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": params(custom_id, **more)}


async def created(site: Site, *requests: Any, **options: Any) -> str:
    reply = await site.post(PATH, {"requests": list(requests)}, **options)
    assert reply.status == 200, reply.body
    assert reply.json["processing_status"] == "in_progress"
    assert reply.json["request_counts"]["processing"] == len(requests)
    assert reply.json["results_url"] is None
    return str(reply.json["id"])


async def ended(site: Site, id_: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := (await site.get(f"{PATH}/{id_}")).json)["processing_status"] != "ended":
            await asyncio.sleep(0.01)
    return batch


async def results(site: Site, id_: str) -> list[Any]:
    reply = await site.get(f"{PATH}/{id_}/results")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/x-jsonl")
    return [json.loads(line) for line in reply.body.splitlines()]


def refusal(reply: Reply) -> tuple[int, str]:
    assert reply.json["type"] == "error"
    return reply.status, reply.json["error"]["type"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "batches"


def test_results_are_messages_in_the_order_of_the_requests(store: Path) -> None:
    async def use(site: Site) -> None:
        wrong, streams = request("b", max_tokens=-1), request("c", stream=True)
        id_ = await created(site, request("a"), wrong, streams, request("d"))
        batch = await ended(site, id_)
        counts = batch["request_counts"]
        assert counts == {
            "processing": 0,
            "succeeded": 2,
            "errored": 2,
            "canceled": 0,
            "expired": 0,
        }
        assert batch["results_url"] == f"{PATH}/{id_}/results"
        assert batch["ended_at"] >= batch["created_at"]
        found = await results(site, id_)
        assert [line["custom_id"] for line in found] == ["a", "b", "c", "d"]
        alone = (await site.post(MESSAGES, params("a"))).json
        message = found[0]["result"]["message"]
        assert message["usage"].pop("service_tier") == "batch"
        assert alone["usage"].pop("service_tier") == "standard"
        assert {**message, "id": ""} == {**alone, "id": ""}
        assert found[1]["result"]["type"] == found[2]["result"]["type"] == "errored"
        error = found[1]["result"]["error"]
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        # Neither the batch nor its lines are OpenAI's.
        assert (await site.get(BATCHES)).json["data"] == []
        assert (await site.get(FILES)).json["data"] == []
        assert (await site.get(f"{BATCHES}/{id_}")).status == 404
        assert (await site.post(f"{BATCHES}/{id_}/cancel", {})).status == 404

    on_site(store, use)


def test_a_cancelled_batch_has_a_result_for_each_request(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []

    def save(database: Any, *values: Any) -> None:
        stored_batches.save_result(database, *values)
        saved.append(values)

    monkeypatch.setattr(worker, "save_result", save)

    async def use(site: Site) -> None:
        held, num_seen = asyncio.Event(), 0

        async def pause() -> None:
            nonlocal num_seen
            num_seen += 1
            if num_seen > 1:
                await held.wait()

        site.engine.pause = pause
        id_ = await created(site, *(request(f"r{at}") for at in range(5)))
        async with asyncio.timeout(60):
            while num_seen < 2 or not saved:
                await asyncio.sleep(0.01)
        assert refusal(await site.get(f"{PATH}/{id_}/results"))[0] == 400
        assert refusal(await site.call("DELETE", f"{PATH}/{id_}", b""))[0] == 400
        cancelled = (await site.post(f"{PATH}/{id_}/cancel", {})).json
        assert cancelled["processing_status"] == "canceling"
        assert cancelled["cancel_initiated_at"] is not None
        batch = await ended(site, id_)
        kinds = [line["result"]["type"] for line in await results(site, id_)]
        assert sorted(kinds) == [*["canceled"] * 4, "succeeded"]  # whichever line was first
        assert batch["request_counts"]["canceled"] == 4
        again = await site.post(f"{PATH}/{id_}/cancel", {})
        assert again.json == batch

    on_site(store, use, batch_lines=2)


def test_a_deleted_batch_leaves_nothing(store: Path) -> None:
    async def use(site: Site) -> None:
        id_ = await created(site, request("a"), request("b"))
        await ended(site, id_)
        reply = await site.call("DELETE", f"{PATH}/{id_}", b"")
        assert reply.json == {"id": id_, "type": "message_batch_deleted"}
        for path in ("", "/results"):
            assert refusal(await site.get(f"{PATH}/{id_}{path}")) == (404, "not_found_error")

    on_site(store, use)
    with sqlite3.connect(store) as database:
        for table in ("batches", "lines", "files", "chunks"):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
    database.close()


def test_pages_go_both_ways(store: Path) -> None:
    async def use(site: Site) -> None:
        ids = [await created(site, request("a")) for _ in range(5)][::-1]

        async def page(query: bytes) -> tuple[list[str], bool]:
            reply = await site.call("GET", PATH, b"", query=query)
            assert reply.status == 200, reply.body
            listed = [batch["id"] for batch in reply.json["data"]]
            assert (reply.json["first_id"], reply.json["last_id"]) == (listed[0], listed[-1])
            return listed, reply.json["has_more"]

        assert await page(b"limit=2") == (ids[:2], True)
        assert await page(b"limit=2&after_id=" + ids[1].encode()) == (ids[2:4], True)
        assert await page(b"limit=9&after_id=" + ids[1].encode()) == (ids[2:], False)
        assert await page(b"limit=2&before_id=" + ids[4].encode()) == (ids[2:4], True)
        for query in (b"limit=0", b"limit=x", b"page=1", b"after_id=a&before_id=b"):
            assert (await site.call("GET", PATH, b"", query=query)).status == 400, query
        assert (await site.call("GET", PATH, b"", query=b"after_id=msgbatch_1")).status == 404
        for id_ in ids:
            await ended(site, id_)

    on_site(store, use)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "requests is missing"),
        ({"requests": []}, "requests is"),
        ({"requests": {"a": 1}}, "a list is needed"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0]"),
        ({"requests": [request("a"), request("a")]}, "that of an earlier request"),
        ({"requests": [request("a b")]}, "custom_id"),
        ({"requests": [request("x" * 65)]}, "custom_id"),
        ({"requests": [{"custom_id": "a", "params": 1}]}, "params"),
        ({"requests": [request("a")], "metadata": {}}, "metadata"),
    ],
)
def test_a_malformed_batch_is_refused_as_a_whole(store: Path, body: Any, words: str) -> None:
    async def use(site: Site) -> None:
        reply = await site.post(PATH, body)
        assert refusal(reply) == (400, "invalid_request_error")
        assert words in reply.json["error"]["message"]
        assert (await site.get(PATH)).json["data"] == []

    on_site(store, use)


def test_the_bounds_of_a_key(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_batches, "MAX_BATCHES", 2)

    async def use(site: Site) -> None:
        large = await site.post(PATH, {"requests": [request("a", system="x" * 3000)]})
        assert refusal(large) == (413, "request_too_large")
        ids = []
        for _ in range(3):
            ids.append(await created(site, request("a")))
            await ended(site, ids[-1])
        listed = [batch["id"] for batch in (await site.get(PATH)).json["data"]]
        assert listed == ids[:0:-1]
        monkeypatch.setattr(stored_batches, "MAX_UNFINISHED", 0)
        refused = await site.post(PATH, {"requests": [request("a")]})
        assert refusal(refused) == (429, "rate_limit_error")

    on_site(store, use, batch_store_bytes=2000)


def test_each_key_sees_its_own_batches(store: Path) -> None:
    own, other = ({"x-api-key": key} for key in "ab")

    async def use(site: Site) -> None:
        id_ = await created(site, request("a"), headers=own)
        assert (await site.get(PATH, headers=other)).json["data"] == []
        for method, path in (
            ("GET", id_),
            ("DELETE", id_),
            ("POST", f"{id_}/cancel"),
            ("GET", f"{id_}/results"),
        ):
            reply = await site.call(method, f"{PATH}/{path}", b"", headers=other)
            assert refusal(reply) == (404, "not_found_error"), path
        assert (await site.get(f"{PATH}/{id_}", headers=own)).status == 200

    on_site(store, use, api_key=("a", "b"))


def test_a_batch_continues_after_a_restart(store: Path) -> None:
    async def begin(site: Site) -> str:
        held = asyncio.Event()
        site.engine.pause = held.wait
        return await created(site, request("a"), request("b"))

    async def finish(site: Site) -> None:
        await ended(site, id_)
        kinds = [line["result"]["type"] for line in await results(site, id_)]
        assert kinds == ["succeeded", "succeeded"]

    id_ = on_site(store, begin)
    on_site(store, finish)


def test_what_did_not_run_in_time_has_expired(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_batches, "WINDOW_S", 0)
    monkeypatch.setattr(message_batches, "WINDOW_S", 0)

    async def use(site: Site) -> None:
        id_ = await created(site, request("a"))
        batch = await ended(site, id_)
        assert batch["request_counts"]["expired"] == 1
        assert await results(site, id_) == [{"custom_id": "a", "result": {"type": "expired"}}]

    on_site(store, use)


def test_without_a_store_the_routes_say_how_to_turn_it_on() -> None:
    async def use() -> None:
        site = Site(FakeEngine())
        for method, path in (("POST", PATH), ("GET", PATH), ("GET", f"{PATH}/x/results")):
            reply = await site.call(method, path, b"{}")
            assert refusal(reply) == (400, "invalid_request_error")
            assert "--batch-store" in reply.json["error"]["message"]

    asyncio.run(use())

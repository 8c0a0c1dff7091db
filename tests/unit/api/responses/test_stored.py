"""Stored responses: GET, DELETE, their input, previous_response_id, bounds, one key's own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.api.openai.responses import sqlite_store
from quire.api.openai.responses.history import sealed
from quire.api.openai.responses.open_store import store_of
from quire.api.openai.responses.store import (
    MemoryStore,
    ResponseStore,
    StoredResponse,
    StoreError,
)
from quire.base.errors import SettingError
from quire.config.server_config import ServerConfig
from tests.unit.api.fake_engine import Reply, Site
from tests.unit.api.responses.asking import ASKED, PATH, TOOL, engine, events_of
from tests.unit.api.shown_conversation import CALL

NOTHING = {"first_id": None, "last_id": None, "has_more": False}


def on_site(use: Callable[[Site], Awaitable[Any]], *script: str, **settings: Any) -> Any:
    """Return what `use` returns for a new server."""

    async def run() -> Any:
        return await use(Site(engine(*script), **settings))

    return asyncio.run(run())


async def made(site: Site, body: dict[str, Any] | None = None, **options: Any) -> Any:
    reply = await site.post(PATH, {**ASKED, **(body or {})}, **options)
    assert reply.status == 200, reply.body
    return events_of(reply)[-1]["response"] if (body or {}).get("stream") else reply.json


async def delete(site: Site, id_: str, **options: Any) -> Reply:
    return await site.call("DELETE", f"{PATH}/{id_}", b"", **options)


@pytest.fixture(params=["memory", "file"])
def settings(request: Any, tmp_path: Path) -> dict[str, Any]:
    return {} if request.param == "memory" else {"responses_store": str(tmp_path / "responses")}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_until_it_is_deleted(settings: Any, stream: bool) -> None:
    async def use(site: Site) -> None:
        response = await made(site, {"stream": stream})
        assert response["store"]
        path = f"{PATH}/{response['id']}"
        assert (await site.get(path)).json == response
        reply = await delete(site, response["id"])
        assert reply.json == {"id": response["id"], "object": "response", "deleted": True}
        for gone in (await site.get(path), await delete(site, response["id"])):
            assert (gone.status, gone.error["code"]) == (404, "response_not_found")

    on_site(use, **settings)


def test_a_file_keeps_responses_across_servers(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    response = on_site(made, responses_store=str(path))
    assert path.stat().st_mode & 0o777 == 0o600

    async def found(site: Site) -> Any:
        return (await site.get(f"{PATH}/{response['id']}")).json

    assert on_site(found, responses_store=str(path)) == response


def test_a_response_is_found_with_its_key_only(settings: Any) -> None:
    async def use(site: Site) -> None:
        own, other = ({"authorization": f"Bearer {key}"} for key in "ab")
        id_ = (await made(site, headers=own))["id"]
        path = f"{PATH}/{id_}"
        unknown = await site.get(f"{PATH}/resp_0", headers=other)
        for reply in (
            await site.get(path, headers=other),
            await site.get(f"{path}/input_items", headers=other),
            await delete(site, id_, headers=other),
        ):
            assert reply.status == unknown.status == 404
            assert reply.error["message"].replace(id_, "resp_0") == unknown.error["message"]
        continued = {**ASKED, "previous_response_id": id_}
        refused = await site.post(PATH, continued, headers=other)
        assert refused.status == 404
        advice = "; check the id and the key, or send the whole conversation as input"
        assert refused.error["message"].endswith(advice)
        reference = {**ASKED, "input": [{"type": "item_reference", "id": f"msg_{id_[5:]}o0"}]}
        assert (await site.post(PATH, reference, headers=other)).status == 400
        assert (await site.post(PATH, reference, headers=own)).status == 200
        assert (await site.get(path, headers=own)).status == 200

    on_site(use, api_key=("a", "b"), **settings)


def test_a_previous_response_is_the_beginning_of_the_prompt(settings: Any) -> None:
    said = f"<think>Hm.</think>I look.{CALL}"

    async def use(site: Site) -> None:
        tools = {"tools": [TOOL], "instructions": "Be short."}
        first = await made(site, {"input": "Where?", **tools})
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
        second = await made(site, {"input": [result], "previous_response_id": first["id"], **tools})
        last = {"input": "And?", "previous_response_id": second["id"], "tools": [TOOL]}
        third = await made(site, last)
        assert third["previous_response_id"] == second["id"]
        whole = [
            {"role": "user", "content": "Where?"},
            *first["output"],
            result,
            *second["output"],
            {"role": "user", "content": "And?"},
        ]
        await made(site, {"input": whole, "tools": [TOOL], "store": False})
        continued, at_once = site.engine.asked[2:4]
        assert bytes(continued.prompt_ids).decode() == bytes(at_once.prompt_ids).decode()
        assert b"Be short." not in bytes(continued.prompt_ids)
        await delete(site, first["id"])
        refused = await site.post(PATH, {**ASKED, "previous_response_id": second["id"]})
        assert (refused.status, refused.error["param"]) == (404, "previous_response_id")
        assert first["id"] in refused.error["message"]

    on_site(use, said, **settings)


def test_references_stand_for_stored_items() -> None:
    async def use(site: Site) -> None:
        first = await made(site, {"input": [{"role": "user", "content": "Where?"}]})
        digits = first["id"].removeprefix("resp_")
        references = [
            {"type": "item_reference", "id": f"msg_{digits}i0"},
            {"id": f"msg_{digits}o0"},
        ]
        await made(site, {"input": [*references, {"role": "user", "content": "And?"}]})
        assert bytes(site.engine.asked[1].prompt_ids) == b"user:Where?;assistant:Hello;user:And?;"
        for id_ in (f"msg_{digits}o9", f"msg_{'0' * 24}o0", "msg_1"):
            refused = await site.post(PATH, {**ASKED, "input": [{"id": id_}]})
            assert refused.status == 400
            assert f'input[0].id is "{id_}"' in refused.error["message"]

    on_site(use)


@pytest.mark.parametrize("given", [None, []])
def test_a_continued_response_needs_no_input(settings: Any, given: Any) -> None:
    async def use(site: Site) -> None:
        first = await made(site, {"input": "Where?"})
        more = await made(site, {"input": given, "previous_response_id": first["id"]})
        assert bytes(site.engine.asked[1].prompt_ids) == b"user:Where?;assistant:Hello;"
        shown = await site.get(f"{PATH}/{more['id']}/input_items")
        assert shown.json["data"] == []
        refused = await site.post(PATH, {"input": given})
        assert (refused.status, refused.error["param"]) == (400, "input")

    on_site(use, **settings)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_reasoning_is_sealed_for_its_client_and_stored_sealed_on_request(
    settings: Any, stream: bool, include: bool
) -> None:
    sealed_text = sealed("Hm.")

    async def use(site: Site) -> None:
        asked = {"include": ["reasoning.encrypted_content"]} if include else {}
        response = await made(site, {**asked, "stream": stream})
        assert response["output"][0]["encrypted_content"] == sealed_text
        path = f"{PATH}/{response['id']}"
        stored_item = (await site.get(path)).json["output"][0]
        assert ("encrypted_content" in stored_item) == include
        query = b"include=reasoning.encrypted_content"
        for asked_for in (query, query.replace(b"=", b"[]=")):
            assert (await site.get(path, query=asked_for)).json == response
        other = await site.get(path, query=b"include=message.output_text.logprobs")
        assert other.json["output"][0] == stored_item
        sent = [{**stored_item, "id": None}, {"role": "user", "content": "And?"}]
        second = await made(site, {"input": sent})
        listed = f"{PATH}/{second['id']}/input_items"
        page = (await site.get(listed, query=query + b"&order=asc")).json["data"]
        assert page[0]["encrypted_content"] == sealed_text
        page = (await site.get(listed, query=b"order=asc")).json["data"]
        assert ("encrypted_content" in page[0]) == include

    on_site(use, "<think>Hm.</think>Yes.", **settings)


def test_reasoning_without_a_summary_is_listed_with_one() -> None:
    async def use(site: Site) -> None:
        sent = [{"type": "reasoning", "encrypted_content": "of another server"}]
        id_ = (await made(site, {"input": [*sent, {"role": "user", "content": "a"}]}))["id"]
        query = b"order=asc&include=reasoning.encrypted_content"
        (item, _) = (await site.get(f"{PATH}/{id_}/input_items", query=query)).json["data"]
        assert (item["summary"], item["encrypted_content"]) == ([], "of another server")

    on_site(use)


@pytest.mark.parametrize(
    ("settings", "body"), [({}, {"store": False}), ({"responses_store_bytes": 0}, {})]
)
def test_nothing_is_stored_without_store(settings: Any, body: Any) -> None:
    async def use(site: Site) -> None:
        response = await made(site, body)
        assert response["store"] is False
        assert (await site.get(f"{PATH}/{response['id']}")).status == 404

    on_site(use, **settings)


def test_a_server_that_stores_nothing_refuses_to() -> None:
    reply = on_site(lambda site: site.post(PATH, {**ASKED, "store": True}), responses_store_bytes=0)
    assert (reply.status, reply.error["param"]) == (400, "store")


def test_the_items_of_an_input_come_in_pages() -> None:
    async def use(site: Site) -> None:
        given = [{"role": "user", "content": f"Question {at}"} for at in range(5)]
        given.append({"role": "assistant", "content": "Hm."})
        id_ = (await made(site, {"input": given}))["id"]

        async def page(query: str = "") -> Any:
            reply = await site.get(f"{PATH}/{id_}/input_items", query=query.encode())
            return reply.error if reply.status == 400 else reply.json

        newest = await page()
        assert newest["data"][0]["content"] == [
            {"type": "output_text", "text": "Hm.", "annotations": []}
        ]
        assert newest["has_more"] is False
        first = await page("order=asc&limit=4")
        assert [item["content"][0]["text"][-1] for item in first["data"]] == ["0", "1", "2", "3"]
        assert first["has_more"] is True
        rest = await page(f"order=asc&limit=4&after={first['last_id']}")
        assert [*first["data"], *rest["data"]] == newest["data"][::-1]
        assert await page(f"order=asc&after={rest['last_id']}") == {
            "object": "list",
            "data": [],
            **NOTHING,
        }
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_1", "page=2"):
            assert (await page(query))["param"] == query.partition("=")[0]

    on_site(use)


def stored(at: int, num_bytes: int = 10) -> StoredResponse:
    return StoredResponse(id=f"r{at}", previous=None, response=b"x" * num_bytes, items=b"")


@pytest.fixture(params=["memory", "file"])
def store(request: Any, tmp_path: Path) -> Iterator[Callable[..., ResponseStore]]:
    opened: list[ResponseStore] = []

    def open_one(max_bytes: int, max_responses: int = 99) -> ResponseStore:
        if request.param == "memory":
            opened.append(MemoryStore(max_bytes, max_responses))
        else:
            from quire.api.openai.responses.sqlite_store import SqliteStore

            opened.append(SqliteStore(str(tmp_path / "store"), max_bytes, max_responses))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.mark.parametrize("bounds", [(30,), (999, 3)])
def test_the_least_recently_used_are_evicted_for_each_key(store: Any, bounds: Any) -> None:
    async def use() -> None:
        kept = store(*bounds)
        await kept.save(b"other", stored(0))
        for at in range(3):
            await kept.save(b"key", stored(at))
        assert await kept.find(b"key", "r0") == stored(0)
        await kept.save(b"key", stored(3))
        found = [await kept.find(b"key", f"r{at}") is not None for at in range(4)]
        assert found == [True, False, True, True]
        assert await kept.find(b"other", "r0") is not None
        await kept.save(b"key", stored(2, num_bytes=9))  # replaces
        assert await kept.find(b"key", "r2") == stored(2, num_bytes=9)

    asyncio.run(use())


def test_a_response_that_alone_is_too_large_evicts_nothing(store: Any) -> None:
    async def use() -> None:
        kept = store(30)
        await kept.save(b"key", stored(0))
        await kept.save(b"key", stored(1, num_bytes=31))
        assert await kept.find(b"key", "r1") is None
        assert await kept.find(b"key", "r0") is not None
        assert await kept.delete(b"key", "r0")
        assert not await kept.delete(b"key", "r0")

    asyncio.run(use())


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "notes"
    other.write_bytes(b"not a database, but long enough to look at" * 40)
    for path in (other, tmp_path / "missing" / "store", tmp_path):
        with pytest.raises(SettingError, match="responses_store"):
            store_of(ServerConfig(responses_store=str(path)))


def test_a_file_that_another_process_is_creating_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "responses")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waits: list[float] = []

    def end_other(seconds: float) -> None:
        waits.append(seconds)
        other.execute("ROLLBACK")

    monkeypatch.setattr(f"{sqlite_store.__name__}.time.sleep", end_other)
    store_of(ServerConfig(), path).close()
    assert len(waits) == 1
    other.execute("BEGIN EXCLUSIVE")  # nothing of the store holds the file
    other.close()


def test_a_file_that_stays_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "responses")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waits: list[float] = []
    monkeypatch.setattr(f"{sqlite_store.__name__}.time.sleep", waits.append)
    with pytest.raises(SettingError, match="database is locked"):
        store_of(ServerConfig(), path)
    assert len(waits) > 10
    other.close()


def test_a_store_that_fails_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise StoreError("the disk is full")

    async def use(site: Site) -> None:
        for stream in (False, True):
            response = await made(site, {"stream": stream})
            assert response["output"][0]["content"][0]["text"] == "Hello"
            assert (await site.get(f"{PATH}/{response['id']}")).status == 404
        assert site.log.getvalue().count("the disk is full") == 2

    monkeypatch.setattr(MemoryStore, "save", fail)
    on_site(use)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_ends_its_request_and_nothing_is_stored(stream: bool) -> None:
    async def use(site: Site) -> None:
        gone = asyncio.Event()

        async def leave() -> None:
            gone.set()
            await asyncio.Event().wait()

        site.engine.pause = leave
        body = msgspec.json.encode({**ASKED, "stream": stream})
        reply = await site.call("POST", PATH, body, gone=gone)
        assert not reply.complete
        (asked,) = site.engine.asked
        assert site.engine.closed_early == [asked.request_id]
        assert (await site.get(f"{PATH}/{asked.request_id}")).status == 404

    on_site(use)


def test_a_draining_server_refuses_new_responses_and_returns_stored_ones() -> None:
    async def use(site: Site) -> None:
        response = await made(site)
        site.server_state.lifecycle.drain()
        assert (await site.post(PATH, ASKED)).status == 503
        assert (await site.get(f"{PATH}/{response['id']}")).json == response

    on_site(use)

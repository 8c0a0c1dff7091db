"""/v1/conversations: made, read, changed, continued by responses; bounds, keys, bad input."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.api.openai.responses.history import sealed
from quire.api.openai.responses.store import MemoryStore
from tests.unit.api.fake_engine import Reply, Site
from tests.unit.api.responses.asking import ASKED, PATH, TOOL, events_of
from tests.unit.api.responses.test_stored import on_site
from tests.unit.api.shown_conversation import CALL

CONVERSATIONS = "/v1/conversations"
HI = {"type": "message", "role": "user", "content": "hi"}


@pytest.fixture(params=["memory", "file"])
def settings(request: Any, tmp_path: Path) -> dict[str, Any]:
    return {} if request.param == "memory" else {"responses_store": str(tmp_path / "responses")}


async def made(site: Site, **body: Any) -> str:
    reply = await site.post(CONVERSATIONS, body)
    assert reply.status == 200, reply.body
    return str(reply.json["id"])


async def items(site: Site, id_: str, query: bytes = b"order=asc&limit=100") -> list[Any]:
    reply = await site.call("GET", f"{CONVERSATIONS}/{id_}/items", b"", query=query)
    assert reply.status == 200, reply.body
    return list(reply.json["data"])


async def delete(site: Site, path: str, **options: Any) -> Reply:
    return await site.call("DELETE", f"{CONVERSATIONS}/{path}", b"", **options)


def test_a_conversation_is_made_changed_and_deleted(settings: Any) -> None:
    async def use(site: Site) -> None:
        reply = await site.post(CONVERSATIONS, {"metadata": {"a": "b"}, "items": [HI]})
        shown = reply.json
        assert (shown["object"], shown["metadata"]) == ("conversation", {"a": "b"})
        path = f"{CONVERSATIONS}/{shown['id']}"
        assert (await site.get(path)).json == shown
        changed = (await site.post(path, {"metadata": {"c": "d"}})).json
        assert changed == {**shown, "metadata": {"c": "d"}}
        assert (await site.get(path)).json == changed
        (item,) = await items(site, shown["id"])
        assert item["content"] == [{"type": "input_text", "text": "hi"}]
        assert (await site.get(f"{path}/items/{item['id']}")).json == item
        added = await site.post(f"{path}/items", {"items": [HI, {**HI, "content": "ho"}]})
        ids = [entry["id"] for entry in added.json["data"]]
        assert [entry["id"] for entry in await items(site, shown["id"])] == [item["id"], *ids]
        newest = await items(site, shown["id"], b"limit=1")
        assert [entry["id"] for entry in newest] == ids[-1:]
        assert (await delete(site, f"{shown['id']}/items/{ids[0]}")).json == changed
        assert len(await items(site, shown["id"])) == 2
        gone = await delete(site, shown["id"])
        assert gone.json == {
            "id": shown["id"],
            "object": "conversation.deleted",
            "deleted": True,
        }
        for reply in (await site.get(path), await delete(site, shown["id"])):
            assert (reply.status, reply.error["code"]) == (404, "conversation_not_found")

    on_site(use, **settings)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
def test_responses_continue_a_conversation_and_add_to_it(
    settings: Any, stream: bool, as_object: bool
) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site)
        named = {"id": id_} if as_object else id_
        for number in range(2):
            reply = await site.post(
                PATH, {**ASKED, "input": f"turn {number}", "conversation": named, "stream": stream}
            )
            assert reply.status == 200, reply.body
            response = events_of(reply)[-1]["response"] if stream else reply.json
            assert response["conversation"] == {"id": id_}
        said = [entry["content"][0]["text"] for entry in await items(site, id_)]
        assert said == ["turn 0", "Hello", "turn 1", "Hello"]
        # The prompt is that of the same items sent whole.
        whole = [
            {"role": "user", "content": "turn 0"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "turn 1"},
        ]
        await site.post(PATH, {**ASKED, "input": whole})
        assert site.engine.asked[-1].prompt_ids == site.engine.asked[1].prompt_ids

    on_site(use, **settings)


def test_a_conversation_goes_on_without_input_and_refers_to_its_items(settings: Any) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site, items=[HI])
        asked = {"seed": 7, "conversation": id_}
        assert (await site.post(PATH, {**asked, "store": False})).status == 200
        assert bytes(site.engine.asked[0].prompt_ids) == b"user:hi;"
        count = f"{PATH}/input_tokens"
        counted = (await site.post(count, {"conversation": id_})).json["input_tokens"]
        for item in await items(site, id_):  # its own, and one of a response that is not stored
            reference = {"type": "item_reference", "id": item["id"]}
            named = await site.post(count, {"conversation": id_, "input": [reference]})
            assert named.json["input_tokens"] > counted
            alone = await site.post(count, {"input": [reference]})
            assert (alone.status, alone.error["param"]) == (400, "input")
        empty = await made(site)
        refused = await site.post(PATH, {"conversation": empty})
        assert (refused.status, refused.error["param"]) == (400, "input")
        assert "and so is the conversation" in refused.error["message"]

    on_site(use, **settings)


def test_the_items_of_a_conversation_are_sealed_on_request() -> None:
    thought = {
        "type": "reasoning",
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    query = b"include[]=reasoning.encrypted_content"

    async def use(site: Site) -> None:
        id_ = await made(site)
        path = f"{CONVERSATIONS}/{id_}/items"
        body = msgspec.json.encode({"items": [thought]})
        for asked, expected in ((query, [sealed("Hm.")]), (b"", [])):
            added = (await site.call("POST", path, body, query=asked)).json["data"]
            one = (await site.get(f"{path}/{added[0]['id']}", query=asked)).json
            (listed, *_) = (await site.get(path, query=asked)).json["data"]
            for item in (added[0], one, listed):
                assert [item[key] for key in item if key == "encrypted_content"] == expected

    on_site(use)


def test_labels_of_null_are_removed() -> None:
    async def use(site: Site) -> None:
        id_ = await made(site, metadata={"a": "b"})
        reply = await site.post(f"{CONVERSATIONS}/{id_}", {"metadata": None})
        assert (reply.status, reply.json["metadata"]) == (200, {})

    on_site(use)


def test_calls_and_their_outputs_are_in_one_conversation(settings: Any) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site)
        asked = {**ASKED, "conversation": id_, "tools": [TOOL]}
        first = (await site.post(PATH, asked)).json
        (call,) = [item for item in first["output"] if item["type"] == "function_call"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "cold"}
        second = await site.post(PATH, {**asked, "input": [output]})
        assert second.status == 200, second.body
        kinds = [item["type"] for item in await items(site, id_)]
        assert kinds == ["message", "function_call", "function_call_output", "function_call"]

    on_site(use, CALL, **settings)


def test_a_background_response_adds_to_its_conversation_once(settings: Any) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site)
        reply = await site.post(PATH, {**ASKED, "conversation": id_, "background": True})
        response = reply.json
        async with asyncio.timeout(60):
            while response["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                response = (await site.get(f"{PATH}/{response['id']}")).json
        assert response["status"] == "completed"
        assert len(await items(site, id_)) == 2

    on_site(use, **settings)


def test_a_failed_response_adds_nothing(settings: Any) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site, items=[HI])
        assert (await site.post(PATH, {**ASKED, "conversation": id_, "n": 2})).status == 400
        site.engine.fails_with = RuntimeError("no")
        assert (await site.post(PATH, {**ASKED, "conversation": id_})).status == 500
        assert len(await items(site, id_)) == 1

    on_site(use, **settings)


def test_a_response_that_is_not_stored_still_adds_to_its_conversation(settings: Any) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site)
        await site.post(PATH, {**ASKED, "conversation": id_, "store": False})
        assert len(await items(site, id_)) == 2

    on_site(use, **settings)


def test_a_conversation_is_found_with_its_key_only(settings: Any) -> None:
    async def use(site: Site) -> None:
        own, other = ({"authorization": f"Bearer {key}"} for key in "ab")
        id_ = (await site.post(CONVERSATIONS, {"items": [HI]}, headers=own)).json["id"]
        for method, path in (("GET", id_), ("DELETE", id_), ("GET", f"{id_}/items")):
            reply = await site.call(method, f"{CONVERSATIONS}/{path}", b"", headers=other)
            assert reply.status == 404
        reply = await site.post(PATH, {**ASKED, "conversation": id_}, headers=other)
        assert (reply.status, reply.error["param"]) == (404, "conversation")
        assert (await site.get(f"{CONVERSATIONS}/{id_}", headers=own)).status == 200
        # No response has its id.
        assert (await site.get(f"{PATH}/{id_}", headers=own)).status == 404
        previous = {**ASKED, "previous_response_id": id_}
        assert (await site.post(PATH, previous, headers=own)).status == 404

    on_site(use, api_key=("a", "b"), **settings)


def test_two_responses_at_once_lose_no_item(settings: Any) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site)
        asked = [{**ASKED, "conversation": id_, "input": f"turn {at}"} for at in range(8)]
        replies = await asyncio.gather(*(site.post(PATH, each) for each in asked))
        assert {reply.status for reply in replies} == {200}
        assert len(await items(site, id_)) == 16

    on_site(use, **settings)


def test_the_bounds_of_conversations(settings: Any) -> None:
    async def use(site: Site) -> None:
        large = [{**HI, "content": "x" * 900}]
        id_ = await made(site, items=large)
        for items_ in (large * 3, large * 21, [], None, "hi"):
            reply = await site.post(f"{CONVERSATIONS}/{id_}/items", {"items": items_})
            assert (reply.status, reply.error["param"]) == (400, "items"), items_
        assert len(await items(site, id_)) == 1
        await made(site, items=large)
        await made(site, items=large)
        assert (await site.get(f"{CONVERSATIONS}/{id_}")).status == 404  # evicted

    on_site(use, responses_store_bytes=2500, **settings)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"metadata": {"a": 1}}, "metadata"),
        ("", {"metadata": 5}, "metadata"),
        ("", {"items": [{"type": "image"}]}, "items"),
        ("", {"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "items"),
        ("", {"name": "x"}, "name"),
        ("/ID", {}, "metadata"),
        ("/ID", {"items": []}, "items"),
        ("/ID/items", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items"),
    ],
)
def test_a_refusal_names_the_field(path: str, body: Any, param: str) -> None:
    async def use(site: Site) -> None:
        id_ = await made(site)
        reply = await site.post(CONVERSATIONS + path.replace("ID", id_), body)
        assert (reply.status, reply.error["param"]) == (400, param), reply.body

    on_site(use)


@pytest.mark.parametrize("given", [5, [], {"id": 5}, {"id": "conv_1", "more": 1}])
def test_a_malformed_conversation_is_refused(given: Any) -> None:
    async def use(site: Site) -> None:
        reply = await site.post(PATH, {**ASKED, "conversation": given})
        assert (reply.status, reply.error["param"]) == (400, "conversation")

    on_site(use)


def test_a_conversation_and_a_previous_response_are_refused_together() -> None:
    async def use(site: Site) -> None:
        id_ = await made(site)
        both = {**ASKED, "conversation": id_, "previous_response_id": "resp_1"}
        reply = await site.post(PATH, both)
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")

    on_site(use)


def test_without_a_store_there_are_no_conversations() -> None:
    async def use(site: Site) -> None:
        for reply in (
            await site.post(CONVERSATIONS, {}),
            await site.get(f"{CONVERSATIONS}/conv_1"),
            await site.post(PATH, {**ASKED, "conversation": "conv_1"}),
        ):
            assert reply.status == 400
            assert "--responses-store-size" in reply.error["message"]

    on_site(use, responses_store_bytes=0)


def test_a_change_of_an_unknown_entry_is_none() -> None:
    async def change() -> object:
        return await MemoryStore(100).change(b"", "x", lambda stored: stored)

    assert asyncio.run(change()) is None

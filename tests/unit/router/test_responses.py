"""Stored responses: what needs one goes to the replica that has it, or the error says why not."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from quire.router.discovery import StaticList
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER

KEY = [(b"authorization", b"Bearer one")]


class Storing(FakeReplica):
    """Stores responses for a key, as a server of Quire does. made: the ids."""

    def __init__(self, digit: str) -> None:
        super().__init__()
        self.digit = digit
        self.made: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.answer = self._answer

    def _answer(self, method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        self.asked.append((method, path))
        plain = path.partition("?")[0]
        if plain == "/v1/responses" and method == "POST":
            previous = fields.get("previous_response_id")
            if previous is not None and previous not in self.made:
                return 404, b'{"error":{"message":"gone","code":"response_not_found"}}'
            self.made.append(f"resp_{self.digit * 23}{len(self.made):x}")
            if fields.get("stream"):
                return None
            return 200, json.dumps({"id": self.made[-1], "object": "response"}).encode()
        if plain == "/v1/responses/input_tokens":
            known = fields["previous_response_id"] in self.made
            return (200, b'{"input_tokens":7}') if known else (404, b"{}")
        found = re.fullmatch(r"/v1/responses/(resp_\w+)(/\w+)?", plain)
        if found is None or found[1] not in self.made:
            return 404, b'{"error":{"message":"no such","code":"response_not_found"}}'
        return 200, json.dumps({"id": found[1], "method": method}).encode()


async def _create(router: Router, **fields: Any) -> tuple[int, Any]:
    body = {"input": "a", **fields}
    status, _, raw = await router.post("/v1/responses", body, headers=KEY)
    return status, json.loads(raw)


def test_a_conversation_stays_with_the_replica_that_has_it() -> None:
    replicas = [Storing("a"), Storing("b"), Storing("c")]

    async def story(router: Router) -> None:
        for _ in range(3):
            status, first = await _create(router)
            for _ in range(4):
                status, more = await _create(router, previous_response_id=first["id"])
                assert status == 200
                assert more["id"][5] == first["id"][5]
        item = f"msg_{first['id'][5:]}o0"
        reference = [{"type": "item_reference", "id": item}]
        assert (await _create(router, input=reference))[1]["id"][5] == first["id"][5]
        for method, path, query in (
            ("GET", f"/v1/responses/{first['id']}", b""),
            ("GET", f"/v1/responses/{first['id']}/input_items", b"limit=2&order=asc"),
            ("POST", f"/v1/responses/{first['id']}/cancel", b""),
            ("DELETE", f"/v1/responses/{first['id']}", b""),
        ):
            body = b"" if method == "POST" else None
            got = await router.post(path, body, headers=KEY, method=method, query=query)
            assert got[0] == 200
            assert json.loads(got[2])["method"] == method

    run(replicas, story)
    assert {len(one.made) > 0 for one in replicas} == {True}, "new ones are spread"
    asked = [entry for one in replicas for entry in one.asked]
    assert any(path.endswith("input_items?limit=2&order=asc") for _, path in asked)


def test_tokens_are_counted_where_the_previous_response_is_stored() -> None:
    replicas = [Storing("a"), Storing("b"), Storing("c")]

    async def story(router: Router) -> None:
        for _ in range(3):
            _, first = await _create(router)
            for _ in range(3):
                body = {"input": "a", "previous_response_id": first["id"]}
                found = await router.post("/v1/responses/input_tokens", body, headers=KEY)
                assert (found[0], json.loads(found[2])) == (200, {"input_tokens": 7})

    run(replicas, story)


def test_an_id_that_the_router_does_not_know_is_asked_for() -> None:
    replicas = [Storing("a"), Storing("b"), Storing("c")]
    replicas[1].made.append("resp_" + "b" * 24)

    async def story(router: Router) -> None:
        id_ = "resp_" + "b" * 24
        status, more = await _create(router, previous_response_id=id_)
        assert (status, more["id"][5]) == (200, "b")
        assert all(b"authorization: Bearer one\r\n" in one.heads[0] for one in replicas)
        before = [len(one.asked) for one in replicas]
        assert (await _create(router, previous_response_id=id_))[0] == 200
        after = [len(one.asked) for one in replicas]
        assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1, 0], "now it is known"

    run(replicas, story)


@pytest.mark.parametrize("id_", ["resp_" + "d" * 24, "nonsense", "../admin"])
def test_an_id_that_no_replica_has_gets_a_replicas_404(id_: str) -> None:
    async def story(router: Router) -> None:
        status, body = await _create(router, previous_response_id=id_)
        assert (status, body["error"]["code"]) == (404, "response_not_found")

    run([Storing("a"), Storing("b")], story)


def test_a_response_of_a_replica_that_is_away_says_where_it_is() -> None:
    first, second = Storing("a"), Storing("b")

    async def story(router: Router) -> None:
        status, made = await _create(router)
        assert made["id"][5] == "a"
        first.stop_listening(cuts=True)
        while router.fleet.num_available > 1:
            router.fleet.probe_now.set()
            await asyncio.sleep(0.01)
        for id_, why in (
            (made["id"], f"it is stored at {first.url}, which is unreachable"),
            ("resp_" + "e" * 24, f"may be stored where {first.url} is unreachable"),
        ):
            status, body = await _create(router, previous_response_id=id_)
            assert (status, body["error"]["code"]) == (503, "response_unavailable")
            assert why in body["error"]["message"]
            assert "send the whole conversation" in body["error"]["message"]
        assert (await _create(router))[0] == 200, "new ones are made elsewhere"

    run([first, second], story)


def test_a_replica_that_was_removed_and_returns_still_has_its_responses() -> None:
    first, second = Storing("a"), Storing("b")

    async def story(router: Router) -> None:
        _, made = await _create(router)
        urls = router.fleet._discovery.poll()
        router.fleet._discovery = StaticList(urls[1:])
        router.fleet.follow()
        status, body = await _create(router, previous_response_id=made["id"])
        assert status == 503
        assert f"{first.url}, which was removed" in body["error"]["message"]
        router.fleet._discovery = StaticList(urls)
        router.fleet.follow()
        while router.fleet.num_available < 2:
            router.fleet.probe_now.set()
            await asyncio.sleep(0.01)
        assert (await _create(router, previous_response_id=made["id"]))[0] == 200

    run([first, second], story)


def test_what_a_key_made_is_not_known_to_another() -> None:
    first, second = Storing("a"), Storing("b")

    async def story(router: Router) -> None:
        _, made = await _create(router)
        before = len(second.asked)
        await router.post(f"/v1/responses/{made['id']}", None)
        assert len(second.asked) == before + 1, "it is asked for anew, without the key"
        assert b"authorization" not in second.heads[-1]

    run([first, second], story)


def test_the_id_of_a_streamed_response_is_known() -> None:
    first, second = Storing("a"), Storing("b")
    id_ = "resp_" + "a" * 24
    first.made.append(id_)
    for replica in (first, second):
        replica.fails_after = 2
        replica.says = (
            b'event: response.created\ndata: {"type":"response.created","response":{"id":"%b"}}\n\n'
            % id_.encode()
        )

    async def story(router: Router) -> None:
        await router.post("/v1/responses", {"input": "a", "stream": True}, headers=KEY)
        before = len(second.asked)
        assert (await _create(router, previous_response_id=id_))[0] == 200
        assert len(second.asked) == before

    run([first, second], story)


@pytest.mark.parametrize("returns", [True, False])
def test_a_stream_that_needs_a_stored_response_waits_for_its_replica(returns: bool) -> None:
    first, second = Storing("a"), Storing("b")
    id_ = "resp_" + "a" * 24
    first.made.append(id_)

    async def story(router: Router) -> None:
        def fail(token: int) -> None:
            if token == 103:
                first.stop_listening(cuts=True)

        async def restart() -> None:
            await asyncio.sleep(0.5)
            first.before_token = lambda token: None
            await first.start()

        first.before_token = fail
        restarting = asyncio.ensure_future(restart()) if returns else None
        body = {"input": "a", "stream": True, "previous_response_id": id_}
        answer = (await router.post("/v1/responses", body, headers=KEY))[2]
        if restarting is not None:
            await restarting
            assert answer == ANSWER
        else:
            error = json.loads(answer.split(b"\n\n")[-2].partition(b"data: ")[2])
            assert error["code"] == "stream_broken"
            assert f"{first.url} failed, and only that one has the response" in error["message"]

    run([first, second], story, resume_s=2.0)
    assert not [one for one in second.asked if one[0] == "POST"]


def test_wrong_methods_are_refused() -> None:
    async def story(router: Router) -> None:
        assert (await router.post("/v1/responses/resp_1", None, method="PUT"))[0] == 405
        assert (await router.post("/v1/responses", None))[0] == 405

    run([Storing("a")], story)

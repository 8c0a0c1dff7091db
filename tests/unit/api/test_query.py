"""Parameters in the query of a POST route: none is known, so none is passed over in silence."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.api.fake_engine import FakeEngine, Reply, Site

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/generate": {"tokens": [1]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/apply_template": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/requests/none/abort": {},
}


def ask(path: str, query: bytes, **settings: Any) -> tuple[Reply, FakeEngine]:
    engine = FakeEngine()

    async def exchange() -> Reply:
        return await Site(engine, **settings).post(path, BODIES[path], query=query)

    return asyncio.run(exchange()), engine


@pytest.mark.parametrize("path", BODIES)
def test_a_parameter_of_the_query_is_refused_by_name(path: str) -> None:
    for query in (b"frobnicate=1", b"frobnicate", b"&frobnicate=&x=2"):
        reply, engine = ask(path, query)
        assert (reply.status, reply.error["param"]) == (400, "frobnicate")
        assert '"frobnicate" is a parameter of the query' in reply.error["message"]
        assert not engine.asked


def test_a_field_of_the_body_is_told_to_go_there() -> None:
    reply, _ = ask("/v1/completions", b"temperature=0")
    assert (reply.status, reply.error["param"]) == (400, "temperature")
    assert "send it as a field of the body" in reply.error["message"]


def test_it_is_left_out_and_named_where_the_server_was_told_so() -> None:
    for path in BODIES:
        reply, _ = ask(path, b"frobnicate=1&x=2", unknown_fields="warn")
        if "/abort" in path:
            assert reply.error["code"] == "unknown_request"
        else:
            assert reply.status == 200
            assert reply.headers["x-quire-ignored-fields"] == "frobnicate, x"


def test_an_empty_query_is_none() -> None:
    for query in (b"", b"&"):
        assert ask("/v1/completions", query)[0].status == 200


def test_an_abort_with_a_parameter_is_done_and_names_it() -> None:
    async def exchange() -> None:
        site = Site(FakeEngine("a", "b"), unknown_fields="warn")
        going = asyncio.Event()
        site.engine.pause = going.wait
        name = {"x-request-id": "mine"}
        asked = asyncio.ensure_future(site.post("/v1/completions", {"prompt": "a"}, headers=name))
        while not site.engine.num_deltas:
            await asyncio.sleep(0)
        told = await site.post("/v1/requests/mine/abort", {}, query=b"why=1")
        assert told.json["aborted"] is True
        assert told.headers["x-quire-ignored-fields"] == "why"
        going.set()
        await asked

    asyncio.run(exchange())

"""Query parameters of a POST route: none is known, so none is silently ignored."""

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
def test_a_query_parameter_is_rejected_by_name(path: str) -> None:
    for query in (b"frobnicate=1", b"frobnicate", b"&frobnicate=&x=2"):
        reply, engine = ask(path, query)
        assert (reply.status, reply.error["param"]) == (400, "frobnicate")
        assert '"frobnicate" is a parameter of the query' in reply.error["message"]
        assert not engine.asked


def test_a_body_field_in_the_query_is_rejected_with_a_hint() -> None:
    reply, _ = ask("/v1/completions", b"temperature=0")
    assert (reply.status, reply.error["param"]) == (400, "temperature")
    assert "send it as a field of the body" in reply.error["message"]


def test_in_warn_mode_it_is_ignored_and_listed() -> None:
    for path in BODIES:
        reply, _ = ask(path, b"frobnicate=1&x=2", unknown_fields="warn")
        if "/abort" in path:
            assert reply.error["code"] == "unknown_request"
        else:
            assert reply.status == 200
            assert reply.headers["x-quire-ignored-fields"] == "frobnicate, x"


def test_an_empty_query_is_accepted() -> None:
    for query in (b"", b"&"):
        assert ask("/v1/completions", query)[0].status == 200


def test_an_abort_with_a_parameter_is_done_and_lists_it() -> None:
    async def exchange() -> None:
        site = Site(FakeEngine("a", "b"), unknown_fields="warn")
        going = asyncio.Event()
        site.engine.pause = going.wait
        name = {"x-request-id": "mine"}
        asked = asyncio.ensure_future(site.post("/v1/completions", {"prompt": "a"}, headers=name))
        while not site.engine.num_deltas:
            await asyncio.sleep(0)
        reply = await site.post("/v1/requests/mine/abort", {}, query=b"why=1")
        assert reply.json["aborted"] is True
        assert reply.headers["x-quire-ignored-fields"] == "why"
        going.set()
        await asked

    asyncio.run(exchange())

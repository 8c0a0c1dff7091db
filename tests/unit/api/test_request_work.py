"""What a request costs an API process until its answer begins, as counts of objects and calls.

A router sends hundreds of requests at once where a server has failed, and these costs are what
their streams wait for. The bounds have no air: raise them only for what every request needs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.routing import Route

from quire.api.app import routes_of
from quire.base import strict_json
from quire.base.sampling_params import SamplingParams
from tests.cases import each_case
from tests.unit.api.fake_engine import FakeEngine, Site

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "seed": 1}
TEXT = {"prompt": "abc", "stream": True, "seed": 1, "max_tokens": 40}
TOKENS = {"tokens": [5, 9], "stream": True, "seed": 1, "max_tokens": 40}


@contextmanager
def begun_generators() -> Any:
    """Yield a list that gets the name of each asynchronous generator that begins."""
    before, names = sys.get_asyncgen_hooks(), list[str]()

    def begins(generator: AsyncGenerator[Any, None]) -> None:
        names.append(generator.__qualname__)
        if before.firstiter is not None:
            before.firstiter(generator)

    sys.set_asyncgen_hooks(firstiter=begins)
    try:
        yield names
    finally:
        sys.set_asyncgen_hooks(firstiter=before.firstiter)


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """Return a list that grows with each call of a function."""
    calls, function = list[None](), getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return function(*arguments, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


def run(test: Callable[[Site], Any]) -> None:
    async def begin() -> None:
        await test(Site(FakeEngine("Hel", "lo")))

    asyncio.run(begin())


@each_case(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", TEXT),
        ("/v1/completions", {**TEXT, "output_ids": [7] * 20}),
        ("/generate", {**TOKENS, "output_ids": [7] * 20}),
    ],
)
def test_deltas_pass_one_generator_beside_the_engines(path: str, body: dict[str, Any]) -> None:
    """Each costs an entry in a table of the event loop, and some calls for every token."""

    async def test(site: Site) -> None:
        with begun_generators() as names:
            reply = await site.post(path, body)
        assert reply.status == 200
        assert names == ["ChoiceStreams.deltas", "FakeEngine.generate"]

    run(test)


@each_case(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_sampling_parameters_are_made_once(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: Site) -> None:
        checks = counted(monkeypatch, SamplingParams, "__post_init__")
        reply = await site.post(path, {**body, "max_tokens": 40})
        assert reply.status == 200
        assert len(checks) == 1

    run(test)


def test_a_body_of_token_ids_is_not_searched_for_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(site: Site) -> None:
        searches = counted(monkeypatch, strict_json, "_check_depth")
        reply = await site.post("/v1/completions", {**TEXT, "output_ids": [7] * 39})
        assert reply.status == 200
        assert not searches

    run(test)


def test_routes_of_answers_are_looked_at_first() -> None:
    async def test(site: Site) -> None:
        first: list[Route] = routes_of(site.server_state)[:3]
        paths = {route.path for route in first}
        assert paths == {"/v1/completions", "/v1/chat/completions", "/generate"}

    run(test)

"""Other spellings of paths are served; an unserved path names its replacement."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from quire.api.http.paths import FOREIGN_PATHS
from quire.api.openapi.operations import OPERATIONS
from quire.base.http_apis import served_path
from tests.cases import each_case
from tests.unit.api.fake_engine import Reply, Site

SAID = {"messages": [{"role": "user", "content": "hi"}]}


def get(path: str, method: str = "GET") -> Reply:
    async def exchange() -> Reply:
        return await Site().call(method, path, b"")

    return asyncio.run(exchange())


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/chat/completions", "/chat/completions/", "/v1/chat/completions//"],
)
def test_chats_are_served_without_the_version_and_with_trailing_slashes(path: str) -> None:
    async def exchange() -> None:
        site = Site()
        assert (await site.post(path, SAID)).status == 200
        name = 'quire_http_responses_total{route="/v1/chat/completions",status="200"}'
        assert site.metric(name) == 1

    asyncio.run(exchange())


@pytest.mark.parametrize(
    "path", ["/models", "/models/", "/models/fake", "/v1/models/", "/health/", "/tokenizer_info/"]
)
def test_small_routes_too(path: str) -> None:
    assert get(path).status == 200


def test_a_root_path_precedes_the_other_spellings() -> None:
    async def exchange() -> None:
        site = Site(root_path="/llm")
        assert (await site.get("/llm/models/")).status == 200
        assert (await site.get("/llm/")).status == 200

    asyncio.run(exchange())


@pytest.mark.parametrize("path", ["/v1/cache/", "/admin/", "/admin//", "/flush_cache/"])
def test_a_trailing_slash_opens_no_admin_path(path: str) -> None:
    async def exchange() -> None:
        site = Site(api_key=("k",))
        headers = {"authorization": "Bearer k"}
        reply = await site.get(path, headers=headers, client=("10.0.0.1", 1))
        assert reply.status == 403

    asyncio.run(exchange())


@each_case("name", FOREIGN_PATHS)
def test_a_path_of_another_server_names_the_replacement(name: str) -> None:
    """A part in braces is any text; a method before the path is one that is not served there."""
    path = name.removeprefix("POST ").replace("{model}", "a/b").replace("{", "").replace("}", "")
    reply = get(path, "POST")
    error: Any = reply.error
    # GET is served at some of them, such as the model of that name.
    assert reply.status == (405 if "allow" in reply.headers else 404)
    if isinstance(error, dict):
        code = {404: "unknown_url", 405: "method_not_allowed"}[reply.status]
        assert error.get("code", error["type"]) in (code, reply.status, "not_found_error")
        error = error["message"]
    assert FOREIGN_PATHS[name] in error


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/fake:generateContent", 405),
        ("/v1/models/fake:streamGenerateContent", 405),
        ("/models/load", 405),
        ("/props", 405),
        ("/v1/responses/compact", 404),
        ("/v1beta/models/fake:generateContent", 404),
        ("/slots/0", 404),
        ("/v1/responses/resp_1", 405),
    ],
)
def test_a_hint_counts_before_the_methods_of_a_path(path: str, status: int) -> None:
    reply = get(path, "POST")
    error = reply.error
    assert reply.status == status
    assert ("; use DELETE, GET" in error["message"]) == (path == "/v1/responses/resp_1")
    assert ("Gemini's API is not served" in error["message"]) == ("Content" in path)


def test_replacements_are_served_and_foreign_paths_are_not() -> None:
    named = {
        operation.replace("/ID", "/{id}")
        for text in FOREIGN_PATHS.values()
        for operation in re.findall(r"[A-Z]+ /[\w/]+", text)
    }
    assert named <= OPERATIONS.keys()
    served = {operation.partition(" ")[2] for operation in OPERATIONS}
    assert not served & {served_path(path) for path in FOREIGN_PATHS if " " not in path}
    assert not OPERATIONS.keys() & FOREIGN_PATHS.keys()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completion", "the nearest path is /v1/chat/completions"),
        ("/v1/v1/completions", "the base URL has /v1 already; use /v1/completions"),
        ("/v1/chat", "use POST /v1/chat/completions; GET"),
        ("/nothing/of/the/kind", 'at "/nothing/of/the/kind"; GET / lists what is'),
    ],
)
def test_an_unknown_path_names_the_nearest(path: str, words: str) -> None:
    reply = get(path, "POST")
    assert reply.status == 404
    assert words in reply.error["message"]


def test_a_wrong_method_names_the_path_and_the_method() -> None:
    reply = get("/v1/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.error["message"] == 'GET is not allowed at "/v1/completions"; use POST'


def test_a_huge_path_is_shortened_in_the_error() -> None:
    assert len(get("/" + "x" * 100_000).error["message"]) < 400

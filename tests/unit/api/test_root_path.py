"""--root-path: below a proxy's path, whether or not the proxy strips it."""

from __future__ import annotations

import asyncio

import pytest

from quire.base.errors import SettingError
from quire.config.server_config import ServerConfig
from tests.unit.api.fake_engine import Site


def test_paths_are_served_with_and_without_the_prefix() -> None:
    async def exchange() -> None:
        site = Site(root_path="/llm/a")
        for path in ("/llm/a/v1/models", "/v1/models", "/llm/a/health", "/llm/a", "/llm/a/"):
            assert (await site.get(path)).status == 200
        assert (await site.post("/llm/a/v1/completions", {"prompt": "a"})).status == 200
        for path in ("/llm/v1/models", "/llm/ab/v1/models", "/llm/a/llm/a/v1/models"):
            assert (await site.get(path)).error["code"] == "unknown_url"

    asyncio.run(exchange())


def test_checks_apply_to_the_served_path() -> None:
    async def exchange() -> None:
        site = Site(root_path="/llm", api_key=("k",))
        for path in ("/llm/v1/models", "/llm/metrics", "/llm/admin"):
            assert (await site.get(path)).status == 401
        assert (await site.get("/llm/health")).status == 200
        keyed = {"Authorization": "Bearer k"}
        far = ("192.0.2.7", 1)
        reply = await site.call("GET", "/llm/admin", b"", headers=keyed, client=far)
        assert (reply.status, reply.error["code"]) == (403, "not_admin")

    asyncio.run(exchange())


def test_routes_are_counted_by_their_own_names() -> None:
    async def exchange() -> None:
        site = Site(root_path="/llm")
        await site.get("/llm/v1/models")
        assert site.metric('quire_http_responses_total{route="/v1/models",status="200"}') == 1

    asyncio.run(exchange())


def test_the_front_page_names_paths_as_requested() -> None:
    async def exchange() -> None:
        text = (await Site(root_path="/llm").get("/llm")).body.decode()
        assert "/llm/v1/chat/completions, /llm/v1/completions" in text
        assert " /v1" not in text

    asyncio.run(exchange())


def test_the_document_and_its_page_name_the_prefix() -> None:
    async def exchange() -> None:
        site = Site(root_path="/llm")
        document = (await site.get("/llm/openapi.json")).json
        assert document["servers"] == [{"url": "/llm"}]
        assert "/v1/completions" in document["paths"]
        page = (await site.get("/docs", headers={"host": "localhost:8000"})).body.decode()
        assert "http://localhost:8000/llm" in page
        assert "servers" not in (await Site().get("/openapi.json")).json

    asyncio.run(exchange())


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "//llm", "/a b", "/a?b", "/v1"])
def test_an_invalid_prefix_is_rejected_with_a_reason(path: str) -> None:
    with pytest.raises(SettingError, match=r"root_path is .*(such as /llm|only the prefix)"):
        ServerConfig(root_path=path)

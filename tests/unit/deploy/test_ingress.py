"""The ingress without Ray: a request without a known key, while no engine is up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.deploy.ray_serve.app_args import read_args
from quire.deploy.ray_serve.ingress import Ingress


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_wrong_key_is_401_in_the_form_of_its_api_and_starts_no_engine(path: str) -> None:
    sent: list[Any] = []

    async def no_addresses() -> list[str]:
        return []

    async def ask_for_engine() -> None:
        raise AssertionError("a request without a key has started an engine")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def story() -> None:
        ingress = Ingress(read_args({"settings": {"api_key": "k"}}), no_addresses, ask_for_engine)
        await ingress.start()
        try:
            headers = [(b"authorization", b"Bearer other")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
            await ingress(scope, receive, send)
        finally:
            await ingress.stop()

    asyncio.run(story())
    assert sent[0]["status"] == 401
    error = json.loads(sent[1]["body"])["error"]
    assert "API key" in (error if isinstance(error, str) else error["message"])


def test_a_page_of_an_accepted_origin_may_read_why_it_is_refused() -> None:
    sent: list[Any] = []

    async def nothing() -> list[str]:
        return []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def story() -> None:
        router = {"cors-origin": ["https://app.example"]}
        args = read_args({"settings": {"api_key": "k"}, "router": router})
        ingress = Ingress(args, nothing, nothing)
        await ingress.start()
        try:
            headers = [(b"origin", b"https://app.example")]
            scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
            await ingress(scope, receive, send)
        finally:
            await ingress.stop()

    asyncio.run(story())
    assert sent[0]["status"] == 401
    assert (b"access-control-allow-origin", b"https://app.example") in sent[0]["headers"]

"""Servers without keys: programs are answered, pages of other sites are not."""

from __future__ import annotations

import asyncio

from tests.cases import each_case
from tests.unit.api.fake_engine import Site


def status(headers: dict[str, str], **settings: object) -> int:
    async def exchange() -> int:
        site = Site(**settings)
        return (await site.post("/v1/completions", {"prompt": "a"}, headers=headers)).status

    return asyncio.run(exchange())


@each_case(
    "headers",
    [
        {},
        {"host": "localhost"},
        {"host": "LOCALHOST:8000"},
        {"host": "127.0.0.1:8000"},
        {"host": "127.8.8.8"},
        {"host": "[::1]:8000"},
        {"host": "quire.localhost:1"},
        {"host": "localhost:8000", "content-type": "application/x-www-form-urlencoded"},
        {"host": "localhost:8000", "origin": "http://localhost:8000"},
    ],
)
def test_programs_and_our_own_pages_are_answered(headers: dict[str, str]) -> None:
    assert status(headers) == 200


@each_case(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "localhost.evil.example:8000"},
        {"host": "192.168.1.1"},
        {"host": "[::1"},
        {"host": ""},
        {"host": "localhost:8000", "origin": "http://evil.example"},
        {"host": "localhost:8000", "origin": "http://localhost:3000"},
        {"host": "localhost:8000", "origin": "null"},
        {"origin": "http://evil.example"},
    ],
)
def test_foreign_pages_and_names_are_rejected(headers: dict[str, str]) -> None:
    assert status(headers) == 403


def test_a_key_or_another_address_disables_the_check() -> None:
    foreign = {"host": "a.example", "origin": "http://b.example"}
    assert status({**foreign, "authorization": "Bearer k"}, api_key=("k",)) == 200
    assert status({"host": "a.example"}, host="0.0.0.0", insecure=True) == 200
    assert status(foreign, host="0.0.0.0", insecure=True) == 403


def test_a_wrong_method_lists_the_allowed_ones() -> None:
    async def exchange() -> None:
        reply = await Site().get("/v1/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")

    asyncio.run(exchange())

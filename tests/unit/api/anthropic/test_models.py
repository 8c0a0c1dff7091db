"""GET /v1/models in Anthropic's form, chosen by a header, with the key header of its clients."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, FakeEngine, Reply, Site

PATH = "/v1/models"
VERSION = {"anthropic-version": "2023-06-01"}
NAMES = ("fake", "b", "c", "d")


def get(path: str, *, headers: dict[str, str] | None = VERSION, **settings: Any) -> Reply:
    plain, _, query = path.partition("?")

    async def exchange() -> Reply:
        made: Any = FakeEngine(card=replace(CARD, aliases=NAMES[1:]))
        site = Site(made, **settings)
        return await site.call("GET", plain, b"", headers=headers, query=query.encode())

    return asyncio.run(exchange())


def test_a_model_has_the_keys_that_the_sdk_reads() -> None:
    model = get(f"{PATH}/b", max_output_tokens=32).json
    assert model == {
        "type": "model",
        "id": "b",
        "display_name": "b",
        "created_at": "2023-11-14T22:13:20+00:00",
        "max_input_tokens": 64,
        "max_tokens": 32,
        "lifecycle": "active",
        "capabilities": None,
        "deprecated_at": None,
        "line": None,
        "retires_at": None,
    }
    assert get(PATH).json["data"][1] == get(f"{PATH}/b").json
    assert get(f"{PATH}/e").status == 404


@each_case(
    ("query", "names", "has_more"),
    [
        ("", NAMES, False),
        ("?beta=true", NAMES, False),
        ("?limit=3", NAMES[:3], True),
        ("?limit=2&after_id=b", NAMES[2:], False),
        ("?limit=1&after_id=b", NAMES[2:3], True),
        ("?after_id=d", (), False),
        ("?limit=2&before_id=d", NAMES[1:3], True),
        ("?limit=3&before_id=d", NAMES[:3], False),
        ("?before_id=fake", (), False),
    ],
)
def test_pages(query: str, names: tuple[str, ...], has_more: bool) -> None:
    page = get(PATH + query).json
    assert tuple(model["id"] for model in page["data"]) == names
    ends = (names[0], names[-1]) if names else (None, None)
    assert (page["first_id"], page["last_id"], page["has_more"]) == (*ends, has_more)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        *(("?limit=0", 400), ("?limit=-1", 400), ("?limit=1001", 400), ("?limit=", 400)),
        *(("?other=1", 400), ("?before_id=b&after_id=b", 400), ("?after_id=none", 404)),
    ],
)
def test_other_pages_are_refused(query: str, status: int) -> None:
    assert get(PATH + query).status == status


@pytest.mark.parametrize("path", [PATH, f"{PATH}/b"])
def test_without_the_header_the_form_is_openai_s(path: str) -> None:
    assert get(path, headers=None).json["object"] in ("list", "model")


@pytest.mark.parametrize("name", ["x-api-key", "authorization"])
def test_the_key_is_read_from_either_header(name: str) -> None:
    value = "k" if name == "x-api-key" else "Bearer k"
    for headers in (VERSION, {}):
        assert get(PATH, headers={**headers, name: value}, api_key=("k",)).status == 200
        refused = get(PATH, headers={**headers, name: f"{value}x"}, api_key=("k",))
        assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
    assert get(PATH, headers={}, api_key=("k",)).status == 401


def test_a_limit_is_checked_in_openai_s_form_too() -> None:
    assert get(f"{PATH}?limit=1001", headers={}).status == 400
    assert get(f"{PATH}?limit=1", headers={}).status == 200

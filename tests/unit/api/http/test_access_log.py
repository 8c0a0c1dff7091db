"""The access log: one line per request, equal fields in each format, and no content."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.base.errors import WorkerError
from quire.config.tenants import ONLY_TENANT, Tenant, key_digest
from tests.unit.api.fake_engine import Site

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {
    "authorization": "Bearer a-secret",
    "x-request-id": "mine-1",
    "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
}
SEARCH = Tenant(name="search", key_digests=(key_digest("a-secret"),))
PATH = "/v1/completions"


def logged(form: str, path: str = PATH, **fields: Any) -> tuple[list[str], str]:
    """Return the log's lines after one request, and the id of its response."""

    async def exchange() -> tuple[list[str], str]:
        site = Site(tenants=(ONLY_TENANT, SEARCH), access_log=form)
        body = {"prompt": "private words", **fields}
        reply = await site.post(path, body, headers=HEADERS)
        lines = site.log.getvalue().splitlines()
        return lines, "" if reply.status != 200 or fields.get("stream") else reply.json["id"]

    return asyncio.run(exchange())


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_line_has_the_operators_fields(stream: bool) -> None:
    lines, answer_id = logged("json", stream=stream)
    assert len(lines) == 1
    told = json.loads(lines[0])
    took_ms = told.pop("took_ms")
    assert isinstance(took_ms, float)
    assert told.pop("time").endswith("Z")
    request = told.pop("request")
    assert request == answer_id if answer_id else request.startswith("cmpl-")
    assert told == {
        "level": "info",
        "component": "test",
        "event": "request",
        "method": "POST",
        "route": PATH,
        "status": 200,
        "name": "mine-1",
        "trace": TRACE,
        "tenant": "search",
        "prompt_tokens": 13,
        "cached_tokens": 2,
        "output_tokens": 2,
        "finish": "stop",
        "ttft_ms": 2.0,
    }


def test_each_format_has_the_same_fields() -> None:
    told = json.loads(logged("json")[0][0])
    frame = {"time", "level", "component", "event"}
    text = logged("text")[0][0].split("request ", 1)[1]
    assert [part.split("=")[0] for part in text.split()] == [
        name for name in told if name not in frame
    ]


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_format_has_content_or_keys(form: str) -> None:
    for path in (PATH, "/private-path"):
        (line,) = logged(form, path)[0]
        assert "private" not in line
        assert "secret" not in line
        assert "Hello" not in line


def test_off_logs_only_failures() -> None:
    async def exchange() -> str:
        site = Site(access_log="off")
        assert (await site.post(PATH, {"prompt": "a"})).status == 200
        assert (await site.post(PATH, {"prompt": 5})).status == 400
        assert site.log.getvalue() == ""
        site.engine.fails_with = ValueError("a fault of ours")
        assert (await site.post(PATH, {"prompt": "a"})).status == 500
        return site.log.getvalue()

    assert "request failed" in asyncio.run(exchange())


def test_a_rejected_request_has_a_line_with_its_status() -> None:
    (line,) = logged("json", top_p=7)[0]
    told = json.loads(line)
    assert (told["status"], told["route"]) == (400, PATH)
    assert "output_tokens" not in told


def test_a_resumable_stream_has_its_line_at_its_end_not_at_a_disconnect() -> None:
    async def exchange() -> None:
        site = Site(access_log="json")
        gone, go_on = asyncio.Event(), asyncio.Event()
        site.engine.pause = go_on.wait
        body = {"prompt": "a", "stream": True, "stream_options": {"resumable": True}}

        async def leave(part: bytes) -> None:
            gone.set()

        reply = await site.post(PATH, body, gone=gone, on_part=leave)
        assert reply.status == 200
        assert site.log.getvalue() == ""
        go_on.set()
        while not site.log.getvalue():
            await asyncio.sleep(0)
        told = json.loads(site.log.getvalue())
        assert (told["output_tokens"], told["finish"], told["status"]) == (2, "stop", 200)

    asyncio.run(asyncio.wait_for(exchange(), 30))


def test_a_stream_that_failed_midway_logs_the_error() -> None:
    async def exchange() -> None:
        site = Site(access_log="json")
        site.engine.fails_with, site.engine.fails_after = WorkerError("it died"), 1
        reply = await site.post(PATH, {"prompt": "a", "stream": True})
        assert reply.status == 200
        told = json.loads(site.log.getvalue())
        assert (told["status"], told["error"], told["finish"]) == (200, "worker_error", "open")

    asyncio.run(exchange())


def test_a_disconnect_from_a_whole_answer_is_logged_without_an_error() -> None:
    async def exchange() -> None:
        site = Site(access_log="json")
        gone = asyncio.Event()

        async def leave() -> None:
            gone.set()
            await asyncio.Event().wait()

        site.engine.pause = leave
        await site.post(PATH, {"prompt": "a"}, gone=gone)
        told = json.loads(site.log.getvalue())
        assert (told["status"], told["output_tokens"]) == (499, 1)
        assert "error" not in told

    asyncio.run(exchange())


def test_polled_routes_are_logged_at_level_debug() -> None:
    async def exchange() -> None:
        for form in ("text", "json"):
            site = Site(access_log=form)
            assert (await site.get("/health")).status == 200
            assert site.log.getvalue() == ""
            site.server_state.log.level = "debug"
            assert (await site.get("/health")).status == 200
            (line,) = site.log.getvalue().splitlines()
            assert "/health" in line
            assert "debug" in line

    asyncio.run(exchange())

"""The outermost layer and the small routes: health, models, keys, log lines, counters."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire.api.http.sockets import is_loopback, listen, url_of
from quire.api.openapi.operations import OPERATIONS
from quire.base.errors import SettingError
from quire.config.server_config import ServerConfig
from tests.unit.api.fake_engine import FakeEngine, Site

CHAT = "/v1/chat/completions"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_health_is_200_only_while_ready() -> None:
    async def exchange() -> None:
        site = Site()
        reply = await site.get("/health")
        assert (reply.status, reply.json["state"]) == (200, "ready")
        site.server_state.lifecycle.drain()
        reply = await site.get("/health")
        assert (reply.status, reply.json["state"]) == (503, "draining")
        site.engine.dead.set()
        reply = await site.get("/health")
        assert (reply.status, reply.json["state"]) == (503, "dead")
        assert "killed" in reply.json["reason"]

    run(exchange)


def test_while_the_model_loads_health_reports_it_and_requests_are_rejected() -> None:
    async def exchange() -> None:
        site = Site()
        site.server_state._engine = None
        reply = await site.get("/health")
        assert (reply.status, reply.json["state"]) == (503, "starting")
        reply = await site.post("/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert (await site.get("/v1/models")).status == 503

    run(exchange)


def test_draining_rejects_new_requests_and_is_reported() -> None:
    async def exchange() -> None:
        site = Site()
        site.server_state.lifecycle.drain()
        reply = await site.post("/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        assert not site.engine.asked

    run(exchange)


def test_a_dead_engine_answers_with_its_reason() -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.dead.set()
        reply = await site.post("/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.error["code"]) == (500, "worker_error")
        assert "killed" in reply.error["message"]

    run(exchange)


def test_models_lists_the_one_model() -> None:
    async def exchange() -> None:
        site = Site()
        listed = (await site.get("/v1/models")).json
        assert [model["id"] for model in listed["data"]] == ["fake"]
        assert listed["data"][0]["quantization"] == "none"
        assert (await site.get("/v1/models/fake")).json == listed["data"][0]
        reply = await site.get("/v1/models/org/other")
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")

    run(exchange)


def test_version_and_the_front_page_tell_what_this_is() -> None:
    async def exchange() -> None:
        site = Site()
        assert (await site.get("/version")).json["name"] == "quire"
        assert b"/v1/chat/completions" in (await site.get("/")).body

    run(exchange)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("POST", "/v1/audio/speech", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/completions/", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods_have_errors_of_the_same_form(
    method: str, path: str, status: int, code: str
) -> None:
    async def exchange() -> None:
        reply = await Site().call(method, path, b"")
        assert (reply.status, reply.error["code"]) == (status, code)

    run(exchange)


def test_a_key_opens_all_routes_and_without_one_only_health() -> None:
    async def exchange() -> None:
        site = Site(api_key=("secret",))
        for path in ("/health", "/version", "/"):
            assert (await site.get(path)).status == 200
        for path in ("/metrics", "/v1/models", "/nowhere"):
            assert (await site.get(path)).status == 401
        keyed = {"Authorization": "Bearer secret"}
        assert (await site.get("/v1/models", headers=keyed)).status == 200
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await site.post(CHAT, body)).error["code"] == "invalid_api_key"
        assert (await site.post(CHAT, body, headers=keyed)).status == 200
        assert len(site.engine.asked) == 1

    run(exchange)


def test_a_request_is_one_log_line_without_content_or_key() -> None:
    async def exchange() -> None:
        site = Site(api_key=("secret-key",))
        keyed = {"Authorization": "Bearer secret-key"}
        reply = await site.post("/v1/completions", {"prompt": "a private prompt"}, headers=keyed)
        lines = site.log.getvalue().splitlines()
        assert len(lines) == 1
        assert "route=/v1/completions status=200" in lines[0]
        assert f"request={reply.headers['x-request-id']}" in lines[0]
        assert "prompt_tokens=16" in lines[0]
        assert "output_tokens=2 finish=stop" in lines[0]
        assert "private" not in lines[0]
        assert "secret" not in lines[0]

    run(exchange)


def test_polled_routes_are_logged_only_when_they_fail() -> None:
    async def exchange() -> None:
        site = Site()
        await site.get("/health")
        await site.get("/metrics")
        assert site.log.getvalue() == ""
        site.server_state.lifecycle.drain()
        await site.get("/health")
        assert "route=/health status=503" in site.log.getvalue()

    run(exchange)


def test_paths_never_become_labels_or_log_fields() -> None:
    async def exchange() -> None:
        site = Site()
        await site.get("/v1/models/some-name")
        await site.get("/secret-path")
        text = site.server_state.scrape().decode()
        assert 'route="/v1/models/{name:path}",status="404"' in text
        assert 'route="unknown",status="404"' in text
        assert "secret-path" not in text + site.log.getvalue()

    run(exchange)


def test_requests_move_the_metrics() -> None:
    async def exchange() -> None:
        site = Site()
        await site.post("/v1/completions", {"prompt": "abc", "n": 2})
        assert site.metric('quire_requests_total{finish_reason="stop"}') == 2
        assert site.metric("quire_prompt_tokens_total") == 3
        assert site.metric("quire_generated_tokens_total") == 4
        assert site.metric("quire_time_to_first_token_seconds_count") == 2
        assert site.metric("quire_batch_rows_count") == 2
        assert site.metric("quire_batch_tokens_sum") == 3 + 2
        name = 'quire_http_responses_total{route="/v1/completions",status="200"}'
        assert site.metric(name) == 1

    run(exchange)


def test_non_http_scopes_pass_through() -> None:
    async def exchange() -> None:
        site = Site()

        async def never() -> Any:
            raise AssertionError("nothing is read")

        await site.app({"type": "lifespan"}, never, never)

    run(exchange)


def test_a_port_in_use_is_reported_with_a_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=rf"port {port} on 127.0.0.1 is in use; .*--port"):
            listen(ServerConfig(port=port))


def test_a_taken_port_cannot_be_taken_by_a_second_server() -> None:
    with listen(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(SettingError, match="in use"):
            listen(ServerConfig(port=port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_beyond_loopback_a_key_or_an_explicit_flag_is_required(host: str) -> None:
    with pytest.raises(SettingError, match="--api-key"):
        listen(ServerConfig(host=host, port=0))


@pytest.mark.parametrize("settings", [{"api_key": ("k",)}, {"insecure": True}])
def test_with_a_key_or_the_flag_all_addresses_are_allowed(settings: dict[str, Any]) -> None:
    with listen(ServerConfig(host="0.0.0.0", port=0, **settings)) as listening:
        assert listening.getsockname()[0] == "0.0.0.0"


def test_an_address_of_another_machine_is_rejected_with_a_reason() -> None:
    with pytest.raises(SettingError, match="not an address of this machine"):
        listen(ServerConfig(host="192.0.2.1", port=0, insecure=True))


def test_a_host_that_does_not_resolve_is_rejected_with_a_reason() -> None:
    with pytest.raises(SettingError, match="cannot be resolved"):
        listen(ServerConfig(host="no-such-host.invalid", port=0, insecure=True))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("10.0.0.1", False), ("localhost.evil.example", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognized(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_fake_engine_follows_its_script() -> None:
    """The fake engine of these tests is itself checked once."""

    async def exchange() -> None:
        site = Site(FakeEngine("x", "y", "z"))
        reply = await site.post("/v1/completions", {"prompt": "a"})
        assert reply.json["choices"][0]["text"] == "xyz"

    run(exchange)


def test_an_exchange_without_a_status_is_counted_as_an_error() -> None:
    class Panic(BaseException):
        pass

    def panics(*_: Any, **__: Any) -> Any:
        raise Panic

    async def exchange() -> None:
        site = Site()
        site.engine.tokenizer.encode = panics
        with pytest.raises(Panic):
            await site.post("/v1/completions", {"prompt": "a"})
        assert "status=500" in site.log.getvalue()

    run(exchange)


def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    async def exchange() -> None:
        site = Site()
        site.engine.tokenizer.encode = None
        for path, body in (
            ("/v1/completions", {"prompt": "a" * 6000}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * 6000}]}),
        ):
            reply = await site.post(path, body)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert "at least 60" in reply.error["message"]

    run(exchange)


def test_a_rejection_while_draining_has_reason_and_retry_after() -> None:
    async def exchange() -> None:
        site = Site(grace_s=40.0)
        site.server_state.lifecycle.refuse_new()
        for said, again in (("drained by an admin", "10"), ("is shutting down", "40")):
            reply = await site.post("/v1/completions", {"prompt": "a"})
            assert (reply.status, reply.headers["retry-after"]) == (503, again)
            assert said in reply.error["message"]
            assert said in (await site.get("/health")).json["reason"]
            site.server_state.lifecycle.drain()

    asyncio.run(exchange())


def test_each_response_has_an_id_in_the_header_of_its_api() -> None:
    """Also where its route gave it none."""

    async def exchange() -> None:
        site = Site()
        gets = {name.partition(" ")[2] for name in OPERATIONS if name.startswith("GET ")}
        endless = {"/admin/record", "/health/beats"}  # read until their reader leaves
        for path in sorted(gets - endless):
            reply = await site.get(path.replace("{", "").replace("}", ""))
            id_ = reply.headers["x-request-id"]
            assert re.fullmatch("req-[0-9a-f]{24}", id_), path
            named = await site.get(path, headers={"x-request-id": "mine"})
            assert named.headers["x-request-id"] == "mine"
            if path.startswith("/v1/messages"):
                assert reply.headers["request-id"] == id_
                assert re.fullmatch("req-[0-9a-f]{24}", named.headers["request-id"])
            else:
                assert "request-id" not in reply.headers

    run(exchange)


def test_the_log_has_the_id_of_a_response() -> None:
    async def exchange() -> None:
        site = Site()
        reply = await site.get("/v1/models")
        assert f"request={reply.headers['x-request-id']} " in site.log.getvalue()

    run(exchange)

"""CORS: off by default, preflights before keys, and no foreign page at admin paths."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.server_config import ServerConfig
from tests.cases import each_case
from tests.unit.api.fake_engine import Reply, Site

PAGE = "https://app.example"
PATH = "/v1/completions"
ASKS_FIRST = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def reply_to(
    method: str, headers: dict[str, str], *, path: str = PATH, **settings: Any
) -> tuple[Reply, Site]:
    async def exchange() -> tuple[Reply, Site]:
        site = Site(**settings)
        return await site.call(method, path, b'{"prompt": "a"}', headers=headers), site

    return asyncio.run(exchange())


def allowed(reply: Reply) -> str | None:
    return reply.headers.get("access-control-allow-origin")


def test_without_the_flag_no_response_has_cors_headers() -> None:
    keyed = {"origin": PAGE, "authorization": "Bearer k"}
    reply, _ = reply_to("POST", keyed, api_key=("k",))
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert "vary" not in reply.headers
    assert reply_to("OPTIONS", ASKS_FIRST, api_key=("k",))[0].status == 401


@pytest.mark.parametrize(("origins", "told"), [((PAGE,), PAGE), (("*",), "*")])
def test_a_preflight_is_answered_without_a_key(origins: tuple[str, ...], told: str) -> None:
    reply, site = reply_to("OPTIONS", ASKS_FIRST, api_key=("k",), cors_origin=origins)
    assert (reply.status, reply.body) == (204, b"")
    assert allowed(reply) == told
    assert reply.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    names = reply.headers["access-control-allow-headers"]
    assert names == ASKS_FIRST["access-control-request-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    assert site.log.getvalue() == ""
    assert site.metric('quire_http_responses_total{route="preflight",status="204"}') == 1


def test_a_preflight_does_not_replace_the_key() -> None:
    reply, site = reply_to("POST", {"origin": PAGE}, api_key=("k",), cors_origin=(PAGE,))
    assert (reply.status, allowed(reply)) == (401, PAGE)  # the page may read the reason
    assert site.engine.asked == []


def test_a_response_names_the_origin_and_readable_headers() -> None:
    for body in (b'{"prompt": "a"}', b'{"prompt": "a", "stream": true}', b"{"):

        async def exchange(body: bytes = body) -> Reply:
            site = Site(cors_origin=(PAGE,))
            return await site.call("POST", PATH, body, headers={"origin": PAGE})

        reply = asyncio.run(exchange())
        assert allowed(reply) == PAGE
        assert reply.headers["vary"] == "origin"
        shown = reply.headers["access-control-expose-headers"]
        assert "x-request-id" in shown
        assert "x-quire-error-code" in shown


def test_other_origins_get_no_cors_headers_and_without_keys_no_answer() -> None:
    other = {"origin": "https://app.example.evil"}
    reply, site = reply_to("POST", other, cors_origin=(PAGE,))
    assert (reply.status, allowed(reply)) == (403, None)
    assert site.engine.asked == []
    reply, _ = reply_to("OPTIONS", {**ASKS_FIRST, **other}, api_key=("k",), cors_origin=(PAGE,))
    assert (reply.status, allowed(reply)) == (401, None)
    programs, _ = reply_to("POST", {}, cors_origin=(PAGE,))
    assert (programs.status, allowed(programs), programs.headers["vary"]) == (200, None, "origin")


def test_an_allowed_origin_needs_no_key_without_keys() -> None:
    reply, _ = reply_to("POST", {"host": "localhost", "origin": PAGE}, cors_origin=(PAGE,))
    assert (reply.status, allowed(reply)) == (200, PAGE)
    foreign_name = {"host": "evil.example", "origin": PAGE}
    assert reply_to("POST", foreign_name, cors_origin=("*",))[0].status == 403


@each_case("path", ["/admin/pause", "/admin", "/v1/cache", "/flush_cache"])
@each_case("method", ["OPTIONS", "POST", "GET"])
def test_no_foreign_page_reaches_admin_routes(path: str, method: str) -> None:
    reply, site = reply_to(method, ASKS_FIRST, path=path, cors_origin=("*",))
    assert (reply.status, allowed(reply)) == (403, None)
    assert not site.server_state.lifecycle.paused
    assert site.engine.num_flushes == 0


@pytest.mark.parametrize("names", ["", "a b", "x\r\ny: z", "a," * 4000 + "a"])
def test_invalid_header_names_are_not_echoed(names: str) -> None:
    asked = {**ASKS_FIRST, "access-control-request-headers": names}
    reply, _ = reply_to("OPTIONS", asked, cors_origin=("*",))
    assert reply.status == 204
    assert "access-control-allow-headers" not in reply.headers


def test_options_that_are_no_preflight_are_a_wrong_method() -> None:
    assert reply_to("OPTIONS", {"origin": PAGE}, cors_origin=(PAGE,))[0].status == 405


@pytest.mark.parametrize(
    "origin", ["", "null", "app.example", "https://app.example/", "https://App.example", "**",
               "https://*.example", "https://app.example:"],
)  # fmt: skip
def test_an_invalid_origin_is_rejected_with_an_example(origin: str) -> None:
    with pytest.raises(SettingError, match=r"https://app\.example"):
        ServerConfig(cors_origin=(origin,))


@pytest.mark.parametrize(
    "origin", ["*", "http://localhost:3000", "https://[::1]:8443", "chrome-extension://abc"]
)
def test_origins_as_sent_by_browsers_are_accepted(origin: str) -> None:
    assert ServerConfig(cors_origin=(origin,)).cors_origin == (origin,)

"""Admins: which keys and machines are admins, the log level, and the admin listener."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.api.admin.reload import reload_admin_keys
from quire.api.app import build_admin_app
from quire.api.http.auth import Keys
from quire.api.http.forwarding import is_here
from quire.api.http.origins import ADMIN_PATHS
from quire.api.openai.dialect import OPENAI
from quire.base.errors import NotAuthorized, SettingError
from quire.base.log import LEVELS
from quire.config.admin_keys import read_admin_keys
from quire.config.tenants import ONLY_TENANT, Tenant, key_digest
from tests.cases import each_case
from tests.unit.api.fake_engine import Reply, Site

OPERATOR = Tenant(name="operator", key_digests=(key_digest("o"),), is_admin=True)
GUEST = Tenant(name="guest", key_digests=(key_digest("g"),))
TENANTS = (ONLY_TENANT, OPERATOR, GUEST)
FAR = ("192.0.2.7", 4711)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
def admin_keys(tmp_path: Path) -> str:
    file = tmp_path / "admin-keys"
    file.write_text("# who may drain us\n\n  root  \nsecond\n")
    return str(file)


def asked(
    path: str,
    headers: dict[str, str] | None = None,
    *,
    method: str = "POST",
    client: tuple[str, int] | None = ("127.0.0.1", 1),
    tenants: tuple[Tenant, ...] | None = None,
    body: bytes = b"",
    **settings: Any,
) -> tuple[Reply, Site]:
    async def exchange() -> tuple[Reply, Site]:
        site = Site(tenants=tenants, **settings)
        reply = await site.call(method, path, body, headers=headers, client=client)
        return reply, site

    return asyncio.run(exchange())


def test_without_keys_only_this_machine_is_admin() -> None:
    reply, site = asked("/admin/pause")
    assert (reply.status, site.server_state.lifecycle.paused) == (200, True)
    for client in (FAR, None):  # None: a Unix socket, which may have a proxy in front of it
        reply, site = asked("/admin/pause", client=client, host="0.0.0.0", insecure=True)
        assert (reply.status, reply.error["code"]) == (403, "not_admin")
        assert not site.server_state.lifecycle.paused


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"])
def test_proxied_requests_are_not_local(header: str) -> None:
    reply, _ = asked("/admin/drain", {header: "for=192.0.2.7"})
    assert (reply.status, reply.error["code"]) == (403, "not_admin")


@each_case("path", [*ADMIN_PATHS, "/admin/drain", "/v1/cache/flush", "/admin/new"])
def test_a_plain_key_is_an_admins_only_on_this_machine(path: str) -> None:
    assert asked(path, key("k"), client=FAR, api_key=("k",))[0].status == 403
    assert asked(path, key("k"), api_key=("k",))[0].status in (200, 404, 405)
    assert asked(path, api_key=("k",))[0].status == 401


def test_an_admin_tenant_is_one_from_anywhere() -> None:
    for name, status in (("o", 200), ("g", 403), ("k", 403)):
        reply, _ = asked("/admin/pause", key(name), client=FAR, tenants=TENANTS, api_key=("k",))
        assert reply.status == status


def test_with_an_admin_key_file_its_keys_are_admins_and_api_keys_are_not(admin_keys: str) -> None:
    for name, status in (("root", 200), ("second", 200), ("k", 403), ("nobody", 401)):
        for client in (FAR, ("127.0.0.1", 1)):
            reply, _ = asked(
                "/admin/pause",
                key(name),
                client=client,
                api_key=("k",),
                admin_key_file=admin_keys,
            )
            assert reply.status == status


def test_an_admin_key_alone_leaves_the_other_routes_open(admin_keys: str) -> None:
    body = b'{"prompt": "a"}'
    settings = {"admin_key_file": admin_keys}
    assert asked("/v1/completions", body=body, **settings)[0].status == 200
    assert asked("/metrics", method="GET", **settings)[0].status == 200
    assert asked("/admin/pause", **settings)[0].status == 401
    assert asked("/admin/pause", key("root"), client=FAR, **settings)[0].status == 200
    # And pages stay rejected, as without any key.
    foreign = {"host": "localhost", "origin": "http://evil.example"}
    assert asked("/v1/completions", foreign, body=body, **settings)[0].status == 403


def test_with_an_admin_key_alone_any_host_name_is_accepted(admin_keys: str) -> None:
    settings: dict[str, Any] = {"host": "0.0.0.0", "insecure": True, "admin_key_file": admin_keys}
    named = {"host": "models.example", **key("root")}
    assert asked("/admin/pause", named, client=FAR, **settings)[0].status == 200


def test_an_admin_key_opens_every_route(admin_keys: str) -> None:
    settings: dict[str, Any] = {"api_key": ("k",), "admin_key_file": admin_keys}
    body = b'{"prompt": "a"}'
    assert asked("/v1/completions", key("root"), body=body, **settings)[0].status == 200
    assert asked("/metrics", key("root"), method="GET", **settings)[0].status == 200


def test_every_plain_key_may_read_metrics_from_anywhere(admin_keys: str) -> None:
    """A scraper is on another machine, and needs no right to drain this one."""
    for settings in ({}, {"admin_key_file": admin_keys}):
        reply, _ = asked("/metrics", key("k"), method="GET", client=FAR, api_key=("k",), **settings)
        assert reply.status == 200


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_file_without_a_key_is_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingError, match="has no key"):
        read_admin_keys(str(file))


def test_an_unreadable_file_is_rejected_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--admin-key-file"):
        read_admin_keys(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="cannot be read"):
        read_admin_keys(str(tmp_path / "binary"))


def test_a_key_may_be_given_as_a_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"plain\nsha256:{key_digest('hashed').upper()}\n")
    assert read_admin_keys(str(file)) == (key_digest("plain"), key_digest("hashed"))
    for name, status in (("plain", 200), ("hashed", 200), (key_digest("hashed"), 401)):
        reply, _ = asked("/admin/pause", key(name), admin_key_file=str(file))
        assert reply.status == status
    file.write_text("plain\nsha256:abc\n")
    with pytest.raises(SettingError, match=r"line 2 .* 3 characters .* 64 hex digits"):
        read_admin_keys(str(file))


def test_a_reloaded_admin_key_file_takes_effect_if_valid(admin_keys: str) -> None:
    async def statuses(site: Site) -> list[int]:
        names = ("root", "new")
        return [(await site.post("/admin/pause", {}, headers=key(name))).status for name in names]

    async def exchange() -> None:
        site = Site(admin_key_file=admin_keys)
        assert await statuses(site) == [200, 401]
        Path(admin_keys).write_text("new\n")
        await reload_admin_keys(site.server_state)
        assert await statuses(site) == [401, 200]
        Path(admin_keys).write_text("# nobody\n")
        await reload_admin_keys(site.server_state)
        assert await statuses(site) == [401, 200]
        assert "is not used" in site.log.getvalue()
        assert "has no key" in site.log.getvalue()

    asyncio.run(exchange())


def test_a_key_that_is_both_counts_as_the_admins() -> None:
    caller = Keys(("k",), None, (key_digest("k"),)).check(
        "/admin", lambda: b"k", is_here=lambda: False
    )
    assert caller.sees_all
    with pytest.raises(NotAuthorized):
        Keys((), None, (key_digest("k"),)).check("/admin", lambda: OPENAI.read_key([]))


def test_with_an_admin_port_other_listeners_lack_the_admin_routes() -> None:
    async def exchange() -> None:
        site = Site(admin_port=0)
        for method, path in (("POST", "/admin/pause"), ("GET", "/v1/cache"), ("GET", "/admin")):
            assert (await site.call(method, path, b"")).error["code"] == "unknown_url"
        assert (await site.get("/metrics")).status == 200
        site.app = build_admin_app(site.server_state)
        assert (await site.post("/v1/completions", {"prompt": "a"})).status == 404
        for path in ("/admin", "/v1/cache", "/health", "/metrics", "/version"):
            assert (await site.get(path)).status == 200
        # The admin port accepts only this machine, whatever was forwarded.
        assert (await site.call("POST", "/admin/pause", b"", client=FAR)).status == 200
        assert site.server_state.lifecycle.paused

    asyncio.run(exchange())


def test_the_admin_listener_requires_existing_keys(admin_keys: str) -> None:
    async def exchange(name: str, **settings: Any) -> int:
        site = Site(admin_port=0, **settings)
        site.app = build_admin_app(site.server_state)
        return (await site.call("POST", "/admin/pause", b"", headers=key(name))).status

    keyed: dict[str, Any] = {"api_key": ("k",)}
    assert asyncio.run(exchange("k", **keyed)) == 200
    assert asyncio.run(exchange("x", **keyed)) == 401
    keyed["admin_key_file"] = admin_keys
    assert asyncio.run(exchange("k", **keyed)) == 403
    assert asyncio.run(exchange("root", **keyed)) == 200


def test_pages_of_other_sites_are_no_admins_at_any_listener() -> None:
    async def exchange(headers: dict[str, str]) -> int:
        site = Site(admin_port=0, host="0.0.0.0", insecure=True, cors_origin=("*",))
        site.app = build_admin_app(site.server_state)
        return (await site.call("POST", "/admin/pause", b"", headers=headers)).status

    assert asyncio.run(exchange({"host": "localhost:1"})) == 200
    assert asyncio.run(exchange({"host": "localhost:1", "origin": "http://e.example"})) == 403
    assert asyncio.run(exchange({"host": "e.example"})) == 403  # a name pointed at loopback


def test_a_dns_rebinding_page_is_no_admin_without_keys() -> None:
    """The name's owner points it at 127.0.0.1, so Origin, Host and addresses agree."""
    headers = {"host": "rebound.example", "origin": "http://rebound.example"}
    for settings in ({"host": "0.0.0.0", "insecure": True}, {"cors_origin": ("*",)}):
        reply, site = asked("/admin/pause", headers, **settings)
        assert (reply.status, reply.error["code"]) == (403, "foreign_page")
        assert not site.server_state.lifecycle.paused


def test_the_log_writes_from_the_configured_level_on() -> None:
    async def exchange() -> None:
        site = Site()
        for level in LEVELS:
            reply = await site.call("PUT", "/admin/log-level", f'{{"level": "{level}"}}'.encode())
            assert (reply.status, reply.json["log_level"]) == (200, level)
            site.log.truncate(0)
            site.server_state.log.debug("lowest")
            site.server_state.log.event("low")
            site.server_state.log.warning("middle")
            site.server_state.log.error("high")
            words = ["lowest", "low ", "middle", "high"]
            logged = [word for word in words if word in site.log.getvalue().replace("\n", " ")]
            assert logged == words[LEVELS.index(level) :]
        assert (await site.get("/admin")).json["log_level"] == "error"

    asyncio.run(exchange())


@pytest.mark.parametrize(
    "body", [b'{"level": "trace"}', b'{"level": 3}', b'{"level": []}', b"{}",
             b'{"level": "info", "more": 1}', b"", b"[]"],
)  # fmt: skip
def test_an_invalid_level_changes_nothing(body: bytes) -> None:
    reply, site = asked("/admin/log-level", method="PUT", body=body)
    assert reply.status == 400
    assert site.server_state.log.level == "info"


@pytest.mark.parametrize(
    ("client", "here"),
    [(("127.0.0.1", 1), True), (("::1", 1), True), (FAR, False), (None, False)],
)
def test_local_means_a_loopback_address_without_proxy_headers(client: Any, here: bool) -> None:
    assert is_here({"client": client, "headers": []}) is here
    assert not is_here({"client": client, "headers": [(b"x-forwarded-for", b"127.0.0.1")]})


@each_case(
    "header",
    [
        *("forwarded", "via", "x-forwarded", "x-forwarded-for", "x-forwarded-proto"),
        *("x-forwarded-host", "x-forwarded-port", "x-forwarded-server", "x-forwarded-prefix"),
        *("x_forwarded_for", "x-original-forwarded-for", "x-original-url", "x-real-ip"),
        *("cf-connecting-ip", "cf-ray", "cdn-loop", "true-client-ip", "fastly-client-ip"),
        *("x-client-ip", "x-cluster-client-ip", "x-envoy-external-address", "fly-client-ip"),
        *("x-amzn-trace-id", "x-azure-clientip", "x-appengine-user-ip", "tailscale-user-login"),
        *("x-arr-ssl", "x-vercel-forwarded-for", "cloudfront-viewer-address", "x-varnish"),
    ],
)
def test_a_forwarding_header_makes_a_local_peer_a_proxy(header: str) -> None:
    headers = [(b"host", b"localhost"), (header.encode(), b"127.0.0.1")]
    assert not is_here({"client": ("127.0.0.1", 1), "headers": headers})


def test_headers_sent_by_clients_do_not_make_them_proxies() -> None:
    names = ("host", "user-agent", "accept", "x-request-id", "traceparent", "x-stainless-os")
    headers = [(name.encode(), b"a") for name in names]
    assert is_here({"client": ("127.0.0.1", 1), "headers": headers})


@each_case(
    ("method", "path", "body", "said"),
    [
        ("PUT", "/admin/log-level", b"{}", "level is missing; debug, info, warning, error are"),
        ("PUT", "/admin/log-level", b'{"x": 1}', '"x" is not a field of this request, which takes'),
        ("PUT", "/admin/log-level?x=1", b'{"level": "info"}', 'the parameter "x" in the query; it'),
        ("POST", "/admin/pause", b"level", 'POST /admin/pause was sent with the body "level"; it'),
        ("POST", "/v1/cache/flush", b'{"all": 1}', "takes no parameters: leave it out"),
        ("GET", "/v1/engine?full=1", b"", 'the parameter "full" in the query; it takes no'),
        ("GET", "/v1/requests/a/timeline?x=1", b"", "takes no parameters: leave it out"),
        ("GET", "/v1/cache?x=1", b"", '"x" is no parameter of this route; prefixes is: leave'),
        ("GET", "/admin/record?x=1", b"", "content and seconds are: leave the other out"),
    ],
)
def test_a_parameter_that_a_route_does_not_take_is_named(
    method: str, path: str, body: bytes, said: str
) -> None:
    path, _, query = path.partition("?")

    async def exchange() -> Reply:
        return await Site().call(method, path, body, query=query.encode())

    reply = asyncio.run(exchange())
    assert reply.status == 400
    assert said in reply.error["message"]

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


def test_without_keys_this_machine_is_the_admin_and_no_other() -> None:
    reply, site = asked("/admin/pause")
    assert (reply.status, site.server_state.lifecycle.paused) == (200, True)
    for client in (FAR, None):  # None: a Unix socket, which may have a proxy in front of it
        reply, site = asked("/admin/pause", client=client, host="0.0.0.0", insecure=True)
        assert (reply.status, reply.error["code"]) == (403, "not_admin")
        assert not site.server_state.lifecycle.paused


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"])
def test_what_a_proxy_passes_on_is_not_asked_by_this_machine(header: str) -> None:
    reply, _ = asked("/admin/drain", {header: "for=192.0.2.7"})
    assert (reply.status, reply.error["code"]) == (403, "not_admin")


@pytest.mark.parametrize("path", [*ADMIN_PATHS, "/admin/drain", "/v1/cache/flush", "/admin/new"])
def test_a_plain_key_is_an_admins_on_this_machine_only(path: str) -> None:
    assert asked(path, key("k"), client=FAR, api_key=("k",))[0].status == 403
    assert asked(path, key("k"), api_key=("k",))[0].status in (200, 404, 405)
    assert asked(path, api_key=("k",))[0].status == 401


def test_a_tenant_that_is_an_admin_is_one_from_anywhere() -> None:
    for name, status in (("o", 200), ("g", 403), ("k", 403)):
        reply, _ = asked("/admin/pause", key(name), client=FAR, tenants=TENANTS, api_key=("k",))
        assert reply.status == status


def test_with_an_admin_key_file_its_keys_are_and_no_api_key(admin_keys: str) -> None:
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


def test_an_admin_key_alone_leaves_the_rest_open(admin_keys: str) -> None:
    body = b'{"prompt": "a"}'
    settings = {"admin_key_file": admin_keys}
    assert asked("/v1/completions", body=body, **settings)[0].status == 200
    assert asked("/metrics", method="GET", **settings)[0].status == 200
    assert asked("/admin/pause", **settings)[0].status == 401
    assert asked("/admin/pause", key("root"), client=FAR, **settings)[0].status == 200
    # And pages stay out, as where there is no key at all.
    foreign = {"host": "localhost", "origin": "http://evil.example"}
    assert asked("/v1/completions", foreign, body=body, **settings)[0].status == 403


def test_with_an_admin_key_alone_it_is_asked_by_any_name(admin_keys: str) -> None:
    settings: dict[str, Any] = {"host": "0.0.0.0", "insecure": True, "admin_key_file": admin_keys}
    named = {"host": "models.example", **key("root")}
    assert asked("/admin/pause", named, client=FAR, **settings)[0].status == 200


def test_an_admin_key_opens_everything(admin_keys: str) -> None:
    settings: dict[str, Any] = {"api_key": ("k",), "admin_key_file": admin_keys}
    body = b'{"prompt": "a"}'
    assert asked("/v1/completions", key("root"), body=body, **settings)[0].status == 200
    assert asked("/metrics", key("root"), method="GET", **settings)[0].status == 200


def test_metrics_are_counted_for_every_plain_key_wherever_it_is(admin_keys: str) -> None:
    """A scraper is on another machine, and needs no right to drain this one."""
    for settings in ({}, {"admin_key_file": admin_keys}):
        reply, _ = asked("/metrics", key("k"), method="GET", client=FAR, api_key=("k",), **settings)
        assert reply.status == 200


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingError, match="has no key"):
        read_admin_keys(str(file))


def test_a_file_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--admin-key-file"):
        read_admin_keys(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="cannot be read"):
        read_admin_keys(str(tmp_path / "binary"))


def test_a_key_may_stand_there_as_a_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"plain\nsha256:{key_digest('hashed').upper()}\n")
    assert read_admin_keys(str(file)) == (key_digest("plain"), key_digest("hashed"))
    for name, status in (("plain", 200), ("hashed", 200), (key_digest("hashed"), 401)):
        reply, _ = asked("/admin/pause", key(name), admin_key_file=str(file))
        assert reply.status == status
    file.write_text("plain\nsha256:abc\n")
    with pytest.raises(SettingError, match=r"line 2 .* 3 characters .* 64 hex digits"):
        read_admin_keys(str(file))


def test_an_admin_key_file_read_again_counts_from_then_on_if_it_is_one(admin_keys: str) -> None:
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


def test_with_an_admin_port_the_others_do_not_have_its_routes() -> None:
    async def exchange() -> None:
        site = Site(admin_port=0)
        for method, path in (("POST", "/admin/pause"), ("GET", "/v1/cache"), ("GET", "/admin")):
            assert (await site.call(method, path, b"")).error["code"] == "unknown_url"
        assert (await site.get("/metrics")).status == 200
        site.app = build_admin_app(site.server_state)
        assert (await site.post("/v1/completions", {"prompt": "a"})).status == 404
        for path in ("/admin", "/v1/cache", "/health", "/metrics", "/version"):
            assert (await site.get(path)).status == 200
        # Where it listens is where only this machine can ask, whatever was passed on.
        assert (await site.call("POST", "/admin/pause", b"", client=FAR)).status == 200
        assert site.server_state.lifecycle.paused

    asyncio.run(exchange())


def test_the_admins_listener_wants_the_keys_there_are(admin_keys: str) -> None:
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


def test_a_page_of_a_name_that_leads_to_loopback_is_no_admin_without_keys() -> None:
    """Its owner points the name at 127.0.0.1, so that Origin and Host agree, and addresses do."""
    headers = {"host": "rebound.example", "origin": "http://rebound.example"}
    for settings in ({"host": "0.0.0.0", "insecure": True}, {"cors_origin": ("*",)}):
        reply, site = asked("/admin/pause", headers, **settings)
        assert (reply.status, reply.error["code"]) == (403, "foreign_page")
        assert not site.server_state.lifecycle.paused


def test_the_log_writes_from_the_level_on_that_it_is_told() -> None:
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
            told = [word for word in words if word in site.log.getvalue().replace("\n", " ")]
            assert told == words[LEVELS.index(level) :]
        assert (await site.get("/admin")).json["log_level"] == "error"

    asyncio.run(exchange())


@pytest.mark.parametrize(
    "body", [b'{"level": "trace"}', b'{"level": 3}', b'{"level": []}', b"{}",
             b'{"level": "info", "more": 1}', b"", b"[]"],
)  # fmt: skip
def test_a_level_that_is_none_changes_nothing(body: bytes) -> None:
    reply, site = asked("/admin/log-level", method="PUT", body=body)
    assert reply.status == 400
    assert site.server_state.log.level == "info"


@pytest.mark.parametrize(
    ("client", "here"),
    [(("127.0.0.1", 1), True), (("::1", 1), True), (FAR, False), (None, False)],
)
def test_here_is_a_loopback_address_without_a_proxys_word(client: Any, here: bool) -> None:
    assert is_here({"client": client, "headers": []}) is here
    assert not is_here({"client": client, "headers": [(b"x-forwarded-for", b"127.0.0.1")]})


@pytest.mark.parametrize(
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


def test_what_clients_send_themselves_does_not_make_them_proxies() -> None:
    names = ("host", "user-agent", "accept", "x-request-id", "traceparent", "x-stainless-os")
    headers = [(name.encode(), b"a") for name in names]
    assert is_here({"client": ("127.0.0.1", 1), "headers": headers})

"""The web page's routes: HTML or text, the headers, and what the files may not contain."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from quire.api.app import build_admin_app
from quire.api.web import routes
from quire.api.web.routes import FILES, POLICY, accepts
from tests.cases import each_case
from tests.unit.api.fake_engine import Reply, Site

FOLDER = Path(routes.__file__).parent
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
# Limits of all files together, as they are and as they are sent: the page loads at once.
MAX_BYTES = 93_000
MAX_PACKED_BYTES = 34_000


def run(story: Callable[[], Awaitable[Any]]) -> Any:
    async def told() -> Any:
        return await story()

    return asyncio.run(told())


@each_case(
    ("accept", "html"),
    [
        (BROWSER["accept"], True),
        ("text/html", True),
        ("TEXT/HTML; charset=utf-8", True),
        ("application/json, text/html;q=0.1", True),
        ("*/*", False),
        ("text/*", False),
        ("", False),
        ("application/json", False),
        ("text/html;q=0", False),
        ("text/html; q=0.000", False),
        ("text/htmlx", False),
    ],
)
def test_the_page_is_for_clients_that_accept_html_by_name(accept: str, html: bool) -> None:
    assert accepts(accept, "text/html") is html

    async def story() -> Reply:
        return await Site().get("/", headers={"accept": accept})

    reply = run(story)
    media = "text/html" if html else "text/plain"
    assert (reply.status, reply.headers["content-type"]) == (200, f"{media}; charset=utf-8")
    assert reply.headers["vary"].startswith("accept")
    assert reply.body.startswith(b"<!doctype html>" if html else b"Quire serves a language model")


def test_every_file_is_served_with_the_policy_and_without_a_key() -> None:
    async def story() -> None:
        site = Site(api_key=("sk-one",))
        for path in ("/", *(f"/web/{name}" for name in FILES)):
            reply = await site.get(path, headers=BROWSER)
            assert reply.status == 200, path
            assert reply.headers["content-security-policy"] == POLICY
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["referrer-policy"] == "same-origin"
            assert reply.headers["x-frame-options"] == "DENY"
            assert reply.headers["cross-origin-resource-policy"] == "same-origin"
            kept = {**BROWSER, "if-none-match": reply.headers["etag"]}
            again = await site.get(path, headers=kept)
            assert (again.status, again.body) == (304, b"")
        assert (await site.get("/v1/models", headers=BROWSER)).status == 401

    run(story)


def test_the_policy_allows_own_files_only() -> None:
    directives = dict(each.strip().split(" ", 1) for each in POLICY.split(";"))
    assert directives.pop("default-src") == "'none'"
    assert directives.pop("frame-ancestors") == "'none'"
    assert directives.pop("base-uri") == directives.pop("form-action") == "'none'"
    assert directives.pop("trusted-types") == "'none'"
    assert directives.pop("require-trusted-types-for") == "'script'"
    assert set(directives) == {"script-src", "style-src", "img-src", "connect-src"}
    assert set(directives.values()) == {"'self'"}


def test_files_are_compressed_for_clients_that_accept_it() -> None:
    async def story() -> tuple[Reply, Reply, Reply]:
        site, packed = Site(), {"accept-encoding": "gzip, deflate, br"}
        unpacked = {"accept-encoding": "gzip;q=0"}
        path = "/web/engine.js"
        return (
            await site.get(path),
            await site.get(path, headers=packed),
            await site.get(path, headers=unpacked),
        )

    plain, packed, refused = run(story)
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body == refused.body
    assert "content-encoding" not in plain.headers.keys() | refused.headers.keys()
    assert packed.headers["etag"] != plain.headers["etag"]


@pytest.mark.parametrize(
    "name", ["routes.py", "index.html", "nothing.js", "..%2froutes.py", "../routes.py", "a/b.js"]
)
def test_other_names_are_not_served(name: str) -> None:
    async def story() -> Reply:
        return await Site().get(f"/web/{name}")

    reply = run(story)
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")


def test_without_the_web_page_the_overview_is_all_there_is() -> None:
    async def story() -> None:
        site = Site(web_page=False)
        assert (await site.get("/", headers=BROWSER)).body.startswith(b"Quire serves")
        reply = await site.get("/web/main.js")
        assert (reply.status, reply.error["code"]) == (404, "unknown_url")

    run(story)


def test_below_a_prefix_the_page_loads_its_files_from_there() -> None:
    async def story() -> bytes:
        return (await Site(root_path="/llm").get("/llm/", headers=BROWSER)).body

    page = run(story).decode()
    assert 'src="/llm/web/main.js"' in page
    assert "{root}" not in page


def test_the_port_for_admins_has_the_page_too() -> None:
    async def story() -> None:
        site = Site(admin_port=0)
        assert (await site.get("/v1/engine")).status == 404
        site.app = build_admin_app(site.server_state)
        assert (await site.get("/", headers=BROWSER)).body.startswith(b"<!doctype html>")
        assert b"routes for admins" in (await site.get("/")).body
        assert (await site.get("/v1/engine")).status == 200

    run(story)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_has_nothing_inline_and_names_only_its_own_files() -> None:
    tags = _Tags()
    tags.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    for tag, attributes in tags.found:
        assert tag not in ("style", "iframe", "object", "img"), tag
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        address = attributes.get("src") or attributes.get("href")
        if tag == "script":
            assert address
        if address and not address.startswith("#"):
            name = address.removeprefix("{root}/").removeprefix("web/")
            assert name in (*FILES, "docs"), address
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(ids) == len(set(ids))


@each_case("name", [name for name in FILES if name.endswith(".js")])
def test_scripts_make_no_html_of_texts_and_reach_no_other_host(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert re.search(sinks, text) is None
    assert re.search(r"https?://", text) is None
    imported = re.findall(r'from "(.*?)"', text)
    assert all(one.removeprefix("./") in FILES for one in imported)


def test_the_files_are_small_and_all_of_them_are_listed() -> None:
    sizes = {
        file.name: file.stat().st_size
        for file in FOLDER.iterdir()
        if file.suffix in (".js", ".css", ".html", ".svg")
    }
    assert sizes.keys() == {"index.html", *FILES}
    assert sum(sizes.values()) < MAX_BYTES, sizes
    packed = [len(gzip.compress((FOLDER / name).read_bytes())) for name in sizes]
    assert sum(packed) < MAX_PACKED_BYTES
    assert "url(" not in (FOLDER / "style.css").read_text(encoding="utf-8")

"""/openapi.json and /docs: they describe everything that is served, with the server's own
bounds.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.api.app import build_admin_app, routes_of
from quire.api.generation.foreign_fields import HINTS, NO_EFFECT, OPTIONS, SYNONYMS, UNSERVED
from quire.api.http.auth import is_open
from quire.api.http.origins import is_guarded
from quire.api.openapi.document import document, served
from quire.api.openapi.error_words import error_rows
from quire.api.openapi.field_schemas import Known
from quire.api.openapi.field_words import (
    WORDS,
)
from quire.api.openapi.operations import OPERATIONS
from quire.base.sampling_params import SamplingParams
from quire.config.tenants import Tenant, key_digest
from quire.engine.output.output_stream import TextDelta
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, FakeEngine, Site
from tests.unit.api.said import full_document, validator

BODIES = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
HONOURED = frozenset[str]().union(*BODIES)
FULL = full_document()
OUTSIDE = re.compile(r"^([a-z]+:)?//", re.I)


def shown(path: str = "/openapi.json", **settings: Any) -> Any:
    """Return a server's response: its JSON, or the text."""

    async def exchange() -> Any:
        reply = await Site(**settings).get(path)
        assert reply.status == 200
        return reply.json if path == "/openapi.json" else reply.body.decode()

    return asyncio.run(exchange())


def test_every_served_route_is_in_the_document_and_no_other() -> None:
    async def routes() -> list[str]:
        return [f"{method} {path}" for method, path in served(routes_of(Site().server_state))]

    listed = asyncio.run(routes())
    assert len(listed) == len(set(listed))
    assert set(listed) == OPERATIONS.keys()
    written = {
        f"{method.upper()} {path}"
        for path, methods in shown()["paths"].items()
        for method in methods
    }
    assert written == OPERATIONS.keys()


def test_the_admin_listener_shows_its_own_routes() -> None:
    async def exchange() -> None:
        site = Site(admin_port=0)
        guarded = {path for path in FULL["paths"] if is_guarded(path)}
        assert not guarded & (await site.get("/openapi.json")).json["paths"].keys()
        site.app = build_admin_app(site.server_state)
        paths = (await site.get("/openapi.json")).json["paths"].keys()
        assert guarded < paths
        assert "/v1/completions" not in paths
        page = await site.get("/docs")
        assert page.status == 200
        assert "/v1/chat/completions" not in page.body.decode()

    asyncio.run(exchange())


def test_an_undescribed_route_is_an_error() -> None:
    async def build() -> None:
        routes = routes_of(Site().server_state)
        routes[0].path = "/v1/new"
        with pytest.raises(KeyError, match="/v1/new"):
            document(routes, Known(), lambda path: False)

    asyncio.run(build())


def test_every_honoured_field_has_a_description_and_no_other_has() -> None:
    assert WORDS.keys() == HONOURED
    own: dict[int, tuple[set[str], set[str]]] = {}
    for operation in OPERATIONS.values():
        if operation.body is not None:
            words = operation.fields_form.words
            own.setdefault(id(words), (set(words), set()))[1].update(operation.body)
    assert all(described <= taken for described, taken in own.values())


@each_case("name", sorted(n for n, op in OPERATIONS.items() if op.body is not None))
def test_a_request_has_its_honoured_rejected_and_inert_fields(name: str) -> None:
    operation = OPERATIONS[name]
    assert operation.body is not None
    properties = FULL["components"]["schemas"][operation.title]["properties"]
    kinds = ("honoured", "refused", "no effect", "synonym", "hint")
    by_kind: dict[str, set[str]] = {kind: set() for kind in kinds}
    for field, schema in properties.items():
        by_kind[schema.get("x-quire", "honoured")].add(field)
        assert schema["description"].endswith("."), field
    assert by_kind["honoured"] == operation.body
    assert by_kind["refused"] == (UNSERVED.keys() | OPTIONS.keys()) - operation.body
    assert by_kind["no effect"] == NO_EFFECT.keys() - operation.body
    assert by_kind["hint"] == HINTS.keys() - operation.body
    synonyms = {n for n, path in SYNONYMS.items() if path[0] in operation.body}
    assert by_kind["synonym"] == synonyms - operation.body


def test_schemas_are_valid_references_resolve_and_ids_are_unique() -> None:
    for schema in FULL["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(FULL))
    assert set(names) <= FULL["components"]["schemas"].keys()
    ids = [op["operationId"] for methods in FULL["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))


def test_the_examples_are_valid_and_answered() -> None:
    async def exchange() -> None:
        for name, operation in OPERATIONS.items():
            if not operation.example:
                continue
            validator(operation.title).validate(dict(operation.example))
            example = {**operation.example, "max_tokens": 2}
            example.pop("n_predict", None)
            if "max_tokens" not in (operation.body or ()):
                del example["max_tokens"]
            method, _, path = name.replace("{model}", CARD.name).partition(" ")
            if path in ("/v1/files", "/v1/batches", "/v1/messages/batches") or "{" in path:
                continue  # tests/unit/api/batches and responses: they need what is stored
            reply = await Site().call(method, path, json.dumps(example).encode())
            assert reply.status == 200, (name, reply.body)

    asyncio.run(exchange())


def test_with_keys_protected_paths_need_one_and_the_model_is_not_shown() -> None:
    found = shown(api_key=("sk-one",))
    for path, methods in found["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (not is_open(path)), path
            assert ("401" in operation["responses"]) == (not is_open(path)), path
    assert CARD.name not in json.dumps(found)
    assert CARD.name not in shown("/docs", api_key=("sk-one",))
    tenant = Tenant(name="one", key_digests=(key_digest("sk-two"),))
    assert CARD.name not in json.dumps(shown(tenants=[tenant]))


def test_without_keys_the_document_shows_the_models_name_and_sizes() -> None:
    found = shown()
    properties = found["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["model"]["enum"] == [CARD.name, None]
    assert properties["stop_token_ids"]["items"]["maximum"] == CARD.vocab_size - 1
    assert properties["max_tokens"]["maximum"] == CARD.max_model_len - 1
    assert "securitySchemes" not in found["components"]


def test_the_servers_own_settings_are_in_it() -> None:
    found = shown(max_output_tokens=5, unknown_fields="warn")
    schema = found["components"]["schemas"]["ChatRequest"]
    assert schema["properties"]["max_completion_tokens"]["maximum"] == 5
    assert schema["additionalProperties"] is True


# Other fields that a field at its bound requires.
BESIDE: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": None},
    "length_penalty": {"use_beam_search": True, "n": 2},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": 0},
    "xtc_probability": {"temperature": 1.0},
    "output_ids": {"seed": 1},
    "stream_options": {"stream": True},
}
# Fields with requirements at one of their bounds.
ELSEWHERE = {
    ("max_tokens", "0"): "with prompt_logprobs only",
    ("max_completion_tokens", "0"): "with prompt_logprobs only",
    ("min_tokens", "63"): "max_tokens is less where the prompt takes some",
    ("max_tokens", "63"): "a chat's prompt is longer than one token",
    ("max_completion_tokens", "63"): "a chat's prompt is longer than one token",
    ("output_ids", "[[0]]"): "of several choices only",
}
ROUTES = {
    "/v1/completions": ("CompletionRequest", {"prompt": [1], "max_tokens": 1}),
    "/v1/chat/completions": (
        "ChatRequest",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    ),
    "/generate": ("GenerateRequest", {"tokens": [1], "max_tokens": 1}),
}


class CheckingEngine(FakeEngine):
    """Reject what the engine itself rejects, except texts: it has no tokens of bad words."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, **terms: Any
    ) -> AsyncIterator[TextDelta]:
        self.check(prompt_ids, replace(sampling, bad_words=(), dry_multiplier=0.0))
        async for delta in super().generate(prompt_ids, sampling, **terms):
            yield delta


def bounded(path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, a value at its bound, one just beyond it) of all fields of a route."""
    title, _ = ROUTES[path]
    properties = shown()["components"]["schemas"][title]["properties"]
    for name, schema in properties.items():
        for one in [schema, *schema.get("anyOf", ())]:
            yield from ((name, *pair) for pair in _ends(one))


def _ends(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    kinds = schema.get("type", ())
    step = 1 if "integer" in kinds else 1e-3
    if "minimum" in schema:
        yield schema["minimum"], schema["minimum"] - step
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"] + step, schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"], schema["maximum"] + step
    if "maxLength" in schema:
        yield "x" * schema["maxLength"], "x" * (schema["maxLength"] + 1)
    if "minLength" in schema:
        yield "x" * schema["minLength"], "x" * (schema["minLength"] - 1)
    if "maxProperties" in schema:
        entries = schema["maxProperties"]
        yield {}, {str(at): 0 for at in range(entries + 1)}
    if "array" in kinds and "items" in schema:
        yield from _list_ends(schema)


def _list_ends(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    entry = schema["items"]
    inner = next(_ends(entry), None)
    if inner is not None:
        yield [inner[0]], [inner[1]]
    fine = {"string": "x", "integer": 1}.get(str(entry.get("type", "")))
    if "maxItems" in schema and fine is not None:
        least = schema.get("minItems", 0)
        yield [fine] * max(least, 1), [fine] * (schema["maxItems"] + 1)


@pytest.mark.parametrize("path", ROUTES)
def test_the_document_and_the_server_agree_on_every_bound(path: str) -> None:
    """At the bound a request is served, just beyond it rejected by the field's name."""
    title, pairs = ROUTES[path][0], list(bounded(path))
    assert len(pairs) > 60

    async def exchange() -> None:
        site = Site(CheckingEngine())
        for name, at_bound, beyond in pairs:
            body = {**ROUTES[path][1], **BESIDE.get(name, {})}
            if title == "ChatRequest" and "logprobs" in body:
                body["logprobs"] = True
            reply = await site.post(path, {**body, name: beyond})
            assert reply.status == 400, (name, beyond)
            assert reply.error["param"] == name, (name, beyond, reply.error)
            if (name, str(at_bound)) in ELSEWHERE:
                continue
            if name in ("max_tokens", "max_completion_tokens"):
                body.pop("max_tokens")
            reply = await site.post(path, {**body, name: at_bound})
            assert reply.status == 200, (name, at_bound, reply.error)

    asyncio.run(exchange())


class _Page(HTMLParser):
    """The references and content of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_has_all_routes_and_fields_without_external_resources() -> None:
    text = shown("/docs")
    page = _Page(text)
    words = set(page.words)
    missing = [
        name
        for name in HONOURED | UNSERVED.keys() | NO_EFFECT.keys() | OPTIONS.keys()
        if name not in words
    ]
    assert missing == []
    plain = text.replace("<wbr>", "")
    assert not [op for op in OPERATIONS if f"<code>{op.partition(' ')[2]}</code>" not in plain]
    assert not page.tags & {"img", "link", "iframe", "object", "form"}
    assert text.count("<script") == 1
    assert '<script type="module" src="/web/try.js"></script>' in text
    assert not [link for link in page.links if OUTSIDE.match(link)]
    assert "url(" not in text
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids))
    anchors = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert anchors <= set(page.ids)


def test_the_page_says_what_to_do_about_each_error_that_a_route_sends() -> None:
    sent = {
        code
        for methods in shown()["paths"].values()
        for operation in methods.values()
        for response in operation["responses"].values()
        for code in response.get("x-quire-codes", ())
    }
    text = shown("/docs")
    for row in error_rows():
        code = row.code or "null"
        cell = re.search(f"<td><code>{code}</code></td><td>(.*?)</td>", text)
        assert (cell is not None) == (code in sent)
        advice = re.sub("<.*?>", "`", cell[1]) if cell else ""
        assert row.advice in unescape(advice) or code not in sent


def test_without_the_web_page_there_is_no_script_and_no_script_is_allowed() -> None:
    async def exchange() -> None:
        reply = await Site(web_page=False).get("/docs")
        assert b"<script" not in reply.body
        assert "script-src" not in reply.headers["content-security-policy"]

    asyncio.run(exchange())


def test_the_page_forbids_foreign_scripts_and_shows_its_own_address() -> None:
    async def exchange() -> None:
        reply = await Site().get("/docs", headers={"host": "localhost:8123"})
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "script-src 'self'; connect-src 'self';" in policy
        assert "unsafe" not in policy
        assert "http://localhost:8123/v1/chat/completions" in reply.body.decode()

    asyncio.run(exchange())


def test_an_invalid_host_is_not_shown() -> None:
    async def exchange() -> None:
        site = Site(api_key=("sk-one",))
        for host in ("<script>alert(1)</script>", "a b", 'x"y', "[", "\x00"):
            reply = await site.get("/docs", headers={"host": host})
            assert reply.status == 200
            asked_at = re.findall(r'base_url="(.*?)/v1"', reply.body.decode())
            assert len(asked_at) == 1
            assert asked_at[0] in ("http://localhost:8000", "http://127.0.0.1")

    asyncio.run(exchange())


def test_both_are_served_while_the_model_loads() -> None:
    async def exchange() -> None:
        site = Site()
        site.server_state._engine = None
        for path in ("/openapi.json", "/docs"):
            reply = await site.get(path)
            assert reply.status == 200
            assert CARD.name not in reply.body.decode()
        site.server_state.start(site.engine)
        reply = await site.get("/openapi.json")
        assert CARD.name in reply.body.decode()

    asyncio.run(exchange())

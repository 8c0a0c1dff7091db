"""The table of APIs, as the server, its document and the router use it: they must agree."""

from __future__ import annotations

import json

import pytest

from quire.api.app import DEFAULT_DIALECT, DIALECTS
from quire.api.generation.foreign_fields import SYNONYMS
from quire.api.http.dialect import Dialect
from quire.api.http.errors import ErrorReport
from quire.api.openapi.operations import OPERATIONS
from quire.base import http_apis
from quire.base.errors import NotAuthorized
from quire.base.http_apis import KEY_HEADERS, OPENAI, any_key_headers
from quire.router.api_forms import FORMS, form_of
from quire.router.faults import Refusal
from quire.router.routed_request import RoutedRequest
from quire.router.routes import LISTS, ROUTES, find_route, reason_not_routed, route_of
from tests.cases import each_case

# Routes of a server that a router does not have, and no reason is given for: other names of a
# route, and what a server says of itself.
NOT_AT_A_ROUTER = {
    *("/embeddings", "/score", "/rerank", "/reranking", "/v2/rerank", "/v1/health"),
    *("/reset_prefix_cache", "/flush_cache"),
    *("/tokenizer_info", "/version", "/openapi.json", "/docs", "/", "/web/{file}"),
}
ITS_OWN = {"/health", "/metrics", "/v1/models", "/v1/models/{name}", *LISTS}
PATHS = sorted({name.partition(" ")[2] for name in OPERATIONS})
STATUSES = (400, 404, 405, 413, 429, 500, 501, 502, 503)
DIALECT_OF: dict[str, Dialect] = {
    OPENAI: DEFAULT_DIALECT,
    **{api: DIALECTS[top] for top, api in http_apis.API_PATHS.items()},
}


def dialect_of(path: str) -> Dialect:
    """Return the dialect that the server's middleware uses for errors at a path."""
    tops = [top for top in DIALECTS if path == top or path.startswith(f"{top}/")]
    return DIALECTS[tops[0]] if tops else DEFAULT_DIALECT


@each_case("path", [*PATHS, "/v1/messages/batches/x/results", "/apis", "/v1"])
def test_the_router_writes_errors_as_the_server_does(path: str) -> None:
    form, dialect = form_of(path), dialect_of(path)
    for status in STATUSES:
        refusal = Refusal(status, "some_code", "why", param="model")
        report = ErrorReport(status=status, code="some_code", message="why", param="model")
        own_status, body = dialect.error(report, "")
        if form.api == http_apis.ANTHROPIC:
            del body["request_id"]
        assert (form.status_of(refusal), json.loads(form.error_body(refusal))) == (own_status, body)
        assert form.is_overloaded(own_status) == (status == 503)


def test_each_api_has_a_dialect_a_form_and_key_headers() -> None:
    apis = {OPENAI, *http_apis.API_PATHS.values()}
    assert apis == FORMS.keys() == KEY_HEADERS.keys() == DIALECT_OF.keys()
    assert all(form.api == api for api, form in FORMS.items())
    for api, dialect in DIALECT_OF.items():
        assert FORMS[api].has_heartbeats == bool(dialect.framing("id").heartbeat), api
    assert set(any_key_headers()) == {b"authorization", b"x-api-key"}


@pytest.mark.parametrize(("api", "dialect"), DIALECT_OF.items())
def test_server_and_router_read_the_same_key(api: str, dialect: Dialect) -> None:
    sent = [(name, b"Bearer " * (name == b"authorization") + name) for name in any_key_headers()]
    for headers in (sent, sent[::-1], [*sent, *((name, b"Bearer junk") for name, _ in sent)]):
        assert dialect.read_key(headers) == KEY_HEADERS[api][0]
        assert FORMS[api].key_in(headers) == KEY_HEADERS[api][0]
    for name, value in sent:
        if name in KEY_HEADERS[api]:
            assert dialect.read_key([(name, value)]) == name
        else:
            with pytest.raises(NotAuthorized):
                dialect.read_key([(name, value)])
    assert FORMS[api].key_in([(b"authorization", b"Basic abc")]) == b""


@each_case("path", PATHS)
def test_each_route_of_a_server_is_routed_or_refused_with_a_reason(path: str) -> None:
    is_routed, why = path in ROUTES, reason_not_routed(path)
    if path in NOT_AT_A_ROUTER:
        assert (is_routed, why) == (False, "")
        return
    assert is_routed or why or path in ITS_OWN
    if "{id}" in path:
        assert (find_route(path.replace("{id}", "resp_1")) is not None) == is_routed


def test_the_router_has_no_route_that_no_server_has() -> None:
    served = {name.replace("{name}", "{id}") for name in OPERATIONS}
    for path, route in ROUTES.items():
        assert {f"{method} {path}" for method in route.methods} & served, path
    assert set(PATHS) >= NOT_AT_A_ROUTER | ITS_OWN


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/responses/", "/v1/responses/a b", "/slots"])
def test_a_path_without_a_route_is_no_free_one(path: str) -> None:
    """A row that is missing would leave requests without a quota."""
    assert find_route(path) is None
    with pytest.raises(LookupError, match="ROUTES has no row"):
        route_of(path)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/infill", ("input_extra", "input_prefix", "input_suffix", "prompt")),
        ("/embedding", ("content", "input")),
        ("/api/generate", ("system", "context", "prompt", "suffix")),
    ],
)
def test_each_field_of_a_prompt_decides_where_it_is_routed(
    path: str, fields: tuple[str, ...]
) -> None:
    def blocks(name: str) -> str:
        body = json.dumps({name: name + " word" * 2000}).encode()
        return str(RoutedRequest(path, [], body).key().blocks)

    assert len({"[]", *map(blocks, fields)}) == 1 + len(fields)


def test_each_name_of_a_limit_or_a_number_of_answers_reserves_tokens() -> None:
    names = {name for name, path in SYNONYMS.items() if path == ("max_tokens",)}
    for name in names | {"max_tokens", "max_completion_tokens"}:
        assert FORMS[OPENAI].asked_tokens({name: 7}, 256) == 7
    answers = {name for name, path in SYNONYMS.items() if path == ("n",)} | {"n", "best_of"}
    assert set(FORMS[OPENAI].answers) == answers
    assert FORMS[http_apis.OLLAMA].asked_tokens({"options": {"num_predict": 7}}, 256) == 7
    assert FORMS[http_apis.OLLAMA].asked_tokens({"options": {"num_predict": -1}}, 256) == 256
    assert FORMS[http_apis.OLLAMA].asked_tokens({"options": [7]}, 256) == 256


def test_a_served_path_is_its_own() -> None:
    other = ("", "/", "//", "/models//", "/models/a/b/", "/completions/", "/v1/models/")
    for path in (*PATHS, *other):
        served = http_apis.served_path(path)
        assert http_apis.served_path(served) == served
        assert (served == path) == (path == "/" or path in PATHS)

"""What surrounds a request at a router: spellings of its path, its query, and its Origin."""

from __future__ import annotations

from typing import Any

import pytest

from quire.router.routed_request import RoutedRequest
from quire.router.routes import LISTS, ROUTES
from tests.cases import each_case
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run

PAGE = b"https://app.example"
ORIGIN = (b"origin", PAGE)
ASKS_FIRST = [
    ORIGIN,
    (b"access-control-request-method", b"POST"),
    (b"access-control-request-headers", b"authorization,content-type"),
]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
REFUSED = b'{"error":{"message":"\\"x\\" is a parameter of the query"}}'
# As of a server with --cors-origin.
OF_A_SERVER = (
    b"vary: origin\r\naccess-control-allow-origin: https://app.example\r\n"
    b"access-control-expose-headers: x-request-id\r\n"
)


class Asked(FakeReplica):
    """A replica that keeps what it was asked, and answers with `status` and `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.answer = self._note

    def _note(self, method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        self.asked.append(f"{method} {path}")
        return (self.status, self.body) if self.status != 200 or method == "GET" else None


# ---- queries


@each_case("path", [path for path in ROUTES if "{" not in path])
def test_a_query_is_passed_on_and_is_the_replica_s_to_refuse(path: str) -> None:
    only = Asked()
    method = ROUTES[path].methods[0]
    fields = None if method == "GET" else {**CHAT, "stream": False}

    async def story(router: Router) -> None:
        asked = await router.post(path, fields, method=method, query=b"beta=true&a=%20b")
        assert asked[0] == 200
        only.status, only.body = 400, REFUSED
        status, _, body = await router.post(path, fields, method=method, query=b"x=1")
        assert (status, body) == (400, REFUSED)

    run([only], story)
    assert only.asked == [f"{method} {path}?beta=true&a=%20b", f"{method} {path}?x=1"]


@pytest.mark.parametrize("path", LISTS)
def test_a_list_of_several_replicas_refuses_the_query_that_each_refuses(path: str) -> None:
    only = Asked()
    only.status, only.body = 400, REFUSED

    async def story(router: Router) -> None:
        status, _, body = await router.post(path, None, query=b"x=1")
        assert (status, body) == (400, REFUSED)

    run([only], story)
    assert only.asked == [f"GET {path}?x=1"]


def test_a_stream_is_asked_for_in_the_query_of_stored_responses_only() -> None:
    for path, is_stream in (("/v1/responses/resp_1", True), ("/v1/chat/completions", False)):
        request = RoutedRequest(path, [], b"", query=b"stream=true")
        assert request.is_stream == is_stream
    assert RoutedRequest("/v1/chat/completions", [], b'{"stream":true}').is_stream


# ---- spellings of a path


@each_case(
    ("path", "served"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions//", "/v1/chat/completions"),
        ("/v1/messages/", "/v1/messages"),
        ("/api/chat/", "/api/chat"),
    ],
)
def test_paths_are_spelled_as_at_a_server(path: str, served: str) -> None:
    only = Asked()

    async def story(router: Router) -> None:
        assert (await router.post(path, {**CHAT, "stream": False}))[0] == 200
        assert f'route="{served}"' in router.metrics.text().decode()

    run([only], story)
    assert only.asked == [f"POST {served}"]


def test_lists_health_and_models_are_spelled_as_at_a_server() -> None:
    async def story(router: Router) -> None:
        for path in ("/models", "/models/", "/v1/models/", "/models/box", "/health/", "/metrics/"):
            assert (await router.post(path, None))[0] == 200, path
        for path in ("/responses", "/v1/chat/completion", "/v1/v1/completions"):
            assert (await router.post(path, CHAT))[0] == 404, path
        assert (await router.post("/admin/", CHAT))[0] == 501

    run([FakeReplica()], story)


# ---- pages of other origins


def _names(headers: dict[bytes, bytes]) -> list[bytes]:
    return [name for name in headers if name.startswith(b"access-control-") or name == b"vary"]


@pytest.mark.parametrize(
    ("origins", "allowed", "vary"), [((PAGE.decode(),), PAGE, b"origin"), (("*",), b"*", None)]
)
def test_a_preflight_is_answered_by_the_router(
    origins: tuple[str, ...], allowed: bytes, vary: bytes | None
) -> None:
    only = Asked()

    async def story(router: Router) -> None:
        for path in ("/v1/chat/completions", "/chat/completions", "/v1/models", "/v1/nothing"):
            status, headers, body = await router.post(
                path, None, method="OPTIONS", headers=ASKS_FIRST
            )
            assert (status, body) == (204, b"")
            assert headers[b"access-control-allow-origin"] == allowed
            assert headers.get(b"vary") == vary
            assert headers[b"access-control-allow-methods"] == b"GET, POST, DELETE"
            assert headers[b"access-control-allow-headers"] == b"authorization,content-type"
            assert b"content-length" not in headers
        counted = 'quire_router_requests_total{route="preflight",status="204"} 4.0'
        assert counted in router.metrics.text().decode()

    run([only], story, cors_origin=origins)
    assert only.asked == []


async def _headers_of(router: Router, path: str, body: Any) -> tuple[int, list[Any], bytes]:
    """Return status, headers as a list, in which one may be there twice, and body."""
    found: list[Any] = []
    app: Any = router.app

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            found.extend(message.get("headers", ()))
            await send(message)

        await app(scope, receive, note)

    router.app = noting  # type: ignore[assignment]
    try:
        status, _, raw = await router.post(path, body, headers=[ORIGIN])
    finally:
        router.app = app
    return status, found, raw


def _has_them_once(headers: list[Any]) -> bool:
    allowed = (b"access-control-allow-origin", PAGE)
    names = [name for name, _ in headers]
    [shown] = [value for name, value in headers if name == b"access-control-expose-headers"]
    is_shown = b"x-request-id" in shown and b"x-quire-prompt-summary" in shown
    is_once = names.count(b"vary") == names.count(allowed[0]) == 1
    return is_shown and is_once and allowed in headers and (b"vary", b"origin") in headers


def test_whole_answers_streams_and_errors_have_the_headers_once() -> None:
    only = FakeReplica()

    async def story(router: Router) -> None:
        for path, body, wanted in (
            ("/generate", {"tokens": [1]}, 200),
            ("/v1/chat/completions", {**CHAT, "model": "other"}, 404),
            ("/v1/nothing", CHAT, 404),
            ("/admin/pause", CHAT, 501),
            ("/health", None, 200),
            ("/v1/models", None, 200),
        ):
            status, headers, _ = await _headers_of(router, path, body)
            assert (status, _has_them_once(headers)) == (wanted, True), path
        body = {"tokens": [1], "stream": True}
        status, headers, raw = await _headers_of(router, "/generate", body)
        assert (status, _has_them_once(headers), raw.count(b"data: {")) == (200, True, LENGTH)
        for code in (200, 400):
            only.raw_answer = (
                b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n" % code
                + OF_A_SERVER
                + b"\r\n{}"
            )
            status, headers, _ = await _headers_of(router, "/generate", {"tokens": [1]})
            assert (status, _has_them_once(headers)) == (code, True)

    run([only], story, cors_origin=(PAGE.decode(),))
    assert only.heads
    assert not any(b"\r\norigin:" in head for head in only.heads), "the router accepts the page"


def test_other_origins_are_passed_on_and_read_nothing() -> None:
    only = FakeReplica()
    only.raw_answer = (
        b"HTTP/1.1 403 X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    other = [(b"origin", PAGE + b".evil"), *ASKS_FIRST[1:]]

    async def story(router: Router) -> None:
        status, headers, _ = await router.post("/generate", {"tokens": [1]}, headers=other)
        assert (status, _names(headers)) == (403, [b"vary"])
        status, headers, _ = await router.post("/generate", None, method="OPTIONS", headers=other)
        assert (status, _names(headers)) == (405, [b"vary"])
        status, headers, _ = await router.post(  # no preflight
            "/generate", None, method="OPTIONS", headers=[ORIGIN]
        )
        assert status == 405

    run([only], story, cors_origin=(PAGE.decode(),))
    assert [b"\r\norigin: https://app.example.evil\r\n" in head for head in only.heads] == [True]


def test_without_the_flag_a_replica_s_headers_are_passed_on() -> None:
    only = FakeReplica()
    only.raw_answer = (
        b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
        + OF_A_SERVER
        + b"\r\n{}"
    )

    async def story(router: Router) -> None:
        _, headers, _ = await router.post("/generate", {"tokens": [1]}, headers=[ORIGIN])
        assert headers[b"access-control-allow-origin"] == PAGE
        assert headers[b"vary"] == b"origin"
        status, headers, _ = await router.post(
            "/generate", None, method="OPTIONS", headers=ASKS_FIRST
        )
        assert (status, _names(headers)) == (405, [])

    run([only], story)
    assert b"\r\norigin: https://app.example\r\n" in only.heads[0]

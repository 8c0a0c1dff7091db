"""An API that no server has (line_api.py) at the router: its paths, queries, limits and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.base.errors import ContextTooLong
from quire.router.api_forms import first_code
from quire.router.features import Features
from quire.router.model_names import ModelNames
from quire.router.quotas import LocalBuckets, Quotas
from quire.router.route_file import ModelTable, QuotaTable, Target
from quire.router.routed_request import RoutedRequest
from tests.unit.api.http.line_api import DIALECT, RECITE, SAY, route_lines
from tests.unit.router.fake_replica import FakeReplica, Router, response, run

SAID = b'{"said":"Hello","prompt":11,"tokens":3}'
KEY = [(b"x-line-key", b"k")]


@pytest.fixture(autouse=True)
def _lines(monkeypatch: pytest.MonkeyPatch) -> None:
    route_lines(monkeypatch)


class Speaking(FakeReplica):
    """Answers in the form of the sample API. asked: method and target of each request."""

    def __init__(self, *models: str) -> None:
        super().__init__("fp_a", *models)
        self.asked: list[str] = []
        self.says_to: tuple[int, bytes] | None = (200, SAID)

        def answer(method: str, target: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
            self.asked.append(f"{method} {target}")
            return self.says_to

        self.answer = answer


def at(name: str, model: str) -> str:
    return name.replace("{model}", model)


def test_a_request_goes_to_a_replica_of_the_model_in_its_path() -> None:
    first, second = Speaking("box"), Speaking("org/other model")

    async def story(router: Router) -> None:
        for _ in range(2):
            status, _, raw = await router.post(
                at(SAY, "org/other model"), {"text": "hi"}, query=b"shout=true"
            )
            assert (status, raw) == (200, SAID)
        assert router.count("quire_router_requests_total") == 2
        assert f'route="{SAY}"' in router.metrics.text().decode(), "no path of a client"

    run([first, second], story)
    assert first.asked == []
    assert second.asked == ["POST /lines/org/other%20model:say?shout=true"] * 2
    assert second.requests == [{"text": "hi"}] * 2, "the body has no model"


def test_an_alias_in_the_path_is_replaced_there() -> None:
    replica = Speaking("box")
    names = ModelNames({"fast": ModelTable(targets=[Target(model="box")], longer="long")})
    long = Speaking("long")

    async def story(router: Router) -> None:
        assert (await router.post(at(SAY, "fast"), {"text": "hi"}))[2] == SAID
        assert (await router.post(at(SAY, "fast"), b"[1]"))[2] == SAID
        replica.says_to, replica.raw_answer = None, response(ContextTooLong("9"), DIALECT)
        assert (await router.post(at(SAY, "fast"), {"text": "hi"}))[2] == SAID

    run([replica, long], story, Features(names=names))
    assert replica.asked == [f"POST {at(SAY, 'box')}"] * 3
    assert long.asked == [f"POST {at(SAY, 'long')}"]
    assert replica.requests[0] == {"text": "hi"}


def test_errors_have_the_form_and_the_statuses_of_the_api() -> None:
    path = at(SAY, "box")

    async def fault(router: Router, path: str, method: str = "POST") -> tuple[int, str]:
        status, headers, raw = await router.post(path, {"text": "hi"}, method=method)
        code = json.loads(raw)["fault"]
        assert headers[b"x-quire-error-code"] == code.encode()
        return status, code

    async def story(router: Router) -> None:
        assert await fault(router, path, "GET") == (405, "method_not_allowed")
        assert await fault(router, at(SAY, "no\nbox")) == (404, "unknown_url")
        assert await fault(router, at(SAY, "none")) == (404, "model_not_found")
        router.admission.is_draining = True
        assert await fault(router, path) == (529, "shutting_down")

    run([Speaking("box")], story)


def test_a_full_replica_of_the_api_is_left_for_another() -> None:
    first, second = Speaking("box"), Speaking("box")
    first.says_to = 529, b"{}"

    async def story(router: Router) -> None:
        assert (await router.post(at(SAY, "box"), {"text": "hi"}))[2] == SAID

    run([first, second], story)
    assert (len(first.asked), len(second.asked)) == (1, 1)


def test_the_quota_of_a_key_is_read_in_its_header_and_settled_by_the_usage() -> None:
    now_s = [0.0]
    table = QuotaTable(tokens_per_minute=60, burst_tokens=100)
    features = Features(quotas=Quotas(table, {}, LocalBuckets(lambda: now_s[0])))
    body = {"text": "hi", "limits": {"tokens": 80}}

    async def story(router: Router) -> None:
        assert (await router.post(at(SAY, "box"), body, headers=KEY))[0] == 200
        assert router.count('quire_router_quota_tokens_total{kind="used"}') == 14
        assert (await router.post(at(SAY, "box"), body, headers=KEY))[0] == 429
        assert (await router.post(at(SAY, "box"), body, headers=[(b"x-line-key", b"o")]))[0] == 200

    run([Speaking("box")], story, features)


def test_a_stream_that_breaks_ends_with_the_error_of_the_api() -> None:
    request = RoutedRequest(at(RECITE, "box"), [], b"{}")
    assert (request.is_stream, request.model) == (True, "box")
    replica = FakeReplica()
    replica.raw_answer = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\n"
        b'transfer-encoding: chunked\r\n\r\n7\r\n{"a":1}\r\n'
    )

    async def story(router: Router) -> None:
        _, _, raw = await router.post(at(RECITE, "box"), {"text": "hi"})
        first, last = raw.split(b"! ")
        assert first == b'{"a":1}'
        assert json.loads(last)["fault"] == "stream_broken"

    run([replica], story)


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (b': wait\n\nid: 1\ndata: {"error":{"message":"a","code":"b"}}\n\n', "b"),
        (b'event: error\ndata: {"type":"error","code":"b","message":"a","param":null}\n\n', "b"),
        (b'data: {"type":"response.created","response":{"error":null}}\n\n', ""),
        (b'data: {"choices":[{"text":"data: {\\"error\\"","code":"b"}]}\n\n', ""),
        (b'data: {"error":{"message":"a","code":400}}\n\n', ""),
        (b'data: {"error":"a"}\n\n', ""),
        (b'data: {"type":"err', ""),
        (b": wait\n\n", ""),
        (b"data: [DONE]\n\n", ""),
    ],
)
def test_the_code_of_an_error_that_comes_first(events: bytes, code: str) -> None:
    assert first_code(events) == code

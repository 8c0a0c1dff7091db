"""Several models: aliases and their shares, unknown names, long prompts, lists of models."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from quire.base.errors import ContextTooLong, InvalidParameter
from quire.engine.client.request_builder import prompt_too_long
from quire.router.features import Features
from quire.router.model_names import ModelNames
from quire.router.route_file import ModelTable, Target
from tests.unit.base.test_http_apis import dialect_of
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, response, run

TOO_LONG = json.dumps(
    {"error": {"message": "too long", "type": "x", "code": "context_length_exceeded"}}
).encode()
CANARY = ModelTable(
    targets=(Target(model="one", weight=9), Target(model="two", weight=1)), longer="long"
)


def _features(default: str = "", **tables: str | ModelTable) -> Features:
    return Features(names=ModelNames(tables, default))


def _models_asked(*replicas: FakeReplica) -> Counter[str]:
    return Counter(request["model"] for one in replicas for request in one.requests)


# ---- names


def test_requests_are_divided_by_the_weights_exactly() -> None:
    names = ModelNames({"chat": CANARY})
    counts: Counter[str] = Counter()
    for at in range(1, 101):
        chosen = names.choose("chat", "", lambda model: True)
        assert chosen is not None
        counts[chosen.model] += 1
        assert abs(counts["two"] - at / 10) <= 1, "no burst of the canary"
    assert counts == {"one": 90, "two": 10}


def test_a_session_stays_with_one_model_and_shares_follow_the_weights() -> None:
    names = ModelNames({"chat": CANARY})

    def chosen(session: str, *served: str) -> str:
        found = names.choose("chat", session, lambda model: model in served)
        assert found is not None
        return found.model

    sessions = [f"user {at}" for at in range(2000)]
    first = [chosen(one, "one", "two") for one in sessions]
    assert first == [chosen(one, "one", "two") for one in sessions]
    assert 120 < first.count("two") < 280
    assert {chosen(one, "one") for one in sessions[:50]} == {"one"}, "the canary is down"
    assert [chosen(one, "one", "two") for one in sessions] == first, "and is back"


def test_a_target_without_weight_and_an_unknown_name_get_nothing() -> None:
    table = ModelTable(targets=(Target(model="one"), Target(model="two", weight=0)))
    names = ModelNames({"chat": table})
    for session in ("", "a", "b"):
        chosen = names.choose("chat", session, lambda model: model == "two")
        assert chosen is not None
        assert chosen.model == "one"
    assert names.choose("other", "", lambda model: True) is None


def test_without_any_replica_a_request_may_come_again() -> None:
    async def story(router: Router) -> None:
        for model in ("box", ""):
            fields = {"tokens": [1], **({"model": model} if model else {})}
            status, headers, body = await router.post("/generate", fields)
            assert (status, json.loads(body)["error"]["code"]) == (503, "no_replica")
            assert "once the discovery names them" in json.loads(body)["error"]["message"]
            assert b"retry-after" in headers
        assert (await router.post("/health", None))[0] == 503
        assert (await router.post("/api/tags", None))[0] == 503
        assert json.loads((await router.post("/v1/models", None))[2])["data"] == []

    run([], story)


# ---- requests


def test_aliases_reach_their_models_and_streams_resume_within_one() -> None:
    first, second, other = (
        FakeReplica("fp_1", "one"),
        FakeReplica("fp_1", "one"),
        FakeReplica("fp_2", "two"),
    )
    first.fails_after = 4

    async def story(router: Router) -> None:
        for _ in range(10):
            fields = {"model": "chat", "prompt": "a", "stream": True, "seed": 1}
            status, _, body = await router.post("/v1/completions", fields)
            assert status == 200
            assert body.count(b"data: {") == LENGTH
        assert router.count("quire_router_resumed_streams_total") >= 1

    run([first, second, other], story, _features(chat=CANARY))
    asked = _models_asked(first, second, other)
    assert asked["two"] == 1
    assert asked["chat"] == 0


def test_whole_requests_name_the_target_and_keep_their_other_fields() -> None:
    only = FakeReplica("fp_1", "one")

    async def story(router: Router) -> None:
        await router.post("/v1/embeddings", {"model": "vectors", "input": ["a"], "x": 1.5})
        await router.post("/v1/embeddings", b'{"model":  "one", "input": 1}')

    run([only], story, _features(vectors="one"))
    assert only.requests[0] == {"model": "one", "input": ["a"], "x": 1.5}
    assert b"content-length: 29\r\n" in only.heads[1], "other bodies are passed on byte for byte"


def test_an_unknown_model_is_404_and_lists_models_and_aliases() -> None:
    async def story(router: Router) -> None:
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            status, _, body = await router.post(path, {"model": "nine", "input": "a"})
            error = json.loads(body)["error"]
            assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert error["type"] == "invalid_request_error"
            for name in ("'nine'", "'chat'", "'one'", "'two'"):
                assert name in error["message"]
        status, _, body = await router.post("/api/chat", {"model": "nine"})
        assert status == 404
        assert "'one'" in json.loads(body)["error"]
        status, _, body = await router.post("/v1/messages", {"model": "nine"})
        assert json.loads(body)["error"]["type"] == "not_found_error"
        status, _, body = await router.post("/completion", {"model": "nine"})
        assert json.loads(body)["error"]["code"] == 404

    replicas = [FakeReplica("fp_1", "one"), FakeReplica("fp_2", "two")]
    run(replicas, story, _features(chat=CANARY))


def test_names_of_ollama_may_end_with_its_tag() -> None:
    """As at a server: a name with the tag is another one only if it is served."""
    one, two = FakeReplica("fp_1", "one"), FakeReplica("fp_2", "two", "two:latest")

    async def story(router: Router) -> None:
        for name in ("one:latest", "chat:latest", "two:latest", "two"):
            status, _, _ = await router.post("/api/embed", {"model": name, "input": "a"})
            assert status == 200
        assert (await router.post("/v1/embeddings", {"model": "one:latest"}))[0] == 404
        status, _, body = await router.post("/api/embed", {"model": "nine:latest"})
        assert status == 404
        assert "'nine'" in json.loads(body)["error"]

    run([one, two], story, _features(chat="one"))
    assert [request["model"] for request in one.requests] == ["one", "one"]
    assert [request["model"] for request in two.requests] == ["two:latest", "two"]


def test_an_alias_without_an_available_model_is_503() -> None:
    async def story(router: Router) -> None:
        status, _, body = await router.post("/generate", {"model": "chat", "tokens": [1]})
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "no_replica")
        assert "of model 'gone'" in error["message"]

    run([FakeReplica()], story, _features(chat="gone"))


def test_a_body_without_a_model_is_refused_where_models_differ() -> None:
    one, two = FakeReplica("fp_1", "one"), FakeReplica("fp_2", "two")

    async def story(router: Router) -> None:
        status, _, body = await router.post("/v1/completions", {"prompt": "a"})
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, "model")
        assert "'one', 'two'" in error["message"]

    run([one, two], story)

    async def with_default(router: Router) -> None:
        for _ in range(4):
            assert (await router.post("/v1/completions", {"prompt": "a"}))[0] == 200

    run([one, two], with_default, _features(default="two"))
    assert _models_asked(one, two) == {"two": 4}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/api/chat", "/api/embed", "/completion"]
)
def test_a_prompt_that_does_not_fit_goes_to_the_longer_model(path: str) -> None:
    short, long = FakeReplica("fp_1", "one"), FakeReplica("fp_2", "long")
    too_long = prompt_too_long("9 tokens", 8, min_output=1)
    short.raw_answer = response(ContextTooLong(too_long), dialect_of(path))

    async def story(router: Router) -> None:
        fields = {"model": "chat", "prompt": "a" * 50, "input": "a", "stream": False}
        assert await _status(router, path, fields) == 200
        assert await _status(router, path, {**fields, "model": "one"}) == 400, "not configured"
        assert router.count("quire_router_longer_model_total") == 1
        long.raw_answer = short.raw_answer
        assert await _status(router, path, fields) == 400, "nor does it fit there"
        short.raw_answer = response(InvalidParameter(too_long), dialect_of(path))
        assert await _status(router, path, fields) == 400, "it is another error"

    table = ModelTable(targets=(Target(model="one"),), longer="long")
    run([short, long], story, _features(chat=table))
    assert _models_asked(short) == {"one": 4}
    assert _models_asked(long) == {"long": 2}


def test_what_is_no_name_is_the_replicas_to_refuse() -> None:
    one, two = FakeReplica("fp_1", "one"), FakeReplica("fp_2", "two")

    async def story(router: Router) -> None:
        for model in (5, ["one"], {"a": 1}):
            await router.post("/v1/completions", {"model": model, "prompt": "a"})

    run([one, two], story, _features(default="two"))
    assert [request["model"] for request in one.requests + two.requests if request] == [
        *(5, {"a": 1}),
        ["one"],
    ]


def test_a_stream_that_does_not_fit_begins_at_the_longer_model() -> None:
    short, long = FakeReplica("fp_1", "one"), FakeReplica("fp_2", "long")
    short.status, short.body = 400, TOO_LONG

    async def story(router: Router) -> None:
        fields = {"model": "chat", "prompt": "a", "stream": True}
        status, _, body = await router.post("/v1/completions", fields)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")

    run([short, long], story, _features(chat=CANARY))


def test_a_plain_model_may_have_a_longer_one() -> None:
    short, long = FakeReplica("fp_1", "one"), FakeReplica("fp_2", "long")
    short.status, short.body = 400, TOO_LONG

    async def story(router: Router) -> None:
        assert await _status(router, "/v1/completions", {"model": "one", "prompt": "a"}) == 200

    run([short, long], story, _features(one=ModelTable(longer="long")))


async def _status(router: Router, path: str, fields: dict[str, Any]) -> int:
    return (await router.post(path, fields))[0]


# ---- lists


def test_lists_of_models_are_merged_with_aliases() -> None:
    one, two = FakeReplica("fp_1", "one", "common"), FakeReplica("fp_2", "two", "common")
    for fake in (one, two):
        entries = [{"name": name, "model": name, "size": 5} for name in fake.models]
        raw = json.dumps({"models": entries}).encode()
        fake.answer = lambda method, path, fields, raw=raw: (  # type: ignore[misc]
            (200, raw) if path == "/api/tags" else None
        )

    async def story(router: Router) -> None:
        status, _, body = await router.post("/v1/models", None)
        entries = {entry["id"]: entry for entry in json.loads(body)["data"]}
        assert list(entries) == ["chat", "one", "common", "two"]
        assert entries["chat"]["targets"] == [
            {"model": "one", "weight": 9.0},
            {"model": "two", "weight": 1.0},
        ]
        assert entries["chat"]["max_model_len"] == 100
        status, _, body = await router.post("/v1/models/chat", None)
        assert (status, json.loads(body)["id"]) == (200, "chat")
        assert (await router.post("/v1/models/nine", None))[0] == 404
        status, _, body = await router.post("/api/tags", None)
        listed = {entry["name"]: entry for entry in json.loads(body)["models"]}
        assert listed.keys() == {"chat", "one", "common", "two"}
        assert listed["chat"] == {"name": "chat", "model": "chat", "size": 5}
        two.stop_listening(cuts=True)
        one.answer = lambda method, path, fields: (401, b'{"error":"no key"}')
        status, _, body = await router.post("/api/tags", None)
        assert (status, body) == (401, b'{"error":"no key"}')

    run([one, two], story, _features(chat=CANARY))

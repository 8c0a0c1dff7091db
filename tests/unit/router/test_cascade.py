"""Cascades: which requests the large model gets by rule, and which answers it replaces."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quire.router.cascade import Cascade
from quire.router.features import Features
from quire.router.quotas import LocalBuckets, Quotas
from quire.router.route_file import ENGLISH_REFUSAL, CascadeTable, QuotaTable
from tests.unit.router.fake_replica import FakeReplica, Router, run

TABLE = CascadeTable(
    small="small", large="large", max_prompt_tokens=200, large_patterns=(r"(?i)\bprove\b",)
)


def _features(table: CascadeTable = TABLE) -> Features:
    return Features(cascades={"auto": Cascade("auto", table)})


def _chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": content}], **fields}


def _answer(text: str = "hi", logprob: float = -0.1, finish: str = "stop", **message: Any) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message},
        "logprobs": {"content": [{"token": "h", "logprob": logprob}]},
        "finish_reason": finish,
    }
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return json.dumps({"model": "x", "choices": [choice], "usage": usage}).encode()


def _replicas(small: bytes) -> tuple[FakeReplica, FakeReplica]:
    replicas = FakeReplica("fp_1", "small"), FakeReplica("fp_2", "large")
    replicas[0].body, replicas[1].body = small, _answer("from large")
    return replicas


def _decision(router: Router, decision: str) -> float:
    text = router.metrics.text().decode()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("quire_router_cascade_decisions_total{")
        and f'decision="{decision}"' in line
    )


@pytest.mark.parametrize(
    ("fields", "decision"),
    [
        (_chat("x" * 900), "long_prompt"),
        (_chat(tools=[{"type": "function"}]), "tools"),
        (_chat("please PROVE it"), "pattern"),
        ({"model": "auto", "prompt": ["a", "prove b"]}, "pattern"),
        (_chat([{"type": "text", "text": "prove"}]), "pattern"),  # type: ignore[arg-type]
    ],
)
def test_rules_send_hard_requests_to_the_large_model(fields: dict[str, Any], decision: str) -> None:
    small, large = _replicas(_answer())
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"

    async def story(router: Router) -> None:
        _, _, body = await router.post(path, fields)
        assert json.loads(body)["choices"][0]["message"]["content"] == "from large"
        assert _decision(router, decision) == 1

    run([small, large], story, _features())
    assert not small.requests
    assert "logprobs" not in large.requests[0]


def test_a_confident_answer_of_the_small_model_is_the_answer() -> None:
    small, large = _replicas(_answer("hi", -0.2))

    async def story(router: Router) -> None:
        _, _, body = await router.post("/v1/chat/completions", _chat("improve this"))
        choice = json.loads(body)["choices"][0]
        assert choice["message"]["content"] == "hi"
        assert choice["logprobs"] is None, "the client did not ask for them"
        _, _, body = await router.post("/v1/chat/completions", _chat(logprobs=True))
        assert json.loads(body)["choices"][0]["logprobs"] is not None
        assert _decision(router, "small") == 2

    run([small, large], story, _features())
    assert small.requests[0]["logprobs"] is True
    assert not large.requests


@pytest.mark.parametrize(
    ("answer", "fields", "decision"),
    [
        (_answer(logprob=-2.0), {}, "low-confidence"),
        (_answer('{"a":'), {"response_format": {"type": "json_object"}}, "failed-grammar"),
        (_answer("", refusal="no"), {}, "refusal"),
        (_answer(finish="content_filter"), {}, "refusal"),
        (_answer("I'm sorry, but I can't help with that."), {}, "refusal"),
        (_answer("Sorry, as an AI language model I cannot provide that."), {}, "refusal"),
        (_answer("I am unable to answer this."), {}, "refusal"),
    ],
)
def test_answers_that_are_not_good_enough_are_replaced(
    answer: bytes, fields: dict[str, Any], decision: str
) -> None:
    small, large = _replicas(answer)

    async def story(router: Router) -> None:
        status, _, body = await router.post("/v1/chat/completions", _chat(**fields))
        assert (status, body) == (200, large.body), "byte for byte as the large model gave it"
        assert _decision(router, decision) == 1
        text = router.metrics.text().decode()
        for labels in (
            'cascade="auto",model="small",use="replaced"',
            'cascade="auto",model="large",use="answered"',
        ):
            assert f"quire_router_cascade_tokens_total{{{labels}}} 15.0" in text

    run([small, large], story, _features())
    assert "logprobs" not in large.requests[0]
    assert large.requests[0]["model"] == "large"


REFUSAL = "I'm sorry, but I can't help with that."


@pytest.mark.parametrize(
    ("text", "patterns", "is_replaced"),
    [
        (REFUSAL.replace("'", "\u2019"), (ENGLISH_REFUSAL,), True),
        ("I can't help but admire this.", (ENGLISH_REFUSAL,), False),
        ("Here you are: you can't write to a closed file.", (ENGLISH_REFUSAL,), False),
        ("I can help with that.", (ENGLISH_REFUSAL,), False),
        ('Then he added. "I cannot help you."', (ENGLISH_REFUSAL,), False),
        (REFUSAL, (), False),
        ("Dabei kann ich nicht helfen.", ("nicht helfen",), True),
        ("x" * 300 + REFUSAL, ("sorry",), False),
        ("x" * 290 + REFUSAL, ("sorry",), True),
    ],
)
def test_refusals_are_found_by_patterns_in_the_beginning_of_an_answer(
    text: str, patterns: tuple[str, ...], is_replaced: bool
) -> None:
    small, large = _replicas(_answer(text))

    async def story(router: Router) -> None:
        assert (await router.post("/v1/chat/completions", _chat()))[0] == 200
        assert len(large.requests) == is_replaced

    run([small, large], story, _features(msgspec.structs.replace(TABLE, refusal_patterns=patterns)))


def test_what_is_not_listed_does_not_escalate() -> None:
    table = CascadeTable(small="small", large="large", escalate=("length",))
    small, large = _replicas(_answer(logprob=-9.0))

    async def story(router: Router) -> None:
        await router.post("/v1/chat/completions", _chat())
        assert not large.requests
        small.body = _answer(finish="length")
        await router.post("/v1/chat/completions", _chat())
        assert len(large.requests) == 1

    run([small, large], story, _features(table))
    assert "logprobs" not in small.requests[0], "no judge needs them"


def test_streams_follow_the_rules_and_are_not_judged() -> None:
    small, large = _replicas(_answer())

    async def story(router: Router) -> None:
        status, _, body = await router.post("/v1/chat/completions", _chat(stream=True))
        assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
        assert _decision(router, "small_not_judged") == 1
        await router.post("/v1/chat/completions", _chat("prove", stream=True))

    run([small, large], story, _features())
    assert (len(small.requests), len(large.requests)) == (1, 1)


def test_errors_and_answers_of_no_known_form_are_passed_on() -> None:
    small, large = _replicas(b"[1]")

    async def story(router: Router) -> None:
        assert (await router.post("/v1/chat/completions", _chat()))[2] == b"[1]"
        small.status, small.body = 400, b'{"error":{"message":"wrong","code":"invalid_value"}}'
        assert (await router.post("/v1/chat/completions", _chat()))[0] == 400

    run([small, large], story, _features())
    assert not large.requests


def test_completions_are_judged_by_their_own_form() -> None:
    body = {"choices": [{"text": "a", "logprobs": {"token_logprobs": [None, -3.0]}}]}
    small, large = _replicas(json.dumps(body).encode())

    async def story(router: Router) -> None:
        fields = {"model": "auto", "prompt": "a"}
        assert (await router.post("/v1/completions", fields))[2] == large.body

    run([small, large], story, _features())
    assert small.requests[0]["logprobs"] == 0


def _of_ollama(text: str, logprob: float, end: str, **said: Any) -> dict[str, Any]:
    return {"done": True, "done_reason": end, "logprobs": [{"logprob": logprob}], **said}


def _of_responses(text: str, logprob: float, **fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "logprobs": [{"logprob": logprob}]}
    output = [{"type": "message", "content": [part]}]
    return {"object": "response", "status": "completed", "output": output, **fields}


def _of_messages(text: str, logprob: float, reason: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"type": "message", "stop_reason": reason, "content": content, "logprobs": [logprob]}


# Path, fields, the field that asks for log-probabilities, a good answer, and worse ones by reason.
DIALECTS: list[tuple[str, dict[str, Any], str, dict[str, Any], dict[str, dict[str, Any]]]] = [
    (
        "/generate",
        {"tokens": [1, 2]},
        "logprobs",
        {"choices": [{"tokens": [7], "finish_reason": "stop", "logprobs": [-0.1]}]},
        {
            "low-confidence": {"choices": [{"tokens": [7], "logprobs": [-4.0]}]},
            "length": {"choices": [{"tokens": [7], "finish_reason": "length"}]},
        },
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a"}], "stream": False, "format": "json"},
        "logprobs",
        _of_ollama("", -0.1, "stop", message={"content": "{}"}),
        {
            "low-confidence": _of_ollama("", -4.0, "stop", message={"content": "{}"}),
            "failed-grammar": _of_ollama("", -0.1, "stop", message={"content": "{"}),
            "length": _of_ollama("", -0.1, "length", message={"content": "{"}),
        },
    ),
    (
        "/api/generate",
        {"prompt": "a", "stream": False},
        "logprobs",
        _of_ollama("", -0.1, "stop", response="b"),
        {"low-confidence": _of_ollama("", -4.0, "stop", response="b")},
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
        "logprobs",
        _of_messages("b", -0.1, "end_turn"),
        {
            "low-confidence": _of_messages("b", -4.0, "end_turn"),
            "refusal": _of_messages("", -0.1, "refusal"),
            "length": _of_messages("b", -0.1, "max_tokens"),
        },
    ),
    (
        "/completion",
        {"prompt": "a", "json_schema": {"type": "object"}},
        "n_probs",
        {"content": "{}", "stop_type": "eos", "completion_probabilities": [{"logprob": -0.1}]},
        {
            "low-confidence": {"content": "{}", "completion_probabilities": [{"logprob": -4.0}]},
            "failed-grammar": {"content": "{", "stop_type": "eos"},
            "length": {"content": "{}", "stop_type": "limit"},
        },
    ),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_object"}}},
        "include",
        _of_responses("{}", -0.1),
        {
            "low-confidence": _of_responses("{}", -4.0),
            "failed-grammar": _of_responses("{", -0.1),
            "refusal": {
                "status": "completed",
                "output": [{"type": "message", "content": [{"type": "refusal"}]}],
            },
            "length": _of_responses(
                "", -0.1, status="incomplete", incomplete_details={"reason": "max_output_tokens"}
            ),
        },
    ),
]
ALL_REASONS: Any = ("low-confidence", "failed-grammar", "refusal", "length")


@pytest.mark.parametrize(
    ("path", "fields", "asks", "good", "worse"), DIALECTS, ids=[one[0] for one in DIALECTS]
)
def test_answers_of_other_apis_are_judged(
    path: str,
    fields: dict[str, Any],
    asks: str,
    good: dict[str, Any],
    worse: dict[str, dict[str, Any]],
) -> None:
    table = msgspec.structs.replace(TABLE, escalate=ALL_REASONS)
    small, large = _replicas(json.dumps(good).encode())
    large.body = b'{"from": "large"}'
    asked = {"model": "auto", **fields}

    async def story(router: Router) -> None:
        _, _, body = await router.post(path, asked)
        assert b"-0.1" not in body, "only the router has asked for them"
        assert _decision(router, "small") == 1
        for reason, answer in worse.items():
            small.body = json.dumps(answer).encode()
            assert (await router.post(path, asked))[2] == large.body
            assert _decision(router, reason) == 1, reason

    run([small, large], story, _features(table))
    assert all(asks in one for one in small.requests)
    assert all(asks not in one for one in large.requests)
    assert len(large.requests) == len(worse)


# ---- streams that are held


def _events(*pieces: tuple[str, float], **last: Any) -> bytes:
    """Return a chat's stream as a replica sends it, with a comment after each token."""
    blocks = []
    for number, (text, logprob) in enumerate(pieces):
        choice = {
            "index": 0,
            "delta": {"content": text},
            "logprobs": {"content": [{"token": text, "logprob": logprob}]},
            "finish_reason": None,
        }
        blocks.append(b"data: %b" % json.dumps({"choices": [choice]}).encode())
        comment = {"output_ids": [number], "output_cursor": f"chat-0:1:{number + 1}:0"}
        blocks.append(b": %b" % json.dumps(comment, separators=(",", ":")).encode())
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", **last}
    blocks += [b"data: %b" % json.dumps({"choices": [choice]}).encode(), b"data: [DONE]"]
    blocks += [b': {"ended":null}', b""]
    return b"\n\n".join(blocks)


def _streaming(table: CascadeTable = TABLE) -> Features:
    return _features(msgspec.structs.replace(table, judge_streams=True))


def _texts(body: bytes) -> str:
    found = [json.loads(one[6:]) for one in body.split(b"\n\n") if one.startswith(b"data: {")]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in found)


def _scripted(replica: FakeReplica, events: bytes) -> None:
    replica.fails_after, replica.says = 0, events


def test_a_confident_stream_is_passed_on_without_its_logprobs() -> None:
    small, large = _replicas(b"")
    _scripted(small, _events(("a ", -0.1), ("b", -0.2)))

    async def story(router: Router) -> None:
        status, headers, body = await router.post("/v1/chat/completions", _chat(stream=True))
        assert (status, _texts(body)) == (200, "a b")
        assert headers[b"content-type"] == b"text/event-stream"
        assert b'"logprob"' not in body
        assert b"output_cursor" not in body
        assert body.endswith(b"data: [DONE]\n\n")
        asks = _chat(stream=True, logprobs=True)
        body = (await router.post("/v1/chat/completions", asks))[2]
        assert body.count(b'"logprob"') == 2
        assert _decision(router, "small") == 2

    run([small, large], story, _streaming())
    assert small.requests[0]["logprobs"] is True
    assert not large.requests


def test_events_that_are_there_for_their_logprobs_only_are_left_out() -> None:
    """A server writes none for tokens without text, unless log-probabilities are asked for."""
    small, large = _replicas(b"")
    _scripted(small, _events(("a ", -0.1), ("", -0.2), ("b", -0.1)))

    async def story(router: Router) -> None:
        body = (await router.post("/v1/chat/completions", _chat(stream=True)))[2]
        assert _texts(body) == "a b"
        assert body.count(b"data: {") == 3, "two of text and one with the reason of the end"
        asks = _chat(stream=True, logprobs=True)
        assert (await router.post("/v1/chat/completions", asks))[2].count(b"data: {") == 4

    run([small, large], story, _streaming())


@pytest.mark.parametrize(
    ("events", "fields", "decision"),
    [
        (_events(("a", -0.1), ("b", -9.0)), {}, "low-confidence"),
        (_events(("{", -0.1)), {"response_format": {"type": "json_object"}}, "failed-grammar"),
        (_events(("a", -0.1), finish_reason="content_filter"), {}, "refusal"),
        (_events(("", -0.1), delta={"refusal": "no"}), {}, "refusal"),
    ],
)
def test_a_stream_that_is_not_good_enough_is_replaced(
    events: bytes, fields: dict[str, Any], decision: str
) -> None:
    small, large = _replicas(b"")
    _scripted(small, events)
    _scripted(large, _events(("from ", -5.0), ("large", -5.0)))

    async def story(router: Router) -> None:
        body = (await router.post("/v1/chat/completions", _chat(stream=True, **fields)))[2]
        assert _texts(body) == "from large"
        assert _decision(router, decision) == 1

    run([small, large], story, _streaming())
    assert "logprobs" not in large.requests[0]
    assert "output_ids" not in large.requests[0]
    assert small.requests[0]["seed"] == large.requests[0]["seed"]


def test_a_held_stream_that_is_left_pays_its_tokens() -> None:
    small, fields = FakeReplica("fp_1", "small"), _chat(stream=True)
    small.silent_after = 6
    features = _streaming()
    buckets = LocalBuckets(lambda: 0.0)
    features.quotas = Quotas(QuotaTable(tokens_per_minute=60_000), {}, buckets)

    async def story(router: Router) -> None:
        await router.leave("/v1/chat/completions", fields, 0.2)
        text = router.metrics.text().decode()
        wanted = 'quire_router_quota_tokens_total{kind="used"}'
        used = next(float(one.split()[1]) for one in text.splitlines() if one.startswith(wanted))
        assert used == len(json.dumps(fields)) // 4 + 6

    run([small], story, features)


def test_a_held_stream_of_a_replica_that_fails_is_computed_anew() -> None:
    first, second = FakeReplica("fp_1", "small"), FakeReplica("fp_1", "small")
    whole = _events(("a ", -0.1), ("b", -0.2))
    _scripted(first, whole[: whole.index(b"data: [DONE]")])
    _scripted(second, whole)

    async def story(router: Router) -> None:
        body = (await router.post("/v1/chat/completions", _chat(stream=True)))[2]
        assert _texts(body) == "a b"
        assert router.count("quire_router_replica_faults_total") == 1

    run([first, second], story, _streaming())
    assert "output_ids" not in second.requests[0], "nothing was delivered"


def test_a_stream_that_ends_by_an_error_of_the_request_is_not_judged() -> None:
    small, large = _replicas(b"")
    event = b'data: {"error":{"message":"it ends","code":"poison_request"}}\n\n'
    _scripted(small, event + b': {"ended":"poison_request"}\n\n')

    async def story(router: Router) -> None:
        wanted = _chat(stream=True, response_format={"type": "json_object"})
        assert (await router.post("/v1/chat/completions", wanted))[2] == event

    run([small, large], story, _streaming())
    assert not large.requests

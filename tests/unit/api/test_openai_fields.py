"""Each field of OpenAI's own request types is honoured, rejected by name or known to be harmless.

The types are those of the installed client, so a field that OpenAI adds fails a test.
"""

from __future__ import annotations

import asyncio
import typing
from dataclasses import replace
from typing import Any

import pytest
from openai.types import completion_create_params as completion_types
from openai.types.chat import completion_create_params as chat_types
from openai.types.responses import input_token_count_params as count_types
from openai.types.responses import response_create_params as response_types

from quire.api.generation.fields import CHAT, COMPLETIONS
from quire.api.generation.foreign_fields import HINTS, NO_EFFECT, OPTIONS, UNSERVED
from quire.api.openai.responses.fields import INPUT_TOKENS, RESPONSES
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, ByteTokenizer, FakeEngine, Reply, Site

CHAT_FIELDS = {*typing.get_type_hints(chat_types.CompletionCreateParamsBase), "stream"}
COMPLETION_FIELDS = {*typing.get_type_hints(completion_types.CompletionCreateParamsBase), "stream"}
RESPONSE_FIELDS = {*typing.get_type_hints(response_types.ResponseCreateParamsBase)}
COUNT_FIELDS = {*typing.get_type_hints(count_types.InputTokenCountParams)}
MESSAGES = [{"role": "user", "content": "hi"}]
FOREIGN = (NO_EFFECT, UNSERVED, OPTIONS, HINTS)

# Unserved fields that would change an answer: the value, and a word of the reason.
REFUSED: dict[str, tuple[Any, str]] = {
    "audio": ({"voice": "alloy", "format": "mp3"}, "text only"),
    "function_call": ({"name": "f"}, "tool_choice"),
    "functions": ([{"name": "f"}], "tools"),
    "modalities": (["text", "audio"], "text only"),
    "moderation": ({"model": "any"}, "moderated"),
    "service_tier": ("priority", "one tier"),
    "store": (True, "not stored"),
    "web_search_options": ({}, "searches nothing"),
}


def post(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> Reply:
    async def exchange() -> Reply:
        return await Site(engine).post(path, body)

    return asyncio.run(exchange())


@each_case("name", sorted(CHAT_FIELDS))
def test_every_field_of_openais_chats_is_in_the_table(name: str) -> None:
    assert name in CHAT or sum(name in table for table in FOREIGN) == 1
    assert (name in UNSERVED) == (name in REFUSED)


@each_case("name", sorted(COMPLETION_FIELDS))
def test_every_field_of_openais_completions_is_in_the_table(name: str) -> None:
    assert sum(name in table for table in (COMPLETIONS, *FOREIGN)) == 1


def test_every_field_of_openais_responses_is_in_the_table() -> None:
    for fields, honoured in ((RESPONSE_FIELDS, RESPONSES), (COUNT_FIELDS, INPUT_TOKENS)):
        missing = [name for name in fields - honoured if not any(name in t for t in FOREIGN)]
        assert set(missing) <= {"prompt"}  # refused with a reason of its own


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unserved_fields_are_rejected_by_name(name: str) -> None:
    value, word = REFUSED[name]
    reply = post("/v1/chat/completions", {"messages": MESSAGES, name: value})
    assert reply.status == 400
    assert reply.error["param"] == name
    assert word in reply.error["message"]
    assert post("/v1/chat/completions", {"messages": MESSAGES, name: None}).status == 200


@each_case(
    ("name", "value"),
    [
        ("metadata", {"a": "b"}),
        ("prompt_cache_key", "k"),
        ("prompt_cache_options", {"mode": "implicit", "ttl": "30m", "prewarm": False}),
        ("prompt_cache_options", {"mode": "explicit", "comparison_response_id": None}),
        ("prompt_cache_retention", "24h"),
        ("safety_identifier", "me"),
        ("user", "me"),
        ("store", False),
        ("service_tier", "auto"),
        ("modalities", ["text"]),
        ("verbosity", "low"),
        ("reasoning_effort", "none"),
        ("response_format", {"type": "text"}),
        ("stream_options", None),
    ],
)
def test_fields_without_effect_are_accepted(name: str, value: Any) -> None:
    assert post("/v1/chat/completions", {"messages": MESSAGES, name: value}).status == 200


def test_an_answer_repeats_the_labels_that_were_sent() -> None:
    chat: dict[str, Any] = {"messages": MESSAGES, "n": 2, "seed": 1}
    labels = {"metadata": {"a": "b"}, "service_tier": "auto"}
    plain, found = (post("/v1/chat/completions", chat | more).json for more in ({}, labels))
    assert "metadata" not in plain
    assert "service_tier" not in plain
    assert (found["metadata"], found["service_tier"]) == ({"a": "b"}, "default")
    events = post("/v1/chat/completions", {**chat, **labels, "stream": True}).events[:-1]
    assert {event["service_tier"] for event in events} == {"default"}
    assert not [event for event in events if "metadata" in event]
    plain = post("/v1/chat/completions", {**chat, "stream": True}).events[:-1]
    assert not [event for event in plain if "service_tier" in event]
    for metadata in ("text", {"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, dict.fromkeys("abc")):
        reply = post("/v1/chat/completions", {**chat, "metadata": metadata})
        assert (reply.status, reply.error["param"]) == (400, "metadata")
    many = {str(number): "" for number in range(17)}
    assert post("/v1/chat/completions", {**chat, "metadata": many}).status == 400


class LateEngine(FakeEngine):
    """An engine of which choice 0 begins last, with the scores of the prompt."""

    async def generate(self, *args: Any, **options: Any) -> Any:
        first = []
        async for delta in super().generate(*args, **options):
            if delta.index == 0:
                first.append(delta)
            else:
                yield delta
        for delta in first:
            yield delta


def test_the_first_chunks_of_choices_are_in_their_order() -> None:
    body = {"messages": MESSAGES, "n": 3, "seed": 1, "stream": True}
    more: dict[str, Any] = {"return_token_ids": True, "prompt_logprobs": 0}
    for fields in ({}, more):
        events = post("/v1/chat/completions", {**body, **fields}, LateEngine()).events[:-1]
        choices = [event["choices"][0] for event in events]
        assert [choice["index"] for choice in choices[:3]] == [0, 1, 2]
        assert [choice["delta"].get("role") for choice in choices[:4]] == ["assistant"] * 3 + [None]
        texts = ["", "", ""]
        for choice in choices:
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == ["Hello"] * 3
        scored = [event for event in events if "prompt_logprobs" in event]
        assert len(scored) == len(fields) // 2
        assert ["prompt_token_ids" in event for event in events[:2]] == [bool(fields), False]


def test_a_refusal_is_the_echo_of_a_last_message() -> None:
    said = [*MESSAGES, {"role": "assistant", "refusal": "No."}]
    body = {"messages": said, "echo": True}
    engine = FakeEngine()
    reply = post("/v1/chat/completions", body, engine)
    assert reply.json["choices"][0]["message"]["content"] == "No.Hello"
    assert b"assistant:No.;" in bytes(engine.asked[0].prompt_ids)
    parts = [{"type": "refusal", "refusal": "No."}]
    found = post(
        "/v1/chat/completions",
        {"messages": [*MESSAGES, {"role": "assistant", "content": parts}], "echo": True},
    )
    assert found.json["choices"][0]["message"]["content"] == "No.Hello"


def test_a_prompt_of_null_is_an_empty_one() -> None:
    for body in ({"prompt": None}, {"prompt": ""}):
        engine = FakeEngine()
        engine.tokenizer = ByteTokenizer(bos=1)
        assert post("/v1/completions", body, engine).status == 200
        assert engine.asked[0].prompt_ids == [1]
        reply = post("/v1/completions", body)
        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert "the prompt is empty" in reply.error["message"]
    assert "prompt is missing" in post("/v1/completions", {}).error["message"]


def test_the_last_tokens_of_a_prompt_are_kept_on_request() -> None:
    for prompt in ("abcdef", list(b"abcdef")):
        engine = FakeEngine()
        body = {"prompt": prompt, "truncate_prompt_tokens": 4}
        assert post("/v1/completions", body, engine).status == 200
        assert bytes(engine.asked[0].prompt_ids) == b"cdef"
    engine = FakeEngine()
    long = {"prompt": "x" * 100 + "y", "truncate_prompt_tokens": -1, "max_tokens": 10}
    reply = post("/v1/completions", long, engine)
    assert reply.json["usage"]["prompt_tokens"] == CARD.max_model_len - 10
    assert engine.asked[0].prompt_ids[-1] == ord("y")
    engine = FakeEngine()
    chat = {"messages": MESSAGES, "truncate_prompt_tokens": 3}
    assert post("/v1/chat/completions", chat, engine).status == 200
    assert len(engine.asked[0].prompt_ids) == 3
    for bad in (0, -2, 1.5, "4", True):
        reply = post("/v1/completions", {"prompt": "abc", "truncate_prompt_tokens": bad})
        assert (reply.status, reply.error["param"]) == (400, "truncate_prompt_tokens")
    reply = post("/v1/completions", {"prompt": "abc", "truncate_prompt_tokens": 2, "echo": True})
    assert reply.error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("marks", "written"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
         "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
         "<fim_prefix>def f(<fim_suffix>): pass<fim_middle>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]): pass[PREFIX]def f("),
        (("<fim_prefix>", "<fim_suffix>"), None),
        ((), None),
    ],
)  # fmt: skip
def test_a_suffix_uses_the_fim_tokens_of_the_vocabulary(
    marks: tuple[str, ...], written: str | None
) -> None:
    engine = FakeEngine(card=replace(CARD, max_model_len=200))
    engine.tokenizer = ByteTokenizer(marks=marks)
    reply = post("/v1/completions", {"prompt": "def f(", "suffix": "): pass"}, engine)
    if written is None:
        assert (reply.status, reply.error["param"]) == (400, "suffix")
        assert "<|fim_prefix|>" in reply.error["message"]
    else:
        assert reply.status == 200
        assert bytes(engine.asked[0].prompt_ids).decode() == written


@pytest.mark.parametrize(
    "more", [{"suffix": 5}, {"suffix": "x", "echo": True}, {"suffix": "x", "prompt": [1, 2]}]
)
def test_a_suffix_requires_a_text_prompt(more: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(marks=("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    reply = post("/v1/completions", {"prompt": "a", **more}, engine)
    assert (reply.status, reply.error["param"]) == (400, "suffix")
    assert post("/v1/completions", {"prompt": "a", "suffix": ""}).status == 200


def test_timings_are_in_usage_on_request() -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "abc", "n": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        assert "timings" not in post(path, body).json["usage"]
        found = post(path, {**body, "return_timings": True}).json["usage"]["timings"]
        assert found == {"queue_ms": 1.0, "first_token_ms": 2.0, "total_ms": 10.0}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        events = post(path, {**body, **stream, "return_timings": True}).events
        assert events[-2]["usage"]["timings"] == found
        assert post(path, {**body, "return_timings": 1}).status == 400


SPEEDS = {
    "cache_n": 2,
    "prompt_n": 1,
    "prompt_ms": 1.0,
    "prompt_per_token_ms": 1.0,
    "prompt_per_second": 1000.0,
    "predicted_n": 2,
    "predicted_ms": 8.0,
    "predicted_per_token_ms": 4.0,
    "predicted_per_second": 250.0,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "truncate_prompt_tokens": 3}),
        ("/generate", {"tokens": [1, 2, 3]}),
    ],
)
def test_timings_in_llama_cpps_form_are_beside_usage(path: str, body: dict[str, Any]) -> None:
    assert "timings" not in post(path, body).json
    assert post(path, {**body, "timings": True}).json["timings"] == SPEEDS
    stream = {**body, "stream": True, "timings": True}
    events = post(path, stream).events
    assert (events[-2]["choices"], events[-2]["timings"]) == ([], SPEEDS)
    assert "usage" not in events[-2]
    last = post(path, {**stream, "stream_options": {"include_usage": True}}).events[-2]
    assert (last["timings"], last["usage"]["completion_tokens"]) == (SPEEDS, 2)
    assert post(path, {**body, "timings": 1}).status == 400


def test_a_rate_over_no_time_is_zero() -> None:
    engine = FakeEngine("a")
    reply = post("/v1/completions", {"prompt": "abc", "timings": True}, engine)
    found = reply.json["timings"]
    assert found["predicted_n"] == 1
    assert all(isinstance(value, int | float) for value in found.values())


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/completions", {"prompt": ["abc", "de"], "n": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/generate", {"tokens": [1, 2, 3]}),
    ],
)
def test_continuous_usage_is_in_every_chunk(
    path: str, body: dict[str, Any], include_usage: bool
) -> None:
    def events(**options: bool) -> list[Any]:
        streamed = {**body, "seed": 1, "stream": True, "stream_options": options}
        return post(path, streamed, FakeEngine("a", "b", "c", "d")).events

    found = events(continuous_usage_stats=True, include_usage=include_usage)
    plain = events(include_usage=include_usage)
    assert len(found) == len(plain)
    counts = [event["usage"]["completion_tokens"] for event in found[:-1]]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    whole = post(path, {**body, "seed": 1}, FakeEngine("a", "b", "c", "d")).json["usage"]
    assert found[-2]["usage"] == whole

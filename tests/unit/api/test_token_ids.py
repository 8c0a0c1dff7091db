"""return_token_ids through both routes, and the prompt scores of /generate."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quire.text.chat_template import ChatTemplate
from tests.unit.api.fake_engine import CARD, FakeEngine, Reply, Site

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
MESSAGES = [{"role": "user", "content": "h"}]
PROMPT_IDS = list(b"user:h;")
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": MESSAGES}}


def post(path: str, engine: FakeEngine | None = None, **body: Any) -> Reply:
    async def exchange() -> Reply:
        return await Site(engine).post(path, {**BODIES.get(path, {}), **body})

    return asyncio.run(exchange())


def reply_with_ids(path: str, engine: FakeEngine | None = None, **body: Any) -> Reply:
    reply = post(path, engine, return_token_ids=True, **body)
    assert reply.status == 200, reply.body
    return reply


def joined(reply: Reply) -> dict[int, list[int]]:
    """Join the ids of each choice's chunks."""
    ids: dict[int, list[int]] = {}
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return ids


def test_a_completion_returns_the_ids_of_each_prompt_and_answer() -> None:
    choices = reply_with_ids(COMPLETIONS, prompt=["ab", "c"], n=2).json["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [97, 98], [99], [99]]
    assert [choice["token_ids"] for choice in choices] == [[0, 1]] * 4
    reply = reply_with_ids(COMPLETIONS, prompt=["ab", "c"], n=2, stream=True)
    assert joined(reply) == {at: [0, 1] for at in range(4)}
    chunks = [choice for event in reply.events[:-1] for choice in event["choices"]]
    prompts = [
        (one["index"], one["prompt_token_ids"]) for one in chunks if "prompt_token_ids" in one
    ]
    assert sorted(prompts) == [(0, [97, 98]), (1, [97, 98]), (2, [99]), (3, [99])]


def test_a_chat_returns_the_ids_of_its_rendered_template() -> None:
    whole = reply_with_ids(CHAT, n=2).json
    assert whole["prompt_token_ids"] == PROMPT_IDS
    assert [choice["token_ids"] for choice in whole["choices"]] == [[0, 1]] * 2
    reply = reply_with_ids(CHAT, n=2, stream=True, stream_options={"include_usage": True})
    assert joined(reply) == {0: [0, 1], 1: [0, 1]}
    first, *others = reply.events[:-1]
    assert first["prompt_token_ids"] == PROMPT_IDS
    assert not any("prompt_token_ids" in event for event in others)


@pytest.mark.parametrize(
    "pieces", [("<thi", "nk>", "so", "</think>", "yes"), ("<think>so", "</think>")]
)
def test_tokens_without_shown_text_have_their_ids_returned(pieces: tuple[str, ...]) -> None:
    engine = FakeEngine(*pieces)
    engine.template = ChatTemplate({"default": "{{ messages }}{# </think> #}"}, variables={})
    engine.card = replace(CARD, max_model_len=256)
    hidden = {"include_reasoning": False, "stream": True}
    assert joined(reply_with_ids(CHAT, engine, **hidden)) == {0: [*range(len(pieces))]}


def test_ids_combine_with_log_probabilities_and_calls() -> None:
    reply = reply_with_ids(CHAT, stream=True, logprobs=True)
    assert joined(reply) == {0: [0, 1]}
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    engine = FakeEngine(call[:20], call[20:], card=replace(CARD, max_model_len=256))
    engine.template = ChatTemplate(
        {"default": "{{ messages }}{{ tools }}{# <tool_call> #}"}, variables={}
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert joined(reply_with_ids(CHAT, engine, stream=True, tools=tools)) == {0: [0, 1]}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ids_are_returned_only_on_request(path: str) -> None:
    for body in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        for stream in (False, True):
            assert b"token_ids" not in post(path, stream=stream, **body).body
    assert post(path, return_token_ids=1).error["param"] == "return_token_ids"
    assert post(GENERATE, tokens=[1], return_token_ids=True).status == 400


def test_prompt_ids_are_limited_by_the_size_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.api.generation.answer_json.MAX_PROMPT_NUMBERS", 60)
    many = post(COMPLETIONS, prompt="ab", n=31, return_token_ids=True)
    assert (many.status, many.error["param"]) == (400, "return_token_ids")
    assert reply_with_ids(COMPLETIONS, prompt="ab", n=30).status == 200


def test_generate_scores_its_prompt() -> None:
    scored = [
        None,
        {
            "98": {"logprob": -1.0, "rank": 3, "decoded_token": "b"},
            "99": {"logprob": -9999.0, "rank": 1, "decoded_token": "c"},
        },
    ]
    asked = {"tokens": [97, 98], "prompt_logprobs": 1}
    for n in (1, 2):
        assert post(GENERATE, **asked, n=n).json["prompt_logprobs"] == scored
    events = post(GENERATE, **asked, stream=True).events[:-1]
    assert [event.get("prompt_logprobs") for event in events] == [scored, None]
    assert "prompt_logprobs" not in post(GENERATE, tokens=[97, 98]).json
    full = {"tokens": [97] * CARD.max_model_len, "prompt_logprobs": 0}
    assert post(GENERATE, **full, max_tokens=0).status == 200
    assert post(GENERATE, **full).error["code"] == "context_length_exceeded"
    assert post(GENERATE, tokens=[97], max_tokens=0).error["param"] == "max_tokens"


def test_generate_rejects_too_many_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.generation.answer_json.MAX_PROMPT_NUMBERS", 60)
    reply = post(GENERATE, tokens=[97] * 4, prompt_logprobs=20)
    assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")
    assert post(GENERATE, tokens=[97] * 4, prompt_logprobs=14).status == 200


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"), [(3, 8, 3), (-1, 8, 56), (-1, None, 48), (200, 8, 56)]
)
def test_generate_keeps_the_last_tokens_of_a_prompt(
    keep: int, max_tokens: int | None, kept: int
) -> None:
    engine = FakeEngine()
    tokens = [at % 250 for at in range(100 if keep != 200 else 56)]
    asked: dict[str, Any] = {"tokens": tokens, "truncate_prompt_tokens": keep}
    reply = post(GENERATE, engine, **asked, max_tokens=max_tokens)
    assert reply.status == 200, reply.body
    assert engine.asked[0].prompt_ids == tokens[-kept:]
    assert reply.json["usage"]["prompt_tokens"] == kept
    for wrong in (0, -2, True, 1.5, "3"):
        refused = post(GENERATE, tokens=[1], truncate_prompt_tokens=wrong)
        assert refused.error["param"] == "truncate_prompt_tokens"


def test_generate_returns_timings() -> None:
    times = {"queue_ms": 1.0, "first_token_ms": 2.0, "total_ms": 10.0}
    assert post(GENERATE, tokens=[1], return_timings=True).json["usage"]["timings"] == times
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = post(GENERATE, tokens=[1], return_timings=True, **options).events
    assert events[-2]["usage"]["timings"] == times
    assert "timings" not in post(GENERATE, tokens=[1]).json["usage"]

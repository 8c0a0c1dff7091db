"""Budgets of reasoning over real sockets: exact in each API, with drafts, in a batch, continued.

The model's template opens the reasoning, and the model, which has random weights, never ends it:
without a budget all of an answer is reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import RunningServer
from tests.tiny_models import CHAT_TEMPLATE

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "the sea and the stone"}]
BUDGET, NUM_TOKENS = 17, 40
ASKED: dict[str, Any] = {
    "messages": SAID,
    "max_tokens": NUM_TOKENS,
    "seed": 5,
    "ignore_eos": True,
    "temperature": 0.9,
    "return_token_ids": True,
}
TEMPLATE = CHAT_TEMPLATE.replace(
    "<|assistant|>",
    "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>"
    "{% else %}<think>\n{% endif %}",
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "thinking.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module")
def server(tiny: Path, template: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny, "--chat-template", str(template), "--threads", "1") as server:
        yield server


def asked_for(server: RunningServer, body: dict[str, Any], path: str = CHAT) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def budgeted(server: RunningServer, **more: Any) -> Any:
    (choice,) = asked_for(server, {**ASKED, "thinking_token_budget": BUDGET, **more})["choices"]
    return choice


@pytest.fixture(scope="module")
def close_ids(server: RunningServer) -> list[int]:
    ids: list[int] = asked_for(server, {"prompt": "</think>"}, "/tokenize")["tokens"][1:]
    assert len(ids) > 3
    return ids


def test_reasoning_ends_with_its_mark_when_the_budget_is_spent(
    server: RunningServer, close_ids: list[int]
) -> None:
    free = asked_for(server, ASKED)["choices"][0]
    assert free["message"]["content"] in (None, "")
    choice = budgeted(server)
    ids, num_free = choice["token_ids"], BUDGET - len(close_ids)
    assert ids[:num_free] == free["token_ids"][:num_free]
    assert ids[num_free:BUDGET] == close_ids
    assert len(ids) == NUM_TOKENS
    assert choice["message"]["reasoning_content"]
    assert "</think>" not in choice["message"]["content"]
    assert choice["message"]["content"]


def test_the_answer_is_the_same_streamed_in_a_batch_and_with_drafts(
    server: RunningServer, tiny: Path, template: Path
) -> None:
    alone = {seed: budgeted(server, seed=seed)["token_ids"] for seed in range(6)}
    with ThreadPoolExecutor(6) as pool:
        beside = pool.map(lambda seed: budgeted(server, seed=seed)["token_ids"], alone)
        assert list(beside) == list(alone.values())
    with server.stream(CHAT, {**ASKED, "thinking_token_budget": BUDGET}) as stream:
        events = [event for event in stream if event != "[DONE]"]
    choices = [choice for event in events for choice in event["choices"]]
    assert [id_ for choice in choices for id_ in choice.get("token_ids", ())] == alone[5]
    flags = ("--chat-template", str(template), "--threads", "1", "--speculate", "ngram")
    small = (
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "32",
        "--no-enable-prefix-caching",
        "--block-size",
        "16",
    )
    for more in (flags, (*flags, *small)):
        with RunningServer(tiny, *more) as other:
            assert {seed: budgeted(other, seed=seed)["token_ids"] for seed in alone} == alone


def test_log_probabilities_and_choices_leave_the_answer_as_it_is(server: RunningServer) -> None:
    plain, scored = budgeted(server), budgeted(server, logprobs=True, top_logprobs=2)
    assert scored["token_ids"] == plain["token_ids"]
    assert len(scored["logprobs"]["content"]) == NUM_TOKENS
    body = {**ASKED, "thinking_token_budget": BUDGET, "n": 3}
    choices = asked_for(server, body)["choices"]
    assert choices[0]["token_ids"] == plain["token_ids"]
    assert all(choice["message"]["content"] for choice in choices)
    beams = {"use_beam_search": True, "best_of": 2, "temperature": 0, "max_tokens": 24}
    assert budgeted(server, **beams)["message"]["content"]


def test_an_answer_continues_within_its_budget(server: RunningServer) -> None:
    ids = budgeted(server)["token_ids"]
    for known in (3, BUDGET - 2, BUDGET + 3):
        body = {**ASKED, "thinking_token_budget": BUDGET, "output_ids": ids[:known]}
        with server.stream(CHAT, body) as stream:
            choices = [one for event in stream if event != "[DONE]" for one in event["choices"]]
        assert [id_ for one in choices for id_ in one.get("token_ids", ())] == ids[known:]


def test_a_format_follows_the_reasoning(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = budgeted(server, response_format=named, ignore_eos=False)
    assert json.loads(choice["message"]["content"])["a"] in ("yes", "no")
    assert choice["message"]["reasoning_content"]


def test_each_api_has_the_budget(server: RunningServer) -> None:
    text = budgeted(server)["message"]["content"]
    shared = {name: ASKED[name] for name in ("seed", "ignore_eos", "temperature")}
    thinking = {"type": "enabled", "budget_tokens": BUDGET}
    body = {**shared, "messages": SAID, "max_tokens": NUM_TOKENS, "thinking": thinking}
    blocks = asked_for(server, body, "/v1/messages")["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert blocks[1]["text"].strip() == text.strip()
    body = {**shared, "input": SAID[0]["content"], "max_output_tokens": NUM_TOKENS}
    output = asked_for(server, {**body, "thinking_token_budget": BUDGET}, "/v1/responses")["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"].strip() == text.strip()
    options = {**shared, "num_predict": NUM_TOKENS}
    body = {"messages": SAID, "options": options, "stream": False}
    message = asked_for(server, {**body, "thinking_token_budget": BUDGET}, "/api/chat")["message"]
    assert message["content"].strip() == text.strip()
    prompt = asked_for(server, {"messages": SAID}, "/apply_template")["prompt"]
    body = {**ASKED, "prompt": prompt, "add_special_tokens": False, "messages": None}
    (choice,) = asked_for(server, {**body, "thinking_token_budget": BUDGET}, "/v1/completions")[
        "choices"
    ]
    assert choice["token_ids"] == budgeted(server)["token_ids"]
    budget = {"max_tokens": BUDGET, "opens": "<think>", "closes": "</think>", "is_open": True}
    ids = asked_for(server, {"prompt": prompt, "add_special_tokens": False}, "/tokenize")["tokens"]
    body = {**shared, "tokens": ids, "max_tokens": NUM_TOKENS}
    of_ids = asked_for(server, {**body, "structured_outputs": {"thinking": budget}}, "/generate")
    assert of_ids["choices"][0]["tokens"] == choice["token_ids"]


def test_reasoning_that_is_off_spends_nothing(server: RunningServer) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    without = asked_for(server, {**ASKED, **off})["choices"][0]
    assert budgeted(server, **off)["token_ids"] == without["token_ids"]
    unlimited = asked_for(server, {**ASKED, "thinking_token_budget": -1})["choices"][0]
    assert unlimited["token_ids"] == asked_for(server, ASKED)["choices"][0]["token_ids"]


def test_a_budget_smaller_than_its_mark_is_refused_by_name(
    server: RunningServer, close_ids: list[int]
) -> None:
    for wrong in (0, 1, len(close_ids) - 1, -2, 2**31, 1.5, "7", True):
        for stream in (False, True):
            body = {**ASKED, "thinking_token_budget": wrong, "stream": stream}
            status, answer = server.post(CHAT, body)
            assert (status, answer["error"]["param"]) == (400, "thinking_token_budget"), wrong
    small = {**ASKED, "thinking_token_budget": 2}
    message = server.post(CHAT, small)[1]["error"]["message"]
    assert (
        f"is 2; the mark </think> that ends the reasoning counts too, and is {len(close_ids)}"
        in (message)
    )
    for body in ({"messages": SAID}, {}):  # without messages the model is only loaded
        status, answer = server.post("/api/chat", {**body, "thinking_token_budget": 0})
        assert status == 400, answer
    own: dict[str, Any] = {"messages": SAID, "max_tokens": 30}
    for tokens, words in ((2, "budget_tokens is 2"), (30, "max_tokens is 30"), ("x", 'is "x"')):
        thinking = {"type": "enabled", "budget_tokens": tokens}
        status, answer = server.post("/v1/messages", {**own, "thinking": thinking})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
        assert words in answer["error"]["message"]
    thinking = {"type": "disabled", "budget_tokens": 20}
    assert server.post("/v1/messages", {**own, "thinking": thinking})[0] == 400


def test_a_model_without_reasoning_reports_the_budget_as_ignored(
    beside_a_healthy_stream: RunningServer,
) -> None:
    body = json.dumps({**ASKED, "thinking_token_budget": BUDGET}).encode()
    status, headers, _ = beside_a_healthy_stream.request("POST", CHAT, body)
    assert (status, headers["x-quire-ignored-fields"]) == (200, "thinking_token_budget")

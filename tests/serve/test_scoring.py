"""Scoring over sockets: requests of evaluation programs, and equality with generation."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.running_server import RunningServer

MODEL = "tiny"
TEXT = "the sea and the camel under the sea"


@pytest.fixture
def generated(server: RunningServer) -> dict[str, Any]:
    """Return a greedy answer with its log-probabilities, and its prompt's echo."""
    body = {"prompt": TEXT, "max_tokens": 9, "temperature": 0, "logprobs": 3, "echo": True}
    choice: dict[str, Any]
    [choice] = _answer(server, {**body, "ignore_eos": True})["choices"]
    return choice


def test_a_scored_text_has_the_log_probabilities_of_its_generation(
    server: RunningServer, generated: dict[str, Any]
) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "logprobs": 3, "echo": True}
    answer = _answer(server, body)
    [choice] = answer["choices"]
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    num_tokens = len(logprobs["tokens"])
    assert answer["usage"]["prompt_tokens"] == num_tokens
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert logprobs[name] == generated["logprobs"][name][:num_tokens]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(TEXT)


def test_requests_of_evaluation_programs_get_the_expected_form(
    server: RunningServer,
) -> None:
    """Batches of token ids, one generated token, and the sum over everything after a context."""
    [choice] = _answer(server, {"prompt": TEXT, "prompt_logprobs": 0})["choices"]
    scored = choice["prompt_logprobs"]
    ids = [int(next(iter(entry))) for entry in scored[1:]]
    body = {
        "model": MODEL,
        "prompt": [ids, ids[:7]],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    choices = _answer(server, body)["choices"]
    sums = []
    for choice, num_context in zip(choices, (3, 3), strict=True):
        logprobs = choice["logprobs"]
        values = logprobs["token_logprobs"][num_context:-1]
        tops = logprobs["top_logprobs"][num_context:-1]
        assert len(values) == len(tops)
        assert all(value <= max(top.values()) for value, top in zip(values, tops, strict=True))
        sums.append(values)
    assert sums[0][: len(sums[1])] == sums[1]
    assert len(sums[0]) == len(ids) - 3


def test_the_generated_token_is_returned_even_if_it_ends_the_text(server: RunningServer) -> None:
    """Evaluation programs cut off the last entry: it must be the generated token's."""
    ids = list(range(10, 30))
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    [choice] = _answer(server, {**body, "logit_bias": {"1": 100}})["choices"]  # end of text
    assert (choice["finish_reason"], choice["logprobs"]["tokens"][-1]) == ("stop", "<|end|>")
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1


def test_offsets_match_the_tokens_of_a_text_that_spells_special_ones(
    server: RunningServer,
) -> None:
    text = "<|user|>the sea, 海<|end|><|assistant|>a camel"
    body = {"prompt": text, "max_tokens": 3, "logprobs": 0, "echo": True, "seed": 1}
    [choice] = _answer(server, body)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"][:2] == [0, 0]  # the begin token is not in the text
    num_checked = 0
    for name, at in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        if at >= len(text):
            break
        if not name.startswith("bytes:"):
            assert choice["text"].startswith(name, at), (name, at)
            num_checked += 1
    assert num_checked > 10


def test_a_stream_equals_the_whole_answer(server: RunningServer) -> None:
    body = {
        "prompt": [TEXT, "the camel"],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "echo": True,
        "prompt_logprobs": 1,
        "n": 2,
    }
    whole = _answer(server, body)["choices"]
    events = _events(server, body)
    for choice in whole:
        parts = [
            event["choices"][0]
            for event in events
            if event["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values


def test_scoring_may_be_streamed(server: RunningServer) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "logprobs": 0, "echo": True}
    [event] = _events(server, body)
    [choice] = event["choices"]
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_the_official_client_reads_prompt_scores_of_a_chat(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is in the box?"}],
            max_tokens=2,
            logprobs=True,
            extra_body={"prompt_logprobs": 2, "logprob_token_ids": [7, 5]},
        )
    assert answer.usage is not None
    assert answer.model_extra is not None
    scores = answer.model_extra["prompt_logprobs"]
    assert len(scores) == answer.usage.prompt_tokens
    assert scores[0] is None
    assert all(2 <= len(entry) <= 3 for entry in scores[1:])
    assert {1, 2} <= {token["rank"] for token in scores[1].values()}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)


def test_scored_prompts_do_not_change_the_output_of_others(
    server: RunningServer, generated: dict[str, Any]
) -> None:
    body = {"prompt": TEXT, "max_tokens": 9, "temperature": 0, "logprobs": 3}
    [alone] = _answer(server, {**body, "ignore_eos": True})["choices"]
    num_prompt = len(generated["logprobs"]["tokens"]) - len(alone["logprobs"]["tokens"])
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert alone["logprobs"][name] == generated["logprobs"][name][num_prompt:]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 0, "logprob_token_ids": [5, 10**6]}, "logprob_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "max_tokens": 0, "n": 2}, "n"),
    ],
)
def test_unscorable_requests_are_rejected_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    status, answer = server.post("/v1/completions", {"prompt": TEXT, **fields})
    assert status == 400
    assert answer["error"]["param"] == param


def _answer(server: RunningServer, body: dict[str, Any]) -> Any:
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def _events(server: RunningServer, body: dict[str, Any]) -> list[Any]:
    with server.stream("/v1/completions", {**body, "stream": True}) as reader:
        events = list(reader)
    assert events.pop() == "[DONE]"
    return events

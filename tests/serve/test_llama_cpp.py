"""llama.cpp's routes over real sockets: the tokens of the same completion, hostile bodies."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.running_server import RunningServer
from tests.serve.test_bad_input import RAW_CASES

ASKED: dict[str, Any] = {"prompt": "the sea", "seed": 4, "ignore_eos": True}


def test_a_completion_has_the_tokens_of_the_same_one_of_openai(server: RunningServer) -> None:
    asked = {**ASKED, "max_tokens": 24, "return_token_ids": True}
    status, completion = server.post("/v1/completions", asked)
    assert status == 200, completion
    (choice,) = completion["choices"]
    status, whole = server.post("/completion", {**ASKED, "n_predict": 24, "return_tokens": True})
    assert status == 200, whole
    assert (whole["tokens"], whole["content"]) == (choice["token_ids"], choice["text"])
    assert (whole["stop_type"], whole["tokens_predicted"]) == ("limit", 24)
    body = json.dumps({**ASKED, "n_predict": 24, "stream": True}).encode()
    _, _, raw = server.request("POST", "/completion", body)
    *parts, last = [json.loads(event[6:]) for event in raw.decode().split("\n\n") if event]
    assert [token for part in parts for token in part["tokens"]] == choice["token_ids"]
    assert "".join(part["content"] for part in parts) == choice["text"]
    assert (last["stop"], last["tokens_predicted"], last["prompt"]) == (True, 24, whole["prompt"])


def test_several_answers_have_the_tokens_of_the_choices_of_openai(server: RunningServer) -> None:
    asked = {**ASKED, "prompt": ["the sea", "a stone"], "temperature": 1.5}
    status, completion = server.post(
        "/v1/completions", {**asked, "max_tokens": 12, "n": 2, "return_token_ids": True}
    )
    assert status == 200, completion
    wanted = [choice["token_ids"] for choice in completion["choices"]]
    assert len({tuple(ids) for ids in wanted}) == 4
    sent = {**asked, "n_predict": 12, "n_cmpl": 2, "return_tokens": True}
    status, answers = server.post("/completion", sent)
    assert status == 200, answers
    assert [answer["tokens"] for answer in answers] == wanted
    _, _, raw = server.request("POST", "/completion", json.dumps({**sent, "stream": True}).encode())
    events = [json.loads(event[6:]) for event in raw.decode().split("\n\n") if event]
    for index, tokens in enumerate(wanted):
        *parts, last = [event for event in events if event["index"] == index]
        assert [token for part in parts for token in part["tokens"]] == tokens
        assert (last["stop"], last["tokens_predicted"]) == (True, 12)


def test_answers_that_lines_may_end_have_the_same_tokens(server: RunningServer) -> None:
    sent = {**ASKED, "prompt": ["the sea", "a stone"], "n_cmpl": 2, "n_predict": 12}
    sent = {**sent, "temperature": 1.5, "return_tokens": True}
    together = server.post("/completion", sent)[1]
    apart = server.post("/completion", {**sent, "t_max_predict_ms": 2**31 - 1})[1]
    assert [one["tokens"] for one in apart] == [one["tokens"] for one in together]


def test_a_grammar_holds_and_a_prompt_is_computed_without_output(server: RunningServer) -> None:
    asked = {**ASKED, "ignore_eos": False, "grammar": 'root ::= "the stone"'}
    status, answer = server.post("/completion", asked)
    assert (status, answer["content"], answer["stop_type"]) == (200, "the stone", "eos")
    status, nothing = server.post("/completion", {**ASKED, "n_predict": 0})
    assert (status, nothing["content"], nothing["tokens_predicted"]) == (200, "", 0)


def test_an_answer_that_its_lines_end_is_a_beginning(server: RunningServer) -> None:
    sent = {"prompt": "Once upon a time", "n_predict": 64, "seed": 5, "temperature": 2}
    whole = server.post("/completion", sent)[1]
    assert "\n" in whole["content"]
    status, cut = server.post("/completion", {**sent, "n_indent": 64})
    assert (status, cut["stop_type"], cut["truncated"]) == (200, "limit", False)
    assert whole["content"].startswith(cut["content"])
    assert cut["content"].count("\n") == 1
    paths = ["content", "generation_settings/seed"]
    parts = server.post("/completion", {**sent, "response_fields": paths})[1]
    assert parts == {"content": whole["content"], "generation_settings/seed": 5}


def test_pieces_of_content_make_its_text(server: RunningServer) -> None:
    status, answer = server.post("/tokenize", {"content": "the sea", "with_pieces": True})
    assert status == 200
    ids = [token["id"] for token in answer["tokens"]]
    assert ids == server.post("/tokenize", {"content": "the sea"})[1]["tokens"]
    assert server.post("/detokenize", {"tokens": ids})[1]["content"].strip() == "the sea"
    slots = server.get("/slots")[1]
    assert len(slots) == server.get("/props")[1]["total_slots"]


def test_unreadable_bodies_disturb_no_other_request(
    beside_a_healthy_stream: RunningServer,
) -> None:
    for path in ("/completion", "/infill"):
        for case, (raw, status, _) in RAW_CASES.items():
            found, _, answer = beside_a_healthy_stream.request("POST", path, raw)
            assert found == status, (case, answer)
            error = json.loads(answer)["error"]
            assert error.keys() == {"code", "message", "type"}, case
            assert (error["code"], error["type"]) == (status, "invalid_request_error"), case

"""Rarely used sampling parameters over sockets: all of them at once, and reproducibility."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.running_server import RunningServer

PROMPT = "the sea and the camel under the sea"
WAYS: dict[str, dict[str, Any]] = {
    "filters": {
        "temperature_last": True,
        "typical_p": 0.9,
        "top_n_sigma": 2,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 1e-4,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.01,
        "allowed_token_ids": list(range(5, 300)),
        "bad_words": ["camel", "the"],
        "no_repeat_ngram_size": 3,
        "frequency_penalty": 0.3,
        "repeat_last_n": 5,
        "dry_multiplier": 0.8,
    },
    "mirostat": {"mirostat": 1, "mirostat_tau": 3.0, "dry_multiplier": 0.8},
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_an_answer_repeats_with_its_seed_and_streaming_does_not_change_it(
    server: RunningServer, way: str
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "n": 3, "ignore_eos": True, **WAYS[way]}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    again = {**body, "seed": answer["choices"][0]["seed"]}
    _, repeated = server.post("/v1/completions", again)
    assert [choice["text"] for choice in repeated["choices"]] == texts
    pieces = ["", "", ""]
    with server.stream("/v1/completions", again) as reader:
        for event in reader:
            if event != "[DONE]":
                [choice] = event["choices"]
                pieces[choice["index"]] += choice["text"]
    assert pieces == texts


def test_a_row_without_a_valid_token_fails_alone_with_a_reason(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "allowed_token_ids": [50, 51], "ignore_eos": True}
    status, answer = server.post("/v1/completions", {**body, "no_repeat_ngram_size": 1})
    assert (status, answer["error"]["code"]) == (400, "no_token_to_choose")
    assert "n-grams that came already" in answer["error"]["message"]
    assert server.post("/v1/completions", body)[0] == 200

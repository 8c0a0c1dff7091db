"""Several sequences of one prompt over real sockets: best_of and beams, whole and streamed."""

from __future__ import annotations

from tests.serve.running_server import RunningServer

BODY = {"prompt": "the sea and the camel under the sea", "max_tokens": 9, "ignore_eos": True}


def test_the_best_choices_are_returned_and_all_tokens_are_counted(server: RunningServer) -> None:
    status, every = server.post("/v1/completions", {**BODY, "n": 5, "seed": 4, "logprobs": 0})
    assert status == 200, every
    means = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 9 for choice in every["choices"]
    }
    status, best = server.post("/v1/completions", {**BODY, "n": 2, "best_of": 5, "seed": 4})
    assert status == 200, best
    ranked = sorted(means, key=lambda text: -means[text])[:2]
    assert [choice["text"] for choice in best["choices"]] == ranked
    assert [choice["logprobs"] for choice in best["choices"]] == [None, None]
    assert best["usage"]["completion_tokens"] == 5 * 9


def test_best_of_streams_if_it_equals_n_and_is_rejected_above(server: RunningServer) -> None:
    same = {**BODY, "n": 2, "best_of": 2, "seed": 4}
    _, whole = server.post("/v1/completions", same)
    status, answer = server.post("/v1/completions", {**same, "stream": True, "best_of": 3})
    assert status == 400
    assert answer["error"]["param"] == "best_of"
    assert len({choice["text"] for choice in whole["choices"]}) == 2


def test_beams_are_returned_best_first_by_every_route(server: RunningServer) -> None:
    search = {"use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.0}
    status, answer = server.post("/v1/completions", {**BODY, **search, "logprobs": 0})
    assert status == 200, answer
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert sums == sorted(sums, reverse=True)
    assert len({choice["text"] for choice in answer["choices"]}) == 2
    _, again = server.post("/v1/completions", {**BODY, **search})
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["text"] for choice in again["choices"]] == texts
    chat = {"messages": [{"role": "user", "content": "the sea"}], "max_tokens": 5, **search}
    status, answer = server.post("/v1/chat/completions", chat)
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


def test_more_beams_than_slots_are_rejected_with_the_numbers(server: RunningServer) -> None:
    status, answer = server.post("/v1/completions", {**BODY, "use_beam_search": True, "n": 128})
    assert status == 400
    assert answer["error"]["param"] == "n"
    assert "128 beams" in answer["error"]["message"]

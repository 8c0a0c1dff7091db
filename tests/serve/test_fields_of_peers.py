"""The fields of vLLM and SGLang that change an answer, in each route where these have them.

One row a field and route: a request, and what its answer must be. Requests are on a real engine;
the model is random, so that nothing but the field can explain the answer.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.running_server import RunningServer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
EMBEDDINGS, POOLING, SCORE, RERANK = "/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank"
SAID = [{"role": "user", "content": "the sea and the stone"}]
OPENED = [*SAID, {"role": "assistant", "content": "I am"}]
TEXT = "a stone by the river"
IDS = [7, 30, 31, 32, 33, 34, 35, 36]
VOCAB = 307
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "max_tokens": 6, "seed": 3, "return_token_ids": True},
    COMPLETIONS: {"prompt": IDS, "max_tokens": 6, "seed": 3, "return_token_ids": True},
    GENERATE: {"tokens": IDS, "max_tokens": 6, "seed": 3},
    MESSAGES: {"messages": SAID, "max_tokens": 40, "seed": 3},
    RESPONSES: {"input": TEXT, "max_output_tokens": 40, "seed": 3},
    EMBEDDINGS: {"input": IDS},
    POOLING: {"input": IDS},
    SCORE: {"text_1": TEXT, "text_2": TEXT},
    RERANK: {"query": TEXT, "documents": [TEXT]},
}
Check = Callable[[RunningServer, Any], None]


def text_of(answer: Any) -> str:
    """Return the text of an answer in any form."""
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    if "content" in answer:
        return str(answer["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def names_ids(server: RunningServer, answer: Any) -> None:
    choice = answer["choices"][0]
    wanted = [f"token_id:{id_}" for id_ in choice["token_ids"]]
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        assert [token["token"] for token in logprobs["content"]] == wanted
        assert all(len(token["top_logprobs"]) == 2 for token in logprobs["content"])
    else:
        assert logprobs["tokens"] == wanted
        keys = {key for top in logprobs["top_logprobs"] for key in top}
        assert all(re.fullmatch(r"token_id:\d+", key) for key in keys)


def keeps(kept: list[int]) -> Check:
    """Return the check that an answer is that of the ids that are kept."""

    def check(server: RunningServer, answer: Any) -> None:
        choice = answer["choices"][0]
        if "prompt_token_ids" in choice:
            assert choice["prompt_token_ids"] == kept
        body = {**ASKED[GENERATE], "tokens": kept}
        expected = server.post(GENERATE, body)[1]["choices"][0]["tokens"]
        assert choice.get("token_ids", choice.get("tokens")) == expected

    return check


def keeps_first_of_chat(server: RunningServer, answer: Any) -> None:
    whole = server.post(CHAT, ASKED[CHAT])[1]["prompt_token_ids"]
    assert answer["prompt_token_ids"] == whole[:4]


def keeps_last_of_chat(server: RunningServer, answer: Any) -> None:
    whole = server.post(CHAT, ASKED[CHAT])[1]["prompt_token_ids"]
    assert answer["prompt_token_ids"] == whole[-4:]


def embeds(kept: list[int]) -> Check:
    def check(server: RunningServer, answer: Any) -> None:
        expected = server.post(EMBEDDINGS, {"input": kept})[1]["data"][0]["embedding"]
        of_row = answer["data"][0]
        assert of_row.get("embedding", of_row.get("data")) == expected
        assert answer["usage"]["prompt_tokens"] == len(kept)

    return check


def counts(prompt_tokens: int) -> Check:
    def check(server: RunningServer, answer: Any) -> None:
        usage = answer["usage"]
        assert usage.get("prompt_tokens", usage.get("total_tokens")) == prompt_tokens

    return check


def scores(num_top: int) -> Check:
    """Return the check of prompt_logprobs with so many alternatives; VOCAB for all."""

    def check(server: RunningServer, answer: Any) -> None:
        choice = answer["choices"][0]
        scored = choice.get("prompt_logprobs") or answer["prompt_logprobs"]
        assert scored[0] is None
        for entry in scored[1:]:
            assert num_top <= len(entry) <= num_top + 1
            by_rank = sorted(entry.values(), key=lambda one: one["rank"])
            logprobs = [one["logprob"] for one in by_rank]
            assert logprobs == sorted(logprobs, reverse=True)
            if num_top == VOCAB:
                assert sorted(map(int, entry)) == list(range(VOCAB))
                assert [one["rank"] for one in by_rank] == list(range(1, VOCAB + 1))

    return check


def has_all_tops(server: RunningServer, answer: Any) -> None:
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    if isinstance(logprobs, list):  # of ids
        tops = [sorted(top.values(), reverse=True) for top in choice["top_logprobs"]]
        assert [len(top) for top in tops] == [VOCAB] * 6
        return
    if "content" in logprobs:
        tops = [[one["logprob"] for one in t["top_logprobs"]] for t in logprobs["content"]]
        assert [len(top) for top in tops] == [VOCAB] * 6
        assert all(top == sorted(top, reverse=True) for top in tops)
        own = [token["logprob"] for token in logprobs["content"]]
        assert all(value in top for value, top in zip(own, tops, strict=True))
    else:  # by text, which several ids may share
        assert all(len(top) > VOCAB // 2 for top in logprobs["top_logprobs"])


def lists_ids(server: RunningServer, answer: Any) -> None:
    logprobs = answer["choices"][0]["logprobs"]
    if "content" in logprobs:
        assert all(len(token["top_logprobs"]) == 2 for token in logprobs["content"])
    else:
        assert all(len(listed) == 2 for listed in logprobs["listed_logprobs"])


def is_like(pattern: str) -> Check:
    def check(server: RunningServer, answer: Any) -> None:
        choices = answer.get("choices")
        if choices and "tokens" in choices[0]:
            body = {"tokens": choices[0]["tokens"], "skip_special_tokens": True}
            text = server.post("/detokenize", body)[1]["prompt"]
        else:
            text = text_of(answer)
        assert re.fullmatch(pattern, text), text

    return check


def begins_with(text: str) -> Check:
    def check(server: RunningServer, answer: Any) -> None:
        assert text_of(answer).startswith(text)
        without = {name: value for name, value in ASKED[CHAT].items() if name != "messages"}
        plain = server.post(CHAT, {**without, "messages": OPENED, **CONTINUES})[1]
        assert text_of(answer) == text + text_of(plain)

    return check


def has_nulls(*names: str) -> Check:
    def check(server: RunningServer, answer: Any) -> None:
        choice = answer["choices"][0]
        places = (answer, choice, choice.get("message", {}))
        for name in names:
            assert any(name in place and place[name] is None for place in places), name

    return check


CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}
LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {"logprobs": 2},
    GENERATE: {"logprobs": 2},
}
ALL_LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": -1},
    COMPLETIONS: {"logprobs": -1},
    GENERATE: {"logprobs": -1},
}
TEXTS = (CHAT, COMPLETIONS, GENERATE)
TO_4 = {"truncate_prompt_tokens": 4}
RIGHT, LEFT = ({**TO_4, "truncation_side": side} for side in ("right", "left"))
UNENDED = {"max_tokens": 200, "temperature": 1.5}
ROWS: list[tuple[str, str, dict[str, Any], Check]] = [
    *(
        (
            "return_tokens_as_token_ids",
            path,
            {**LOGPROBS[path], "return_tokens_as_token_ids": True},
            names_ids,
        )
        for path in (CHAT, COMPLETIONS)
    ),
    ("truncation_side: right", CHAT, RIGHT, keeps_first_of_chat),
    ("truncation_side: left", CHAT, LEFT, keeps_last_of_chat),
    *(("truncation_side: right", path, RIGHT, keeps(IDS[:4])) for path in (COMPLETIONS, GENERATE)),
    *(("truncation_side: left", path, LEFT, keeps(IDS[-4:])) for path in (COMPLETIONS, GENERATE)),
    *(("truncation_side: right", path, RIGHT, embeds(IDS[:4])) for path in (EMBEDDINGS, POOLING)),
    *(("truncation_side: left", path, LEFT, embeds(IDS[-4:])) for path in (EMBEDDINGS, POOLING)),
    *(
        ("truncation_side", path, side, counts(8))
        for path in (SCORE, RERANK)
        for side in (LEFT, RIGHT)
    ),
    *(
        (f"prompt_logprobs: {asked}", path, {"prompt_logprobs": asked}, scores(num_top))
        for path in TEXTS
        for asked, num_top in ((0, 1), (3, 3), (20, 20), (-1, VOCAB))
    ),
    *(("logprobs: -1", path, ALL_LOGPROBS[path], has_all_tops) for path in TEXTS),
    ("echo", CHAT, {"messages": OPENED, **CONTINUES, "echo": True}, begins_with("I am")),
    *(
        ("logprob_token_ids", path, {**LOGPROBS[path], "logprob_token_ids": [9, 300]}, lists_ids)
        for path in (CHAT, COMPLETIONS)
    ),
    *(("regex", path, {"regex": "[ab]{3}c"}, is_like("[ab]{3}c")) for path in TEXTS),
    *(
        ("regex", path, {"regex": "[ab]{3}c"}, is_like("[ab]{3}c"))
        for path in (MESSAGES, RESPONSES)
    ),
    *(
        ("ebnf", path, {"ebnf": 'root ::= "no" | "yes" "!"'}, is_like("no|yes!"))
        for path in (*TEXTS, MESSAGES, RESPONSES)
    ),
    *(
        ("stop_regex", path, {**UNENDED, "stop_regex": "[a-e]"}, is_like("(?s)[^a-e]*[a-e]"))
        for path in (CHAT, COMPLETIONS)
    ),
    (
        "null attributes",
        CHAT,
        {},
        has_nulls(
            *("prompt_logprobs", "kv_transfer_params", "logprobs", "stop_reason"),
            *("reasoning_content", "reasoning", "refusal"),
        ),
    ),
    (
        "null attributes",
        COMPLETIONS,
        {},
        has_nulls("prompt_logprobs", "kv_transfer_params", "logprobs", "stop_reason"),
    ),
]


@pytest.mark.parametrize(
    ("field", "path", "fields", "check"),
    ROWS,
    ids=lambda value: "" if callable(value) else str(value)[:40],
)
def test_a_field_has_its_effect(
    server: RunningServer, field: str, path: str, fields: dict[str, Any], check: Check
) -> None:
    status, answer = server.post(path, {**ASKED[path], **fields})
    assert status == 200, answer
    check(server, answer)


@pytest.mark.parametrize("path", TEXTS)
def test_all_log_probabilities_agree_with_the_best(server: RunningServer, path: str) -> None:
    """Numbers of -1 are those of 20, bit for bit; a stream has those of the whole answer."""
    best = server.post(path, {**ASKED[path], "prompt_logprobs": 20})[1]
    every = server.post(path, {**ASKED[path], "prompt_logprobs": -1})[1]
    for few, many in zip(scored_of(best), scored_of(every), strict=True):
        assert few is None or {id_: one["logprob"] for id_, one in few.items()} == {
            id_: many[id_]["logprob"] for id_ in few
        }
    body = {**ASKED[path], **ALL_LOGPROBS[path]}
    whole = server.post(path, body)[1]["choices"][0]
    with server.stream(path, body) as stream:
        choices = [one for event in stream if event != "[DONE]" for one in event["choices"]]
    if path == CHAT:
        tokens = [
            token for one in choices if one["logprobs"] for token in one["logprobs"]["content"]
        ]
        assert tokens == whole["logprobs"]["content"]
    else:
        place = "top_logprobs"
        parts = [one if path == GENERATE else one["logprobs"] for one in choices]
        of_whole = whole if path == GENERATE else whole["logprobs"]
        assert [top for part in parts for top in part[place]] == of_whole[place]


def scored_of(answer: Any) -> Any:
    return answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]


def test_an_echo_has_the_whole_vocabulary_too(server: RunningServer) -> None:
    body = {**ASKED[COMPLETIONS], "logprobs": -1, "echo": True, "n": 2}
    choices = server.post(COMPLETIONS, body)[1]["choices"]
    for choice in choices:
        tops = choice["logprobs"]["top_logprobs"]
        assert len(tops) == len(IDS) + 6
        assert tops[0] is None
        assert all(len(top) > VOCAB // 2 for top in tops[1:])


def test_too_many_numbers_are_refused_with_both(beside_a_healthy_stream: RunningServer) -> None:
    long = [7] * 20_000
    for path, more, param in (
        (COMPLETIONS, {"prompt": long, "prompt_logprobs": -1}, "prompt_logprobs"),
        (GENERATE, {"tokens": long, "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": -1, "max_tokens": 20_000}, "logprobs"),
        (CHAT, {**ALL_LOGPROBS[CHAT], "max_tokens": 20_000}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1, "max_tokens": 200, "n": 100}, "logprobs"),
    ):
        status, answer = beside_a_healthy_stream.post(path, {**ASKED[path], **more})
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert "4194304" in answer["error"]["message"]


@pytest.mark.parametrize("path", TEXTS)
def test_all_of_a_prompt_is_not_streamed(server: RunningServer, path: str) -> None:
    body = {**ASKED[path], "prompt_logprobs": -1, "stream": True}
    status, answer = server.post(path, body)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    assert "stream" in answer["error"]["message"]


def test_minus_one_is_refused_where_it_has_no_meaning(server: RunningServer) -> None:
    for path, more, param in (
        (CHAT, {"top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": -2}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -2}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": -1, "use_beam_search": True, "best_of": 2}, "logprobs"),
        (RESPONSES, {"top_logprobs": -1}, "top_logprobs"),
    ):
        status, answer = server.post(path, {**ASKED[path], **more})
        assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_client_that_leaves_a_large_answer_ends_it(server: RunningServer) -> None:
    body = {"tokens": [7] * 2_000, "prompt_logprobs": -1, "max_tokens": 1}
    raw = json.dumps(body).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + raw)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    server.until(lambda: server.get("/health")[1]["pending"] == 0, "nothing is pending")
    assert server.get("/health")[1]["state"] == "ready"

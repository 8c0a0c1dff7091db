"""output_ids over real sockets: a stream cut after any delta continues byte for byte."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.serve.running_server import RunningServer

OPTIONS = {"include_output_ids": True, "include_usage": True}
COMPLETION = {
    "prompt": "the sea and the stone",
    "seed": 4,
    "max_tokens": 40,
    "ignore_eos": True,
    "stream_options": OPTIONS,
}
GRAMMAR = {"regex": "[a-z]{3}-[0-9]{12}-(yes|no) [a-z ]{4,80}"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", COMPLETION),
    "penalties": (
        "/v1/completions",
        {
            **COMPLETION,
            "temperature": 1.3,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.5,
            "logprobs": 3,
            "stop": ["e", "zz zz zz", "\ufffd\ufffd\ufffd"],
            "min_tokens": 24,
        },
    ),
    "stop held back": (
        "/v1/completions",
        {**COMPLETION, "return_token_ids": True, "logprobs": 1},
    ),
    "grammar": ("/v1/completions", {**COMPLETION, "structured_outputs": GRAMMAR}),
    "grammar with logprobs": (
        "/v1/completions",
        {**COMPLETION, "structured_outputs": GRAMMAR, "logprobs": 0},
    ),
    "usage in every chunk": (
        "/v1/completions",
        {**COMPLETION, "stream_options": {**OPTIONS, "continuous_usage_stats": True}},
    ),
    "ids": (
        "/generate",
        {"tokens": [5, 9, 11], "seed": 3, "max_tokens": 24, "logprobs": 1}
        | {"stream_options": OPTIONS, "ignore_eos": True, "dry_multiplier": 0.8},
    ),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "seed": 5,
            "max_tokens": 30,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": OPTIONS,
        },
    ),
}


def _stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[bytes]:
    """Return the blocks of a stream: events and comments."""
    with server.stream(path, body) as reader:
        assert reader.status == 200, reader.read()
        return [block for block in reader.read().split(b"\n\n") if block]


def _events(blocks: list[bytes]) -> list[bytes]:
    return [block for block in blocks if not block.startswith(b":")]


@pytest.mark.parametrize("name", CASES)
def test_a_stream_cut_after_any_delta_continues_byte_for_byte(
    server: RunningServer, name: str
) -> None:
    path, body = CASES[name]
    if name == "stop held back":  # parts of the answer begin a stop string that never comes
        plain = {key: value for key, value in body.items() if key != "stream_options"}
        text = server.post(path, plain)[1]["choices"][0]["text"]
        body = {**body, "stop": [text[at : at + 9] + "~#~" for at in range(20, 36)]}
    blocks = _stream(server, path, body)
    comments = [at for at, block in enumerate(blocks) if block.startswith(b': {"output_ids"')]
    assert len(comments) > 5
    cuts = sorted({*comments[:2], *comments[2::5], comments[-1]})
    output_ids: list[int] = []
    num_events = len(_events(blocks))
    if name == "stop held back":
        cursors = [json.loads(blocks[at][2:])["output_cursor"] for at in comments]
        held = [one.split(":")[3] != "0" for one in cursors]
        cuts += [at for at, holds in zip(comments, held, strict=True) if holds]
        assert any(held), "some deltas hold tokens back"
    for at in comments:
        cursor = json.loads(blocks[at][2:])
        output_ids += cursor["output_ids"]
        if at not in cuts:
            continue
        again = {
            **body,
            "output_ids": output_ids,
            "output_cursor": cursor["output_cursor"],
        }
        rest = _events(_stream(server, path, again))
        wanted = _events(blocks[at:])
        assert len(wanted) < num_events
        if name == "grammar":  # forced tokens may come in other runs: the joined text is equal
            assert _text(_events(blocks[:at])) + _text(rest) == _text(_events(blocks))
            assert rest[-2:] == wanted[-2:] or _usage(rest) == _usage(wanted)
            continue
        assert [_without_cached(one) for one in rest] == [_without_cached(one) for one in wanted]


SEVERAL = {**COMPLETION, "n": 3, "ignore_eos": False}
SEVERAL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "three choices": ("/v1/completions", {**SEVERAL, "temperature": 1.2, "logprobs": 1}),
    "ends at different places": (
        "/v1/completions",
        {**SEVERAL, "stop": ["q", "zz"], "frequency_penalty": 0.7, "best_of": 3},
    ),
    "two prompts of two choices": (
        "/v1/completions",
        {**SEVERAL, "prompt": ["the sea", "a stone"], "n": 2, "stop": ["q"]},
    ),
    "grammar": ("/v1/completions", {**SEVERAL, "structured_outputs": GRAMMAR, "max_tokens": 90}),
    "chat": (
        "/v1/chat/completions",
        {
            **{"messages": [{"role": "user", "content": "hello"}], "seed": 5, "n": 3},
            **{"max_tokens": 30, "logprobs": True, "stop": ["q"], "stream_options": OPTIONS},
        },
    ),
    "ids": (
        "/generate",
        {"tokens": [5, 9, 11], "seed": 3, "max_tokens": 24, "n": 2, "stream_options": OPTIONS},
    ),
}


@pytest.mark.parametrize("name", SEVERAL_CASES)
def test_each_of_several_choices_continues_where_it_was(server: RunningServer, name: str) -> None:
    path, body = SEVERAL_CASES[name]
    blocks = _stream(server, path, body)
    comments = [at for at, block in enumerate(blocks) if block.startswith(b': {"output_ids"')]
    first = json.loads(blocks[comments[0]][2:])
    num_choices = first["num_choices"]
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    cursors: list[str | None] = [None] * num_choices
    whole, num_ended = _events(blocks), set[int]()
    for number, at in enumerate(comments):
        comment = json.loads(blocks[at][2:])
        choice = comment["choice"]
        ids[choice] += comment["output_ids"]
        cursors[choice] = comment["output_cursor"]
        is_end = comment["output_cursor"].endswith(":end")
        if number > 1 and number % 7 and not is_end and at != comments[-1]:
            continue
        num_ended.add(sum(one is not None and one.endswith(":end") for one in cursors))
        again = {**body, "output_ids": ids, "output_cursor": cursors}
        rest = _events(_stream(server, path, again))
        before = _events(blocks[:at])
        assert _by_choice(before + rest) == _by_choice(whole), number
        numbers = [int(one.partition(b"\n")[0].rpartition(b":")[2]) for one in before + rest]
        assert numbers == list(range(1, len(numbers) + 1))
        assert [_usage_of(one) for one in rest[-2:]] == [_usage_of(one) for one in whole[-2:]]
    assert max(num_ended) == num_choices
    assert all(cursor is not None and cursor.endswith(":end") for cursor in cursors)


def _by_choice(events: list[bytes]) -> dict[int, Any]:
    """Return what the events of each choice say; of texts and ids all that they say together, since
    forced tokens may come in other runs."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        data = event.partition(b"data: ")[2]
        for choice in [] if data == b"[DONE]" else json.loads(data)["choices"]:
            joined = found.setdefault(choice["index"], {"said": []})
            for name, value in {**choice, **choice.pop("delta", {})}.items():
                if isinstance(value, str | list) and name not in ("finish_reason", "role"):
                    joined[name] = joined.get(name, type(value)()) + value
                elif name == "logprobs" and value is not None:
                    for key, values in value.items():
                        place = f"{name}.{key}"
                        joined[place] = joined.get(place, []) + list(values or [])
                elif value is not None:
                    joined["said"].append((name, value))
    return found


def _usage_of(event: bytes) -> Any:
    data = event.partition(b"data: ")[2]
    usage = {} if data == b"[DONE]" else json.loads(data)["usage"] or {}
    return {name: usage[name] for name in usage if name.endswith("tokens")}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"output_ids": [5, 6]}, "list of 2 lists"),
        ({"output_ids": [[5]]}, "list of 2 lists"),
        ({"output_ids": [[5], [6], [7]]}, "list of 2 lists"),
        ({"output_ids": [[5], 6]}, "list of 2 lists"),
        ({"output_ids": [[5], [10**9]]}, "token ids from 0"),
        ({"output_cursor": [f"cmpl-{'0' * 24}:1:2:3"] * 3}, "cursors of 3 choices"),
        ({"output_cursor": f"cmpl-{'0' * 24}:1:2:3"}, "cursors of 1 choices"),
        ({"output_cursor": [None, None]}, "or of none"),
        ({"output_cursor": [f"cmpl-{'0' * 24}:1:2:3", f"cmpl-{'1' * 24}:1:2:3"]}, "different"),
        ({"output_cursor": [f"cmpl-{'0' * 24}:1:2:3:00000000", None]}, "its digest differs"),
        (
            {"output_ids": [[5] * 41, [6]], "output_cursor": [f"cmpl-{'0' * 24}:1:2:3:end", None]},
            "41 tokens of choice 0",
        ),
        ({"stream": False, "output_cursor": None}, "2 choices"),
        ({"use_beam_search": True, "temperature": 0}, "beam"),
        ({"mirostat": 2}, "mirostat"),
    ],
)
def test_what_several_choices_cannot_continue_from_is_refused_by_name(
    server: RunningServer, more: dict[str, Any], words: str
) -> None:
    body = {"prompt": "the sea", "seed": 1, "max_tokens": 40, "n": 2, "stream": True}
    status, answer = server.post("/v1/completions", {**body, "output_ids": [[5], [6]], **more})
    assert status == 400, answer
    assert words in json.dumps(answer)


def test_choices_of_a_refused_continuation_are_not_counted(server: RunningServer) -> None:
    body = {"prompt": "the sea", "seed": 1, "max_tokens": 4, "n": 2, "stream": True}
    cursors = [f"cmpl-{'0' * 24}:1:2:0", None]
    finished = server.metric("quire_requests_total")
    refused = {**body, "output_ids": [[5] * 4, []], "output_cursor": cursors}
    status, answer = server.post("/v1/completions", refused)
    assert (status, "4 tokens" in answer["error"]["message"]) == (400, True), answer
    assert server.metric("quire_requests_total") == finished


OTHER = {"include_output_ids": True, "stream": True}
SAID = {"messages": [{"role": "user", "content": "hello"}]}
OTHER_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("/v1/messages", {**SAID, "max_tokens": 30, "seed": 5}),
    "message with a stop": (
        "/v1/messages",
        {**SAID, "max_tokens": 40, "seed": 6, "stop_sequences": ["q"], "top_k": 30},
    ),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 30, "seed": 5}),
    "response with a grammar": (
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 60, "seed": 5}
        | {"structured_outputs": {"regex": "[a-z ]{20,40}"}, "metadata": {"a": "b"}},
    ),
    "ollama's chat": (
        "/api/chat",
        {**SAID, "options": {"seed": 5, "num_predict": 30}, "logprobs": True, "top_logprobs": 2},
    ),
    "ollama's completion": (
        "/api/generate",
        {"prompt": "the sea", "options": {"seed": 5, "num_predict": 30}},
    ),
    "llama.cpp's completion": (
        "/completion",
        {"prompt": "the sea", "seed": 5, "n_predict": 30, "n_probs": 2, "return_tokens": True},
    ),
    "llama.cpp's with response_fields": (
        "/completion",
        {"prompt": "the sea", "seed": 5, "n_predict": 30, "response_fields": ["content", "stop"]},
    ),
}


@pytest.mark.parametrize("name", OTHER_CASES)
def test_a_stream_of_another_api_continues_byte_for_byte(server: RunningServer, name: str) -> None:
    path, body = OTHER_CASES[name]
    end = b"\n" if path.startswith("/api/") else b"\n\n"
    model = {"model": "tiny"} if path.startswith("/api/") else {}

    def streamed(**more: Any) -> list[bytes]:
        with server.stream(path, {**model, **body, **OTHER, **more}) as reader:
            assert reader.status == 200, reader.read()
            return reader.read().split(end)[:-1]

    blocks = streamed()
    comments = [at for at, block in enumerate(blocks) if block.startswith(b': {"output_ids"')]
    assert len(comments) > 5
    assert blocks[-1] == b': {"ended":null}'
    assert sum(b'"ended"' in block for block in blocks) == 1
    output_ids: list[int] = []
    for number, at in enumerate(comments):
        cursor = json.loads(blocks[at][2:])
        output_ids += cursor["output_ids"]
        if number > 2 and number % 4 and at != comments[-1]:
            continue
        again = streamed(output_ids=output_ids, output_cursor=cursor["output_cursor"])
        assert _plain(_events(again)) == _plain(_events(blocks[at:]))
    digest = cursor["output_cursor"][-8:]
    wrong = cursor["output_cursor"].replace(digest, f"{int(digest, 16) ^ 1:08x}")
    refused = {**model, **body, **OTHER, "output_ids": output_ids, "output_cursor": wrong}
    status, answer = server.post(path, refused)
    assert status == 400
    assert "its digest differs" in json.dumps(answer)


@pytest.mark.parametrize("is_stream", [True, False])
def test_each_answer_has_its_fingerprint_in_its_head(
    server: RunningServer, is_stream: bool
) -> None:
    """A router continues a stream by it, whatever the API."""
    [listed] = server.get("/v1/models")[1]["data"]
    for path, body in (*CASES.values(), *OTHER_CASES.values()):
        fields = {"model": "tiny", **body, "stream": is_stream}
        if not is_stream:
            fields.pop("stream_options", None)
        status, headers, _ = server.request("POST", path, fields)
        assert status == 200
        assert headers["x-quire-fingerprint"] == listed["system_fingerprint"]


def _plain(events: list[bytes]) -> list[bytes]:
    """Return events without times and counts of cached tokens, which differ by what ran before."""
    names = (
        rb'"(?:input_tokens|cache\w*|cached_tokens|completed_at|\w+_duration)":[0-9]+'
        rb'|"timings":\{[^}]*\}'
    )
    return [re.sub(names, b"", event) for event in events]


def test_the_event_id_of_another_client_s_stream_gives_nothing_but_its_name(
    server: RunningServer,
) -> None:
    """What goes on is decided by the tokens that the request has, not by the id in its cursor."""
    other = {**COMPLETION, "prompt": "a word of another client", "seed": 9, "max_tokens": 300}
    own = {**COMPLETION, "output_ids": [7, 8, 9]}
    alone = _text(_events(_stream(server, "/v1/completions", own)))
    whole = _text(_events(_stream(server, "/v1/completions", other)))
    with server.stream("/v1/completions", other) as reader:
        first = reader.next()
        cursor = f"{first['id']}:{first['created']}:3:0"
        blocks = _stream(server, "/v1/completions", {**own, "output_cursor": cursor})
        assert _text(_events(blocks)) == alone
        assert first["id"].encode() in blocks[0], "it is named so"
        rest = _text(_events([one for one in reader.read().split(b"\n\n") if b"data: " in one]))
    assert first["choices"][0]["text"] + rest == whole, "the other stream has not noticed"


def _text(events: list[bytes]) -> str:
    chunks = [json.loads(one.partition(b"data: ")[2]) for one in events if b"[DONE]" not in one]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def _usage(events: list[bytes]) -> Any:
    return json.loads(events[-2].partition(b"data: ")[2])["usage"]["completion_tokens"]


def _without_cached(event: bytes) -> Any:
    """Return the event without the count of cached tokens, which depends on what ran before."""
    name, _, data = event.partition(b"data: ")
    if data == b"[DONE]":
        return name, data
    if b"cached_tokens" not in data:
        return name, data  # byte for byte
    chunk = json.loads(data)
    chunk["usage"].pop("prompt_tokens_details")
    return name, chunk


def test_a_whole_answer_is_the_rest_and_counts_all_tokens(server: RunningServer) -> None:
    body = {name: value for name, value in COMPLETION.items() if name != "stream_options"}
    whole = server.post("/v1/completions", {**body, "return_token_ids": True, "logprobs": 0})[1]
    choice = whole["choices"][0]
    for cut in (1, 7, 39):
        known = choice["token_ids"][:cut]
        asked = {**body, "output_ids": known, "return_token_ids": True, "logprobs": 0}
        rest = server.post("/v1/completions", asked)[1]
        assert rest["choices"][0]["token_ids"] == choice["token_ids"][cut:]
        assert choice["text"].endswith(rest["choices"][0]["text"])
        wanted = choice["logprobs"]
        got = rest["choices"][0]["logprobs"]
        assert got["token_logprobs"] == wanted["token_logprobs"][cut:]
        assert got["text_offset"] == wanted["text_offset"][cut:]
        assert rest["usage"]["completion_tokens"] == 40
        assert rest["choices"][0]["finish_reason"] == "length"


def test_the_first_chunk_has_the_seed_beside_token_ids(server: RunningServer) -> None:
    body = {"prompt": "the sea", "max_tokens": 4, "return_token_ids": True}
    with server.stream("/v1/completions", body) as reader:
        chunks = [chunk for chunk in reader if chunk != "[DONE]"]
    assert chunks[0]["choices"][0]["seed"] == chunks[-1]["choices"][0]["seed"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2}, "a list of 2 lists"),
        ({"best_of": 2}, "best_of 2"),
        ({"prompt": ["a", "b"]}, "a list of 2 lists"),
        ({"output_ids": [[5], [6]]}, "token ids from 0"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"mirostat": 2}, "mirostat"),
        ({"seed": None}, "no seed"),
        ({"output_ids": "5"}, "a list"),
        ({"output_ids": [1, "2"]}, "token ids from 0"),
        ({"output_ids": [10**9]}, "token ids from 0"),
        ({"output_ids": [True]}, "token ids from 0"),
        ({"output_ids": [5] * 40}, "complete"),
        ({"output_ids": None, "output_cursor": f"cmpl-{'0' * 24}:1:2:3"}, "missing"),
        ({"output_cursor": "cmpl-1:2"}, "output_cursor"),
        ({"output_cursor": f"chatcmpl-{'0' * 24}:1:2:3"}, "output_cursor"),
        ({"output_cursor": 7}, "output_cursor"),
        ({"stream": True, "stream_options": {"resumable": True}}, "resumable"),
    ],
)
def test_other_combinations_are_refused_by_name(
    server: RunningServer, more: dict[str, Any], words: str
) -> None:
    body = {"prompt": "the sea", "seed": 1, "max_tokens": 40, "output_ids": [5, 6], **more}
    status, answer = server.post("/v1/completions", body)
    assert status == 400, answer
    assert words in answer["error"]["message"]
    assert answer["error"]["param"] in ("output_ids", "output_cursor")


def test_the_end_token_among_known_tokens_is_refused(server: RunningServer) -> None:
    body = {"tokens": [5], "seed": 1, "max_tokens": 9, "output_ids": [5, 6], "stop_token_ids": [6]}
    status, answer = server.post("/generate", body)
    assert status == 400
    assert "ends an answer" in answer["error"]["message"]


def test_known_tokens_that_leave_a_grammar_fail_that_request_only(server: RunningServer) -> None:
    body = {**COMPLETION, "structured_outputs": {"choice": ["yes", "no"]}, "output_ids": [60, 61]}
    del body["stream_options"]
    status, answer = server.post("/v1/completions", body)
    assert status == 400, answer
    assert server.get("/health")[0] == 200


def test_output_ids_of_a_stream_that_is_kept_are_not_reported(server: RunningServer) -> None:
    more = {"stream_options": {**OPTIONS, "resumable": True}}
    status, answer = server.post("/v1/completions", {**COMPLETION, "stream": True, **more})
    assert status == 400
    assert "include_output_ids" in answer["error"]["message"]
    several = {"prompt": "a", "n_predict": 4, "n_cmpl": 2, "stream": True}
    status, answer = server.post("/completion", {**several, "include_output_ids": True})
    assert status == 400
    assert "2 answers" in answer["error"]["message"]

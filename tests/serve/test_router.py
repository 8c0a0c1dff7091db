"""`quire route` before three servers: streams survive a killed and a stopped server, byte for byte.

The streams have seeds, penalties, grammars, log-probabilities, tools and stop strings. What may
differ from the answer alone is what names it: its id, its time and its count of cached tokens.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.serve import preloaded
from tests.serve.running_router import RunningRouter
from tests.serve.running_server import GIVE_UP_S, RunningServer

MODEL = "quire/models/box"
OPTIONS = {"include_usage": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "remember",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "maxLength": 60},
                    "why": {"type": "string", "maxLength": 120},
                },
                "required": ["place", "why"],
            },
        },
    }
]
PLAIN: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 250,
    "ignore_eos": True,
    "stream_options": OPTIONS,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me of a dog"}],
    "max_tokens": 100,
    "stream_options": OPTIONS,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**PLAIN, "seed": 1}),
    ("/v1/completions", {**PLAIN, "seed": 2, "logprobs": 3, "temperature": 1.4}),
    (
        "/v1/completions",
        {**PLAIN, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.6}
        | {"presence_penalty": 0.4, "dry_multiplier": 0.8, "min_tokens": 130},
    ),
    ("/v1/completions", {**PLAIN, "seed": 4, "stop": ["the end of", "zebra", "\n\n\n"]}),
    (
        "/v1/completions",
        {**PLAIN, "seed": 5, "logprobs": 0}
        | {"structured_outputs": {"regex": "([A-Z][a-z]{2,8} [a-z ]{20,60}\\. ){6}"}},
    ),
    ("/v1/completions", {**PLAIN, "seed": 6, "structured_outputs": {"regex": "[a-z ,]{300,350}"}}),
    ("/v1/chat/completions", {**CHAT, "seed": 7, "logprobs": True, "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {**CHAT, "seed": 8, "tools": TOOLS, "tool_choice": "required"},
    ),
    (
        "/generate",
        {"tokens": [5, 9, 11, 40], "seed": 9, "max_tokens": 150, "logprobs": 2}
        | {"ignore_eos": True, "stream_options": OPTIONS, "frequency_penalty": 0.9},
    ),
]


SAID = {"messages": [{"role": "user", "content": "Tell me of a dog"}]}
# As long as the streams without a grammar, which go on to their limit.
LONG_TEXT = {"type": "string", "minLength": 600, "maxLength": 640}
PARAMETERS = {"type": "object", "properties": {"place": LONG_TEXT}, "required": ["place"]}
OLLAMA = {"model": "box", "options": {"seed": 1, "num_predict": 250, "ignore_eos": True}}
OTHER_CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {**SAID, "max_tokens": 200, "ignore_eos": True, "seed": 1}),
    ("/v1/messages", {**SAID, "max_tokens": 200, "ignore_eos": True, "stop_sequences": ["zebra"]}),
    (
        "/v1/messages",
        {**SAID, "max_tokens": 400, "seed": 2, "tool_choice": {"type": "any"}}
        | {"tools": [{"name": "remember", "input_schema": PARAMETERS}]},
    ),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 200, "ignore_eos": True, "seed": 1}),
    (
        "/v1/responses",
        {"input": "Once", "max_output_tokens": 400, "seed": 2, "tool_choice": "required"}
        | {"tools": [{"type": "function", "name": "remember", "parameters": PARAMETERS}]},
    ),
    ("/api/chat", {**SAID, **OLLAMA, "logprobs": True, "top_logprobs": 2}),
    ("/api/chat", {**SAID, **OLLAMA, "format": PARAMETERS}),
    ("/api/generate", {"prompt": "Once upon a time", **OLLAMA}),
    (
        "/completion",
        {"prompt": "Once upon a time", "n_predict": 250, "ignore_eos": True, "seed": -1}
        | {"n_probs": 1, "return_tokens": True},
    ),
    ("/completion", {"prompt": [5, 9, 11, 40], "n_predict": 250, "ignore_eos": True, "seed": 3}),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        flags = ("--threads", "1", "--convert", "embed")
        started = [stack.enter_context(RunningServer(MODEL, *flags)) for _ in range(3)]
        yield started


def test_streams_survive_a_killed_and_a_stopped_server(servers: list[RunningServer]) -> None:
    alone = [_streamed(servers[0], path, body) for path, body in CASES]
    flags = ("--stall-seconds", "1.5", "--probe-seconds", "0.25", "--policy", "round-robin")
    with RunningRouter(*(server.url for server in servers), *flags) as router:
        for index, how in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            resumed = router.metric("quire_router_resumed_streams_total")
            victim = servers[index]

            def interrupt(victim: RunningServer = victim, how: int = how) -> None:
                os.kill(victim.process.pid, how)

            answers = _at_once(router, interrupt)
            for (path, body), got, wanted in zip(CASES, answers, alone, strict=True):
                assert normal(got) == normal(wanted), (how, path, body, got[-600:])
                _check_names(got)
            assert router.metric("quire_router_resumed_streams_total") > resumed, router.stderr()
        assert router.metric("quire_router_broken_streams_total") == 0
        states = {one["url"]: one["state"] for one in router.health()["replicas"]}
        assert states[servers[1].url] == "unreachable"
        assert states[servers[2].url] == "stalled"
        os.kill(servers[2].process.pid, signal.SIGCONT)
        router.until(lambda: router.health()["replicas_available"] == 2, "the stopped one returns")


def test_streams_of_other_apis_survive_a_killed_server(
    servers: list[RunningServer], tmp_path: Path
) -> None:
    with (
        RunningServer(MODEL, "--threads", "1", "--convert", "embed") as victim,
        _moving(victim, servers[0], tmp_path) as (router, move),
    ):
        answers = _at_once(router, move, OTHER_CASES)
        assert router.metric("quire_router_resumed_streams_total") >= len(OTHER_CASES)
        assert router.metric("quire_router_broken_streams_total") == 0
        found = re.search(rb'"id":"(resp_[0-9a-f]{24})"', answers[3])
        assert found is not None
        stored = json.loads(router.request("GET", f"/v1/responses/{found[1].decode()}")[1])
    deltas = re.findall(rb'"delta":("(?:[^"\\]|\\.)*")', answers[3])
    assert stored["output"][0]["content"][0]["text"] == "".join(map(json.loads, deltas))
    for (path, body), got in zip(OTHER_CASES, answers, strict=True):
        seed = re.search(rb'"seed":(\d+)', got)
        assert seed is not None, (path, got)
        again = body if path.startswith("/api/") else {**body, "seed": int(seed[1])}
        wanted = _streamed(servers[0], path, {**again, "stream": True})
        assert normal(got) == normal(wanted), (path, body)
        assert b"output_ids" not in got
        assert b'"ended"' not in got
        ids = re.findall(rb'"id":"((?:msg|resp)_[0-9a-f]{24})"', got)
        assert len(set(ids)) == (path in ("/v1/messages", "/v1/responses"))


SEVERAL_CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**PLAIN, "seed": 1, "n": 3, "logprobs": 0, "temperature": 1.2}),
    ("/v1/completions", {**PLAIN, "seed": 2, "n": 2, "best_of": 2, "frequency_penalty": 0.8}),
    ("/v1/completions", {**PLAIN, "seed": 3, "n": 2, "prompt": ["Once upon a time", "A dog"]}),
    ("/v1/completions", {**PLAIN, "seed": 4, "n": 3, "stop": ["the", "and"], "min_tokens": 40}),
    ("/v1/chat/completions", {**CHAT, "seed": 5, "n": 4, "max_tokens": 200, "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {**CHAT, "seed": 6, "n": 2, "tools": TOOLS, "tool_choice": "required"},
    ),
    ("/generate", {**CASES[-1][1], "n": 2}),
]


def test_each_choice_of_a_stream_survives_a_killed_server(
    servers: list[RunningServer], tmp_path: Path
) -> None:
    """Events of different choices may come in another order, those of one choice do not. On a busy
    machine a short answer may end before all have begun: then it is tried again."""
    alone = [_streamed(servers[0], path, {**body, "stream": True}) for path, body in SEVERAL_CASES]
    for _ in range(3):
        with (
            RunningServer(MODEL, "--threads", "1", "--convert", "embed") as victim,
            _moving(victim, servers[0], tmp_path) as (router, move),
        ):
            answers = _at_once(router, move, SEVERAL_CASES)
            num_resumed = router.metric("quire_router_resumed_streams_total")
            assert router.metric("quire_router_broken_streams_total") == 0
        for (path, body), got, wanted in zip(SEVERAL_CASES, answers, alone, strict=True):
            assert _by_choice(got) == _by_choice(wanted), (path, body)
            _check_names(got)
        if num_resumed >= len(SEVERAL_CASES):
            return
    raise AssertionError(f"{num_resumed} of {len(SEVERAL_CASES)} streams moved")


def _by_choice(raw: bytes) -> dict[bytes, list[bytes]]:
    """Return the events of each choice in their order, without their numbers."""
    found: dict[bytes, list[bytes]] = {}
    for event in normal(raw).split(b"\n\n"):
        data = event.partition(b"data: ")[2]
        index = re.search(rb'"choices":\[\{"index":(\d+)', data)
        found.setdefault(index[1] if index else b"", []).append(data)
    return found


def test_a_stream_whose_prompt_would_be_another_ends_with_an_error(tmp_path: Path) -> None:
    """The template has the time in it, so no other replica has the prompt of the first."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    flags = ("--threads", "1", "--convert", "embed", "--chat-template", str(template))
    cases = [OTHER_CASES[0], OTHER_CASES[3], OTHER_CASES[5]]
    cases += [("/v1/chat/completions", {**CHAT, "max_tokens": 200, "ignore_eos": True})]
    with (
        RunningServer(MODEL, *flags) as victim,
        RunningServer(MODEL, *flags) as other,
        _moving(victim, other, tmp_path) as (router, move),
    ):
        answers = _at_once(router, move, cases)
    for (path, _), got in zip(cases, answers, strict=True):
        last = got.rstrip().split(b"\n")[-1].removeprefix(b"data: ")
        assert b"the stream cannot go on: output_cursor is of another prompt" in last, path


@contextmanager
def _moving(
    victim: RunningServer, other: RunningServer, folder: Path
) -> Iterator[tuple[RunningRouter, Callable[[], None]]]:
    """A router before a server only, and what stops that server, lets another one join, and then
    kills the first: all streams that have begun move."""
    file = folder / "replicas"
    file.write_text(f"{victim.url}\n")
    flags = ("--probe-seconds", "0.25", "--wait-seconds", "30")
    with RunningRouter("--replicas-file", str(file), *flags) as router:

        def move() -> None:
            os.kill(victim.process.pid, signal.SIGSTOP)
            file.write_text(f"{victim.url}\n{other.url}\n")
            router.until(lambda: len(router.health()["replicas"]) == 2, "the other joins")
            os.kill(victim.process.pid, signal.SIGKILL)

        yield router, move


def _at_once(
    router: RunningRouter, interrupt: Any, cases: list[tuple[str, dict[str, Any]]] = CASES
) -> list[bytes]:
    """Stream all cases at once, and call `interrupt` when tokens of each of them have come."""
    answers = dict.fromkeys(range(len(cases)), b"")
    changed = threading.Condition()

    def stream(index: int) -> None:
        path, body = cases[index]
        for line in router.lines("POST", path, {**body, "stream": True}):
            with changed:
                answers[index] += line
                changed.notify()

    def have_begun() -> bool:
        return min(re.subn(rb"(?m)^(data: )?{", b"", one)[1] for one in answers.values()) >= least

    least = 2 if cases is CASES else 8  # a message begins with events before its text
    threads = [threading.Thread(target=stream, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    with changed:
        assert changed.wait_for(have_begun, GIVE_UP_S), "never happened: tokens of each stream"
    interrupt()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(len(cases))]


def _streamed(server: RunningServer, path: str, body: dict[str, Any]) -> bytes:
    with server.stream(path, body) as reader:
        return reader.read()


def normal(raw: bytes) -> bytes:
    """Return a stream without what names it: ids, times and cached tokens; and heartbeats."""
    names = (
        rb'"created(?:_at)?":(?:\d+|"[^"]*")|"(?:completed_at|\w+_duration)":\d+'
        rb"|(?:cmpl|chatcmpl|gen|call|msg|resp|toolu|fc|rs)[-_][0-9a-f]{24}"
        rb'|"(?:cached_tokens|cache_read_input_tokens|input_tokens)":\d+|"timings":\{[^}]*\}'
        rb"|event: ping\ndata: [^\n]*\n\n"
    )
    return re.sub(rb"(?m)^: *\n\n", b"", re.sub(names, b"", raw))


def _check_names(raw: bytes) -> None:
    """One id and one time for all chunks, and events numbered from 1 without a gap."""
    assert len(set(re.findall(rb'"created":(\d+)', raw))) == 1
    assert len(set(re.findall(rb'"id":"((?:cmpl|chatcmpl|gen)-[0-9a-f]{24})"', raw))) == 1
    numbers = [int(number) for number in re.findall(rb"(?m)^id: [a-z]+-[0-9a-f]+:(\d+)$", raw)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert b"output_cursor" not in raw
    assert raw.rstrip().endswith(b"data: [DONE]")


def _header_names(port: int, path: str, body: Any) -> list[str]:
    """Return the names of the headers of a response, repeated ones as often as they are there."""
    connection = HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return [name for name, _ in response.getheaders()]


def test_whole_answers_models_and_refusals(servers: list[RunningServer]) -> None:
    with RunningRouter(servers[0].url) as router:
        body = {"prompt": "Once", "seed": 1, "max_tokens": 8}
        status, raw = router.request("POST", "/v1/completions", body)
        text = json.loads(raw)["choices"][0]["text"]
        assert status == 200
        assert text == servers[0].post("/v1/completions", body)[1]["choices"][0]["text"]
        names = [name.lower() for name in _header_names(router.port, "/tokenize", {"prompt": "a"})]
        assert sorted(set(names)) == sorted(names), "the router's own or the replica's"
        status, raw = router.request("GET", "/v1/models")
        assert [one["id"] for one in json.loads(raw)["data"]] == ["box"]
        assert router.request("GET", "/v1/models/box")[0] == 200
        assert router.request("POST", "/tokenize", {"prompt": "a b"})[0] == 200
        for path, body, key in (
            ("/v1/embeddings", {"input": ["a dog", "rain"]}, "data"),
            ("/pooling", {"input": "a dog"}, "data"),
            ("/v1/score", {"text_1": "a dog", "text_2": ["a cat", "rain"]}, "data"),
            ("/v1/rerank", {"query": "a dog", "documents": ["a cat", "rain"]}, "results"),
        ):
            status, raw = router.request("POST", path, body)
            assert status == 200, raw
            assert json.loads(raw)[key] == servers[0].post(path, body)[1][key]
        for method, path, sent, status, code in (
            ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404, "model_not_found"),
            ("POST", "/v1/completions", {"prompt": 7}, 400, "invalid_value"),
            ("POST", "/admin/drain", {}, 501, "not_routed"),
            ("POST", "/v1/files", {}, 501, "not_routed"),
            ("GET", "/v1/batches/x", None, 501, "not_routed"),
            ("GET", "/props", None, 501, 501),  # in the form of llama.cpp
            ("GET", "/v1/responses/resp_1", None, 404, "response_not_found"),
            ("GET", "/v1/responses/a%0d%0ab", None, 404, "unknown_url"),
            ("POST", "/v1/embeddings", {"input": 7}, 400, "invalid_value"),  # the replica's refusal
            ("GET", "/nothing", None, 404, "unknown_url"),
            ("GET", "/v1/completions", None, 405, "method_not_allowed"),
            ("POST", "/v1/completions?a=1", {"prompt": "a"}, 400, "invalid_value"),
        ):
            got, raw = router.request(method, path, sent)
            assert (got, json.loads(raw)["error"]["code"]) == (status, code), raw


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_has_finished_sending_is_answered_as_by_its_server(
    servers: list[RunningServer], is_stream: bool
) -> None:
    """As `nc -N` does, over both event loops."""
    body = json.dumps({**CHAT, "seed": 1, "stream": is_stream, "stream_options": None}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with RunningRouter(servers[0].url) as router:
        answers = []
        for port in (servers[0].port, router.port):
            with socket.create_connection(("127.0.0.1", port), GIVE_UP_S) as connection:
                connection.sendall(head % len(body) + body)
                connection.shutdown(socket.SHUT_WR)
                answers.append(b"".join(iter(partial(connection.recv, 65536), b"")))
    by_server, by_router = answers
    assert by_router.startswith(b"HTTP/1.1 200 OK\r\n")
    assert _texts(by_router) == _texts(by_server) != []


def test_routers_that_share_a_port_answer_for_each_other(servers: list[RunningServer]) -> None:
    body = {"prompt": "Once", "seed": 1, "max_tokens": 8}
    path, shares = "/v1/completions", "--reuse-port"
    text = servers[0].post(path, body)[1]["choices"][0]["text"]
    with (
        RunningRouter(servers[0].url, shares) as first,
        RunningRouter(servers[0].url, shares, port=first.port) as second,
    ):
        assert second.port == first.port
        alone = preloaded.run("route", servers[0].url, "--port", str(first.port))
        assert alone.returncode != 0
        assert f"cannot listen at 127.0.0.1 port {first.port}" in alone.stderr
        for router in (first, second):
            for _ in range(20):
                status, raw = router.request("POST", path, body)
                assert (status, json.loads(raw)["choices"][0]["text"]) == (200, text)
        first.process.kill()
        first.process.wait()
        for _ in range(20):
            assert second.request("POST", path, body)[0] == 200
        assert second.metric("quire_router_requests_total") > 20


def test_models_take_turns_in_memory(tmp_path: Path) -> None:
    """With room for one engine the others sleep, and a request starts its model's."""
    settings = tmp_path / "route.toml"
    settings.write_text("[sleep]\nmax-awake = 1\n")
    names = ("one", "two", "three")
    with ExitStack() as stack:
        servers = []
        for name in names:
            flags = ("--threads", "1", "--restart-engine", "--served-model-name", name)
            servers.append(stack.enter_context(RunningServer(MODEL, *flags)))
        body = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 16}
        text = servers[0].post("/v1/completions", body)[1]["choices"][0]["text"]
        urls = [server.url for server in servers]
        router = stack.enter_context(RunningRouter(*urls, "--config", str(settings)))
        give_up_s = time.monotonic() + GIVE_UP_S
        while _states(servers) != ["ready", "asleep", "asleep"]:
            assert time.monotonic() < give_up_s, _states(servers)
            time.sleep(0.05)
        for name in (*names, "one", "three"):
            status, raw = router.request("POST", "/v1/completions", {**body, "model": name})
            assert status == 200, raw
            assert json.loads(raw)["choices"][0]["text"] == text
            awake = [
                one for one, state in zip(names, _states(servers), strict=True) if state == "ready"
            ]
            assert awake == [name]


def _states(servers: list[RunningServer]) -> list[str]:
    return [server.get("/health")[1]["state"] for server in servers]


def test_other_dialects_are_answered_as_by_the_replica(servers: list[RunningServer]) -> None:
    with RunningRouter(servers[0].url) as router:
        seed = {"seed": 3, "temperature": 0.0}
        options = {**seed, "num_predict": 8}
        chat = {"messages": [{"role": "user", "content": "Tell me of a dog"}]}
        for path, body in (
            ("/api/chat", {"model": "box", **chat, "options": options}),
            ("/api/generate", {"model": "box", "prompt": "Once", "options": options}),
            ("/completion", {"prompt": "Once", "n_predict": 8, "stream": True, **seed}),
            ("/infill", {"input_prefix": "Once", "input_suffix": "end", "n_predict": 4, **seed}),
            ("/api/show", {"model": "box"}),
            ("/api/embed", {"model": "box", "input": "a dog"}),
            ("/v1/messages?beta=true", {**chat, "max_tokens": 8, **seed}),
            ("/v1/messages/count_tokens?beta=true", chat),
            ("/v1/messages?beta=true&x=1", {**chat, "max_tokens": 8}),
            ("/chat/completions/?x=1", chat),
            ("/chat/completions/", {**chat, "max_tokens": 8, **seed}),
        ):
            status, raw = router.request("POST", path, body)
            alone, wanted = _alone(servers[0], "POST", path, body)
            assert (status, _form(raw)) == (alone, _form(wanted)), path
            assert _texts(raw) == _texts(wanted), path
        assert json.loads(router.request("GET", "/api/tags")[1])["models"][0]["name"] == "box"
        assert router.request("GET", "/api/version") == _alone(servers[0], "GET", "/api/version")
        status, raw = router.request("POST", "/api/chat", {"model": "other", **chat})
        assert (status, list(json.loads(raw))) == (404, ["error"])


def test_a_page_of_an_accepted_origin_uses_servers_that_accept_none(
    servers: list[RunningServer],
) -> None:
    page = {"origin": "https://app.example"}
    asks_first = {**page, "access-control-request-method": "POST"}
    chat = {"messages": CHAT["messages"], "max_tokens": 4}
    body, stream = json.dumps(chat), json.dumps({**chat, "stream": True})
    with RunningRouter(servers[0].url, "--cors-origin", page["origin"]) as router:
        connection = HTTPConnection("127.0.0.1", router.port, timeout=GIVE_UP_S)
        for method, sent, headers, wanted in (
            ("OPTIONS", None, asks_first, 204),
            ("POST", body, page, 200),
            ("POST", stream, page, 200),
            ("POST", body, {"origin": "https://other.example"}, 403),
            ("PUT", body, page, 405),
        ):
            connection.request(method, "/v1/chat/completions", sent, headers)
            response = connection.getresponse()
            raw = response.read()
            assert (response.status, bool(raw)) == (wanted, wanted != 204)
            allowed = response.headers.get_all("access-control-allow-origin")
            assert allowed == (None if wanted == 403 else [page["origin"]])
            assert response.headers.get_all("vary") == ["origin"]
        connection.close()


def _texts(raw: bytes) -> list[bytes]:
    return re.findall(rb'"(?:content|response)":"((?:[^"\\]|\\.)*)"', raw)


def _form(raw: bytes) -> bytes:
    """Return a body without what depends on time, on sampling without a seed and on ids."""
    return re.sub(rb'(?<=:)(?:-?[0-9][0-9.e-]*|"[^"]*")|-?[0-9][0-9.e-]*', b"", raw)


def test_a_conversation_of_responses_stays_at_its_server(
    servers: list[RunningServer], tmp_path: Path
) -> None:
    file = tmp_path / "route.toml"
    file.write_text(
        f'replicas = ["{servers[0].url}", "{servers[2].url}"]\npolicy = "round-robin"\n'
        '[models]\nstory = "box"\n[hedging]\n[quotas]\ntokens-per-minute = 1_000_000\n'
    )
    with RunningRouter("--config", str(file)) as router:
        made = []
        for _ in range(2):
            body = {"model": "story", "input": "a dog", "max_output_tokens": 8, "seed": 1}
            status, raw = router.request("POST", "/v1/responses", body)
            assert status == 200, raw
            made.append(json.loads(raw)["id"])
        homes = [
            [
                _alone(one, "GET", f"/v1/responses/{id_}", None)[0]
                for one in (servers[0], servers[2])
            ]
            for id_ in made
        ]
        assert homes == [[200, 404], [404, 200]]
        with RunningRouter("--config", str(file)) as second:  # it has seen none of them
            for id_ in made:
                more = {"model": "box", "input": "Go on.", "previous_response_id": id_}
                status, raw = second.request(
                    "POST", "/v1/responses", {**more, "max_output_tokens": 4, "stream": True}
                )
                assert (status, b"response.incomplete" in raw) == (200, True), raw
                last = json.loads(re.findall(rb"data: (.*)", raw)[-1])["response"]["id"]
                assert second.request("GET", f"/v1/responses/{last}/input_items?limit=1")[0] == 200
                assert second.request("DELETE", f"/v1/responses/{id_}")[0] == 200
                assert second.request("GET", f"/v1/responses/{id_}")[0] == 404
        stream = {"model": "story", "prompt": "Once", "seed": 1, "max_tokens": 8, "stream": True}
        status, raw = router.request("POST", "/v1/completions", stream)
        assert normal(raw) == normal(
            _streamed(servers[0], "/v1/completions", {**stream, "model": "box"})
        )
        text = router.request("GET", "/metrics")[1].decode()
        assert 'quire_router_quota_tokens_total{kind="used"}' in text


CASCADES = """
[cascades.replaced]
small = "box"
large = "story"
min-mean-logprob = 0
judge-streams = true

[cascades.kept]
small = "story"
large = "none"
min-mean-logprob = -100
judge-streams = true

[models]
story = "box"
"""


def test_cascades_before_a_real_server(servers: list[RunningServer], tmp_path: Path) -> None:
    file = tmp_path / "route.toml"
    file.write_text(CASCADES)
    body = {"messages": CHAT["messages"], "max_tokens": 16, "seed": 4, "ignore_eos": True}
    path = "/v1/chat/completions"
    alone = servers[0].post(path, body)[1]
    with RunningRouter("--config", str(file), servers[0].url) as router:
        for model in ("replaced", "kept"):
            status, raw = router.request("POST", path, {**body, "model": model})
            whole = json.loads(raw)
            assert (status, whole["choices"]) == (200, alone["choices"])
            assert whole["usage"]["completion_tokens"] == 16
            sent = {**body, "model": model, "stream": True}
            status, raw = router.request("POST", path, sent)
            assert _texts(raw) == _texts(_streamed(servers[0], path, {**sent, "model": "box"}))
            assert (b'"logprob"' in raw, raw.endswith(b"data: [DONE]\n\n")) == (False, True)
        text = router.request("GET", "/metrics")[1].decode()
        for labels in (
            'cascade="replaced",decision="low-confidence"',
            'cascade="kept",decision="small"',
        ):
            assert f"quire_router_cascade_decisions_total{{{labels}}} 2.0" in text


def test_a_conversation_beyond_the_context_is_summarized_on_request(
    servers: list[RunningServer], tmp_path: Path
) -> None:
    """The built-in model has a context of 512 tokens, and summarizes as badly as it can."""
    file, path = tmp_path / "route.toml", "/v1/chat/completions"
    file.write_text('[summaries]\nmodel = "story"\nmax-tokens = 32\n[models]\nstory = "box"\n')
    turns = [
        {"role": role, "content": f"The {role} said that dog number {at} ran to the big tree."}
        for at in range(20)
        for role in ("user", "assistant")
    ]
    body = {"messages": [*turns, *CHAT["messages"]], "max_tokens": 12, "seed": 5}
    with RunningRouter("--config", str(file), servers[0].url) as router:
        status, raw = router.request("POST", path, body)
        assert (status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")
        asked = {**body, "summarize_prompt": True}
        status, raw = router.request("POST", path, asked)
        assert status == 200, raw
        whole = json.loads(raw)
        summary = whole["prompt_summary"]
        assert summary["messages"] == len(turns)
        assert summary["requests"] > 1
        assert summary["usage"]["prompt_tokens"] > 512 > whole["usage"]["prompt_tokens"]
        status, raw = router.request("POST", path, {**asked, "stream": True})
        assert json.loads(re.findall(rb"data: (\{.*)", raw)[0])["prompt_summary"] == summary
        text = "".join(json.loads(f'"{one.decode()}"') for one in _texts(raw))
        assert text == whole["choices"][0]["message"]["content"], "the same, streamed"
        status, raw = _alone(servers[0], "POST", path, asked)
        assert (status, b"quire route" in raw) == (400, True), "a server names the router"


def test_texts_go_where_their_prompt_is_cached(tmp_path: Path) -> None:
    """Each server computed its prompt before the router came, so only its events say so."""
    texts = [f"{animal} went home. " * 30 for animal in ("A dog", "A cat")]
    bodies = [{"messages": [{"role": "user", "content": text}], "max_tokens": 1} for text in texts]
    path, lines = "/v1/chat/completions", ["[kv-events]", "tokenize-ms = 10000"]
    lines.append("min-prompt-tokens = 0")
    with ExitStack() as stack:
        servers = []
        for at in range(2):
            places = {
                "endpoint": f"ipc://{tmp_path}/{at}",
                "replay_endpoint": f"ipc://{tmp_path}/r{at}",
            }
            events = json.dumps({"enable_kv_cache_events": True, **places})
            flags = ("--threads", "1", "--kv-events-config", events)
            servers.append(stack.enter_context(RunningServer(MODEL, *flags)))
            assert servers[at].post(path, bodies[at])[0] == 200
            lines += [
                f'[kv-events.replicas."{servers[at].url}"]',
                f'endpoint = "{places["endpoint"]}"',
            ]
            lines.append(f'replay-endpoint = "{places["replay_endpoint"]}"')
        file = tmp_path / "route.toml"
        file.write_text("\n".join(lines))
        urls = [server.url for server in servers]
        router = stack.enter_context(RunningRouter("--config", str(file), *urls))
        router.until(lambda: router.metric("quire_router_known_blocks") > 10, "events of both")
        for at in (0, 1, 1, 0, 1, 0):
            status, raw = router.request("POST", path, bodies[at])
            assert status == 200
            assert json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert router.metric("quire_router_kv_event_invalid_batches") == 0


def _alone(server: RunningServer, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Return status and body of a server without the router."""
    status, _, raw = server.request(method, path, body)
    return status, raw

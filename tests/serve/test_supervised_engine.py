"""`quire serve --restart-engine`: answers survive a killed and a stopped engine, byte for byte.

Streams and whole answers have seeds, penalties, grammars, log-probabilities, tools, stop strings,
several choices, beams and mirostat. What may differ from the answer alone is what names it: its id,
its time and its count of cached tokens.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import (
    GIVE_UP_S,
    RunningServer,
    children_of,
    engines_of,
    kill,
)

MODEL = "quire/models/box"
OPTIONS = {"include_usage": True}
NUM_TRIES = 10
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "remember",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 60}},
                "required": ["place"],
            },
        },
    }
]
PLAIN: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me of a dog"}],
    "max_tokens": 100,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**PLAIN, "seed": 2, "logprobs": 3, "temperature": 1.4}),
    (
        "/v1/completions",
        {**PLAIN, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.6}
        | {"presence_penalty": 0.4, "dry_multiplier": 0.8, "min_tokens": 130},
    ),
    ("/v1/completions", {**PLAIN, "seed": 4, "stop": ["the end of", "zebra", "\n\n\n"]}),
    ("/v1/completions", {**PLAIN, "seed": 5, "n": 3, "best_of": 3, "logprobs": 1}),
    ("/v1/completions", {**PLAIN, "seed": 6, "prompt": ["A dog", "A cat"], "max_tokens": 100}),
    ("/v1/completions", {**PLAIN, "seed": 7, "mirostat": 2, "max_tokens": 100}),
    ("/v1/completions", {**PLAIN, "seed": 8, "structured_outputs": {"regex": "[a-z ,]{300,350}"}}),
    ("/v1/chat/completions", {**CHAT, "seed": 9, "logprobs": True, "ignore_eos": True}),
    ("/v1/chat/completions", {**CHAT, "seed": 10, "tools": TOOLS, "tool_choice": "required"}),
    (
        "/generate",
        {"tokens": [5, 9, 11, 40], "seed": 11, "max_tokens": 150, "logprobs": 2}
        | {"ignore_eos": True, "frequency_penalty": 0.9},
    ),
    ("/v1/messages", {**CHAT, "seed": 12, "ignore_eos": True}),
]
# Not streamed. Of beams and best_of nothing is known before the end.
WHOLE: list[tuple[str, dict[str, Any]]] = [
    CASES[1],
    CASES[3],
    CASES[5],
    CASES[8],
    ("/v1/completions", {**PLAIN, "use_beam_search": True, "n": 2, "temperature": 0, "seed": 1}),
    ("/v1/completions", {**PLAIN, "seed": 13, "best_of": 3, "max_tokens": 140}),
]
FLAGS = ("--threads", "1", "--restart-engine", "--restart-limit", "50", "--watchdog-seconds", "5")


class Streams:
    """The streams of all cases, read at once by a thread each."""

    def __init__(self, server: RunningServer, cases: list[tuple[str, dict[str, Any]]]) -> None:
        self.raw = [b""] * len(cases)
        self._server = server
        self._changed, self._ended = threading.Condition(), set[int]()
        self._threads = [
            threading.Thread(target=self._read, args=(index, path, body))
            for index, (path, body) in enumerate(cases)
        ]
        for thread in self._threads:
            thread.start()

    def until_begun(self, num_bytes: int) -> None:
        """Wait until each has so many bytes, or its end.

        Returns with the last of them, when at least that stream goes on.
        """
        with self._changed:
            have_begun = self._changed.wait_for(
                lambda: all(
                    len(raw) >= num_bytes or index in self._ended
                    for index, raw in enumerate(self.raw)
                ),
                GIVE_UP_S,
            )
        assert have_begun, "never happened: events of each stream"

    def join(self) -> list[bytes]:
        for thread in self._threads:
            thread.join()
        return self.raw

    def _read(self, index: int, path: str, body: dict[str, Any]) -> None:
        options = {} if path == "/v1/messages" else {"stream_options": OPTIONS}
        try:
            with self._server.stream(path, {**body, **options}) as reader:
                assert reader.status == 200
                for line in reader._response:
                    with self._changed:
                        self.raw[index] += line
                        self._changed.notify()
        finally:
            with self._changed:
                self._ended.add(index)
                self._changed.notify()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("batches") / "store"
    flags = ("--convert", "embed", "--batch-store", str(store), "--batch-lines", "2")
    with RunningServer(MODEL, *FLAGS, *flags) as server:
        yield server


def normal(raw: bytes) -> bytes:
    """Leave out what names an answer, and put the events of each choice together."""
    names = rb'"created":\d+|(?:cmpl|chatcmpl|gen|call|msg)[-_][0-9a-f]{24}(?::\d+)?'
    counts = rb'|"(?:cached_tokens|(?:cache_(?:read|creation)_)?input_tokens)":\d+'
    raw = re.sub(rb"(?m)^:[^\n]*\n\n", b"", re.sub(names + counts, b"", raw))
    lines = [line for line in raw.split(b"\n") if line and not line.startswith(b"id: ")]
    return b"\n".join(sorted(lines, key=_choice_of))


def _choice_of(line: bytes) -> int:
    found = re.search(rb'"index":(\d+)', line)
    return int(found[1]) if found else -1


def test_answers_survive_a_killed_engine(server: RunningServer) -> None:
    alone = [_streamed(server, path, body) for path, body in CASES]
    whole = [server.request("POST", path, body)[2] for path, body in WHOLE]
    restarts = server.metric("quire_engine_restarts_total")
    streams = Streams(server, CASES)
    answers: dict[int, tuple[int, bytes]] = {}

    def ask(index: int, path: str, body: dict[str, Any]) -> None:
        status, _, raw = server.request("POST", path, body)
        answers[index] = status, raw

    threads = [
        threading.Thread(target=ask, args=(index, path, body))
        for index, (path, body) in enumerate(WHOLE)
    ]
    for thread in threads:
        thread.start()
    streams.until_begun(600)
    kill(server.engine_pid)
    for (path, body), got, wanted in zip(CASES, streams.join(), alone, strict=True):
        assert normal(got) == normal(wanted), (path, body, got[-300:])
        _check_numbers(got)
    for thread in threads:
        thread.join()
    for index, wanted in enumerate(whole):
        status, raw = answers[index]
        assert status == 200, raw
        assert normal(raw) == normal(wanted), WHOLE[index]
    server.until(lambda: server.metric("quire_engine_restarts_total") > restarts, "a restart")
    line = r"the engine died and is restarted .*open=[1-9]"
    server.until(lambda: re.search(line, server.stderr()) is not None, "its line is logged")
    server.until(lambda: server.get("/health")[1]["state"] == "ready", "ready")


def test_batches_background_responses_and_embeddings_go_on(server: RunningServer) -> None:
    asked = {"model": "box", "input": "Once upon a time", "max_output_tokens": 400}
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {**PLAIN, "seed": number, "max_tokens": 150},
        }
        for number in range(4)
    ]
    texts = {"input": ["a dog", "rain"]}
    vectors = server.post("/v1/embeddings", texts)[1]["data"]
    server.until(lambda: server.get("/health")[0] == 200, "ready")
    file = _uploaded(server, "\n".join(map(json.dumps, lines)).encode())
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    status, batch = server.post("/v1/batches", wanted)
    assert status == 200, batch
    status, queued = server.post("/v1/responses", {**asked, "background": True})
    assert status == 200, queued
    path = f"/v1/responses/{queued['id']}"
    done = ("completed", "failed", "incomplete")
    server.until(
        lambda: (
            server.metric("quire_running_requests") >= 1 or server.get(path)[1]["status"] in done
        ),
        "it runs",
    )
    kill(server.engine_pid)
    server.until(lambda: server.get(path)[1]["status"] in done, "the response ends")
    assert server.get(path)[1]["status"] in ("completed", "incomplete")
    path = f"/v1/batches/{batch['id']}"
    server.until(lambda: server.get(path)[1]["status"] == "completed", "the batch ends")
    batch = server.get(path)[1]
    assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    answers = server.request("GET", f"/v1/files/{batch['output_file_id']}/content")[2]
    for line in map(json.loads, answers.splitlines()):
        got = line["response"]["body"]["choices"][0]["text"]
        body = lines[int(line["custom_id"])]["body"]
        assert got == server.post("/v1/completions", body)[1]["choices"][0]["text"]
    assert server.post("/v1/embeddings", texts)[1]["data"] == vectors


def test_restarting_is_reported_and_refuses(server: RunningServer) -> None:
    """Requests that come while no engine serves get 503 with retry-after, as /health does; readers
    of /health/beats have an event, and beats all the time."""
    server.until(lambda: server.get("/health")[0] == 200, "ready")
    if not server.metric("quire_engine_restarts_total"):  # the next comes after a delay
        kill(server.engine_pid)
        server.until(lambda: server.metric("quire_engine_restarts_total") > 0, "restarted")
    server.until(lambda: server.get("/health")[0] == 200, "ready")
    beats = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    beats.request("GET", "/health/beats")
    events = beats.getresponse()
    assert events.readline() == b'data: {"ok":true,"state":"ready","reason":""}\n'
    kill(server.engine_pid)
    server.until(lambda: server.get("/health")[1]["state"] == "restarting", "it is restarted")
    status, headers, raw = server.request("GET", "/health")
    assert (status, json.loads(raw)["ok"]) == (503, False)
    assert int(headers["retry-after"]) >= 1
    for stream in (False, True):
        body = {**PLAIN, "stream": stream}
        status, headers, raw = server.request("POST", "/v1/completions", body)
        assert (status, json.loads(raw)["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
    server.until(lambda: server.get("/health")[0] == 200, "ready")
    lines = [events.readline() for _ in range(8)]
    while sum(line.startswith(b"data") for line in lines) < 2:
        lines.append(events.readline())
    assert set(lines) >= {b":\n", b"\n"}
    states = [json.loads(line[6:])["state"] for line in lines if line.startswith(b"data")]
    assert states == ["restarting", "ready"]
    beats.close()


def test_the_limit_ends_the_server_with_an_error_event(tiny: Path) -> None:
    flags = ("--threads", "1", "--restart-engine", "--restart-limit", "1")
    with RunningServer(tiny, *flags) as server:
        kill(server.engine_pid)
        server.until(
            lambda: (
                server.metric("quire_engine_restarts_total") == 1
                and server.get("/health")[0] == 200
            ),
            "it is restarted",
        )
        with server.stream("/v1/completions", {**PLAIN, "max_tokens": 30_000}) as reader:
            reader.next()
            kill(server.engine_pid)
            *_, last = reader
        assert last["error"]["code"] == "worker_error", last
        assert "--restart-limit 1 allows no further restart" in last["error"]["message"]
        assert server.exit_code() == 1


def test_several_api_processes_share_the_restarted_engine() -> None:
    """Also of a stopped engine, which only the missing progress shows."""
    cases = [CASES[0], CASES[3], CASES[6], CASES[9]]
    with RunningServer(MODEL, *FLAGS, "--api-processes", "2") as server:
        alone = [_streamed(server, path, body) for path, body in cases]
        streams = Streams(server, cases)
        streams.until_begun(600)
        [engine] = engines_of(server)
        os.kill(engine, signal.SIGSTOP)
        for (path, body), got, wanted in zip(cases, streams.join(), alone, strict=True):
            assert normal(got) == normal(wanted), (path, body, got[-300:])
            _check_numbers(got)
        # The stopped engine answers nothing, even if it was stopped after the streams.
        assert server.post("/v1/completions", PLAIN)[0] == 200
        assert server.metric("quire_engine_restarts_total") >= 1
        said = "the engine makes no progress"
        server.until(lambda: said in server.stderr(), "its line is logged")
        # An API process that is replaced uses the engine that runs now.
        [first, *_] = set(children_of(server.process.pid)) - set(engines_of(server))
        kill(first)
        server.until(lambda: len(children_of(server.process.pid)) == 3, "it is replaced")
        for _ in range(8):
            assert server.post("/v1/completions", {**PLAIN, "max_tokens": 2})[0] == 200


def _check_numbers(raw: bytes) -> None:
    """Events are numbered from 1 without a gap, and the stream is complete."""
    numbers = [int(number) for number in re.findall(rb"(?m)^id: [a-z]+-[0-9a-f]+:(\d+)$", raw)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert b'"error"' not in raw
    assert raw.rstrip().endswith((b"data: [DONE]", b'"type":"message_stop"}')), raw[-200:]


def _streamed(server: RunningServer, path: str, body: dict[str, Any]) -> bytes:
    return Streams(server, [(path, body)]).join()[0]


def _uploaded(server: RunningServer, raw: bytes) -> str:
    border = "border"
    parts = [
        f'--{border}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode(),
        f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
        "Content-Type: application/json\r\n\r\n".encode(),
        raw,
        f"\r\n--{border}--\r\n".encode(),
    ]
    status, _, answer = server.request(
        "POST",
        "/v1/files",
        b"".join(parts),
        **{"content-type": f"multipart/form-data; boundary={border}"},
    )
    assert status == 200, answer
    return str(json.loads(answer)["id"])


def test_an_engine_sleeps_until_a_request_or_an_admin_wakes_it() -> None:
    with RunningServer(MODEL, *FLAGS) as server:
        body = {**PLAIN, "seed": 21, "max_tokens": 40}
        alone = server.post("/v1/completions", body)[1]["choices"]
        engine = server.engine_pid
        assert server.post("/admin/sleep", None)[1]["asleep"] is True
        assert server.get("/health")[1]["state"] == "asleep"
        assert not Path(f"/proc/{engine}").exists(), "its memory is free"
        assert server.post("/admin/sleep", None)[0] == 200, "twice is once"
        assert server.post("/v1/completions", body)[1]["choices"] == alone
        assert server.get("/health")[1]["state"] == "ready"
        assert server.engine_pid != engine
        assert server.post("/admin/sleep", None)[1]["asleep"] is True
        assert server.post("/admin/wake", None)[1]["asleep"] is False
        assert server.post("/v1/completions", body)[1]["choices"] == alone
        for _ in range(NUM_TRIES):  # on a busy machine the answer may be whole before
            with server.stream("/v1/completions", {**body, "max_tokens": 400}) as reader:
                reader.next()
                status, refused = server.post("/admin/sleep", None)
            if status == 503:
                break
        assert status == 503
        assert "requests are open" in refused["error"]["message"]
        assert server.metric("quire_engine_restarts_total") == 0, "sleep is no failure"


def test_a_process_that_waits_for_the_wake_may_die_first() -> None:
    with RunningServer(MODEL, *FLAGS) as server:
        body = {**PLAIN, "seed": 21, "max_tokens": 40}
        alone = server.post("/v1/completions", body)[1]["choices"]
        server.post("/admin/sleep", None)
        spare = _only_child(server)
        assert server.get("/health")[1]["state"] == "asleep"
        assert server.post("/v1/completions", body)[1]["choices"] == alone
        assert server.engine_pid == spare, "it became the engine"
        server.post("/admin/sleep", None)
        os.kill(_only_child(server), signal.SIGKILL)
        assert server.post("/v1/completions", body)[1]["choices"] == alone
        server.post("/admin/sleep", None)
        spare = _only_child(server)
    assert not Path(f"/proc/{spare}").exists(), "it ends with its server"


def _only_child(server: RunningServer) -> int:
    """Wait for the one child of a server that sleeps, which starts some seconds later."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while not (found := children_of(server.process.pid)):
        assert time.monotonic() < give_up_s, "no process waits for the wake"
        time.sleep(0.05)
    (pid,) = found
    return pid


def test_servers_that_cannot_sleep_say_so() -> None:
    with RunningServer(MODEL, "--threads", "1") as server:
        status, refused = server.post("/admin/sleep", None)
        assert status == 400
        assert "--restart-engine" in refused["error"]["message"]

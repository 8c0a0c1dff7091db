"""Streams over real sockets: paced, numbered, kept alive, resumed without a lost byte.

The scripted engine generates tokens when a test permits; a real server shows the same with a model.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.running_server import GIVE_UP_S, RunningServer
from tests.serve.scripted_server import ScriptedServer

COMPLETIONS = "/v1/completions"
WORDS = [f"w{at} " for at in range(40)]
RESUMABLE = {"prompt": "a", "stream": True, "stream_options": {"resumable": True}}


_OPEN: list[Caller] = []


@pytest.fixture(autouse=True)
def closes_all() -> Iterator[None]:
    """Close the connections of a test at its end."""
    yield
    while _OPEN:
        _OPEN.pop().close()


class Gate:
    """Let a scripted engine proceed, one delta per permit."""

    def __init__(self, server: ScriptedServer) -> None:
        self._loop = server._loop
        self._permits = asyncio.Semaphore(0)
        server.engine.pause = self._permits.acquire

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self._loop.call_soon_threadsafe(self._permits.release)


class Caller:
    """One connection with one request; reads bytes as they arrive."""

    def __init__(self, url: str, method: str, path: str, body: Any = None, **headers: str) -> None:
        _OPEN.append(self)
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=GIVE_UP_S
        )
        raw = None if body is None else json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, raw, named)
        self.response = self._connection.getresponse()

    def event(self) -> bytes:
        """Return the next event or comment with the line after it; b"" at the end."""
        lines = []
        while line := self.response.readline():
            lines.append(line)
            if line == b"\n":
                break
        return b"".join(lines)

    def events(self) -> list[bytes]:
        return list(iter(self.event, b""))

    def json(self) -> Any:
        return json.loads(self.response.read())

    def close(self) -> None:
        self.response.close()
        self._connection.close()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer("{{ messages }}", [WORDS], resume_s=30.0) as server:
        yield server


def ids_of(events: list[bytes]) -> list[str]:
    return [re.findall(r"^id: (.*)$", event.decode(), re.MULTILINE)[0] for event in events]


def test_the_first_event_arrives_before_the_second_token_is_generated(
    scripted: ScriptedServer,
) -> None:
    gate = Gate(scripted)
    caller = Caller(scripted.url, "POST", COMPLETIONS, {"prompt": "a", "stream": True})
    assert b"w0 " in caller.event()
    assert scripted.engine.num_deltas == 1
    gate.open(len(WORDS))
    assert caller.events()[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("n", [1, 3])
def test_events_are_numbered_and_each_choice_ends_once_with_its_tokens(
    scripted: ScriptedServer, n: int
) -> None:
    body = {"prompt": "a", "n": n, "stream": True, "stream_options": {"include_usage": True}}
    body["logprobs"] = 0
    events = Caller(scripted.url, "POST", COMPLETIONS, body).events()
    numbers = [id_.rpartition(":")[2] for id_ in ids_of(events)]
    assert numbers == [str(at) for at in range(1, len(events) + 1)]
    chunks = [json.loads(event.split(b"data: ")[1]) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == list(range(n))
    num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
    assert chunks[-1]["usage"]["completion_tokens"] == num_tokens == n * len(WORDS)


def test_heartbeat_comments_are_sent_before_the_first_token_too() -> None:
    with ScriptedServer("{{ messages }}", [WORDS], heartbeat_s=0.05) as server:
        gate = Gate(server)
        caller = Caller(server.url, "POST", COMPLETIONS, {"prompt": "a", "stream": True})
        while (event := caller.event()) == b": waiting\n\n":
            pass
        assert b"w0" in event
        assert [caller.event(), caller.event()] == [b": waiting\n\n"] * 2
        gate.open(len(WORDS))
        rest = [event for event in caller.events() if not event.startswith(b":")]
        assert len(rest) == len(WORDS)  # and [DONE]


def test_a_broken_stream_resumes_after_any_event_with_the_same_bytes(
    scripted: ScriptedServer,
) -> None:
    gate = Gate(scripted)
    first = Caller(scripted.url, "POST", COMPLETIONS, RESUMABLE)
    assert first.response.headers["x-quire-resume-seconds"] == "30"
    gate.open(4)
    seen = [first.event() for _ in range(5)]
    first.close()
    place = ids_of(seen)[-1]
    request_id = place.rpartition(":")[0]
    gate.open(10)
    path = f"/v1/requests/{request_id}/stream"
    again = Caller(scripted.url, "GET", path, Last_Event_ID=place)
    assert again.response.status == 200
    gate.open(len(WORDS))
    whole = seen + again.events()
    assert whole[-1].endswith(b"data: [DONE]\n\n")
    assert len(scripted.engine.asked) == 1
    for after in (1, 7, len(whole) - 1, len(whole)):  # ended, but kept for a while
        late = Caller(scripted.url, "GET", path, Last_Event_ID=f"{request_id}:{after}")
        assert late.events() == whole[after:]
    assert Caller(scripted.url, "GET", path).events() == whole
    assert b"".join(whole).count(b'"finish_reason":"stop"') == 1


def test_resuming_cuts_the_old_connection_and_the_new_stream_is_whole(
    scripted: ScriptedServer,
) -> None:
    gate = Gate(scripted)
    first = Caller(scripted.url, "POST", COMPLETIONS, RESUMABLE)
    place = ids_of([first.event()])[0]
    path = f"/v1/requests/{place.rpartition(':')[0]}/stream"
    second = Caller(scripted.url, "GET", path, Last_Event_ID=place)
    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        first.response.read()
    gate.open(len(WORDS))
    assert len(second.events()) == len(WORDS)


def test_a_resumable_stream_without_a_reader_is_ended() -> None:
    with ScriptedServer("{{ messages }}", [WORDS], resume_s=0.05) as server:
        Gate(server)
        caller = Caller(server.url, "POST", COMPLETIONS, RESUMABLE)
        request_id = ids_of([caller.event()])[0].rpartition(":")[0]
        caller.close()
        path = f"/v1/requests/{request_id}"
        state: Any = {}
        while state.get("state") != "failed":
            state = Caller(server.url, "GET", path).json()
        assert state["error"] == "reader_gone"
        assert server.engine.closed_early == [request_id]


@pytest.mark.parametrize(
    ("last_id", "status"),
    [("{id}:99", 410), ("{id}:-1", 410), ("{id}:x", 410), ("other:1", 410), ("", 410)],
)
def test_an_event_id_that_is_not_in_the_stream_is_rejected(
    scripted: ScriptedServer, last_id: str, status: int
) -> None:
    caller = Caller(scripted.url, "POST", COMPLETIONS, RESUMABLE)
    request_id = ids_of(caller.events())[0].rpartition(":")[0]
    path = f"/v1/requests/{request_id}/stream"
    reply = Caller(scripted.url, "GET", path, Last_Event_ID=last_id.format(id=request_id))
    assert (reply.response.status, reply.json()["error"]["code"]) == (status, "resume_gone")


def test_a_request_is_found_only_with_its_own_key() -> None:
    keys = {"api_key": ("one", "two")}
    with ScriptedServer("{{ messages }}", [WORDS], **keys) as server:
        mine, other = "Bearer one", "Bearer two"
        caller = Caller(server.url, "POST", COMPLETIONS, RESUMABLE, Authorization=mine)
        request_id = ids_of(caller.events())[0].rpartition(":")[0]
        for path in (f"/v1/requests/{request_id}", f"/v1/requests/{request_id}/stream"):
            assert Caller(server.url, "GET", path, Authorization=other).response.status == 404
            assert Caller(server.url, "GET", path).response.status == 401
            assert Caller(server.url, "GET", path, Authorization=mine).response.status == 200
        path = f"/v1/requests/{request_id}/abort"
        assert Caller(server.url, "POST", path, Authorization=other).response.status == 404


def test_a_request_is_found_and_aborted_by_its_client_given_name(
    scripted: ScriptedServer,
) -> None:
    Gate(scripted)
    body = {"prompt": "a", "stream": True}
    caller = Caller(scripted.url, "POST", COMPLETIONS, body, X_Request_ID="my-1")
    assert caller.response.headers["x-request-id"] == "my-1"
    caller.event()
    request = Caller(scripted.url, "GET", "/v1/requests/my-1").json()
    assert (request["state"], request["name"], request["finish_reasons"]) == (
        "running",
        "my-1",
        ["open"],
    )
    assert request["usage"]["completion_tokens"] == 1
    aborted = Caller(scripted.url, "DELETE", "/v1/requests/my-1").json()
    assert aborted == {"id": request["id"], "object": "request", "aborted": True}
    events = caller.events()
    assert b'"code":"aborted"' in events[-1]
    assert b"[DONE]" not in b"".join(events)
    request = Caller(scripted.url, "GET", "/v1/requests/my-1").json()
    assert (request["state"], request["error"]) == ("failed", "aborted")
    assert scripted.engine.closed_early == [request["id"]]
    again = Caller(scripted.url, "POST", "/v1/requests/my-1/abort").json()
    assert again["aborted"] is False


def test_a_client_waiting_for_a_whole_answer_gets_the_abort(
    scripted: ScriptedServer,
) -> None:
    Gate(scripted)
    statuses: list[int] = []

    def ask() -> None:
        reply = Caller(scripted.url, "POST", COMPLETIONS, {"prompt": "a"}, X_Request_ID="w")
        statuses.append(reply.response.status)

    thread = threading.Thread(target=ask)
    thread.start()
    late_s = time.monotonic() + GIVE_UP_S
    while Caller(scripted.url, "DELETE", "/v1/requests/w").response.status == 404:
        assert time.monotonic() < late_s, "the request was never known"
    thread.join(GIVE_UP_S)
    assert statuses == [409]


@pytest.mark.parametrize("name", ["a b", "x" * 129, "ä", '"', "a;b"])
def test_an_invalid_request_name_is_rejected(scripted: ScriptedServer, name: str) -> None:
    reply = Caller(scripted.url, "GET", "/version", X_Request_ID=name)
    assert reply.response.status == 200
    assert reply.response.headers.get("x-request-id") != name


def test_a_stalled_reader_is_cut_with_a_reason_and_its_blocks_are_freed(tiny: Path) -> None:
    flags = ("--stall-seconds", "0.2", "--threads", "1", "--max-num-seqs", "4")
    asked = {"prompt": "the stone", "seed": 2, "max_tokens": 40, "ignore_eos": True}
    slow = {"prompt": "slow", "max_tokens": 30_000, "ignore_eos": True, "logprobs": 20}
    with RunningServer(tiny, *flags) as server:
        alone = server.post(COMPLETIONS, asked)[1]["choices"][0]["text"]
        with server.stream(COMPLETIONS, slow, receive_buffer_bytes=4096) as reader:
            reader.next()
            server.until(
                lambda: server.metric("quire_slow_readers_total") == 1, "the reader is cut"
            )
            assert server.post(COMPLETIONS, asked)[1]["choices"][0]["text"] == alone
            server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks come back")
            server.until(lambda: server.metric("quire_open_requests") <= 1, "closed")
            with pytest.raises((ConnectionError, http.client.IncompleteRead, socket.timeout)):
                reader.read()
        said = "client read nothing for"
        server.until(lambda: said in server.stderr(), "its line is logged")


def until_held(url: str) -> None:
    """Wait until a paused server holds a request."""
    late_s = time.monotonic() + GIVE_UP_S
    while Caller(url, "GET", "/admin").json()["held_requests"] == 0:
        assert time.monotonic() < late_s, "no request was held"


def test_paused_requests_wait_and_are_answered_and_drained_ones_are_rejected(
    scripted: ScriptedServer,
) -> None:
    url, statuses = scripted.url, []

    def ask() -> None:
        reply = Caller(url, "POST", COMPLETIONS, {"prompt": "a"})
        statuses.append(reply.response.status)

    assert Caller(url, "POST", "/admin/pause").json()["paused"] is True
    assert Caller(url, "GET", "/health").json()["state"] == "paused"
    thread = threading.Thread(target=ask)
    thread.start()
    until_held(url)
    assert not scripted.engine.asked
    Caller(url, "POST", "/admin/resume")
    thread.join(GIVE_UP_S)
    assert statuses == [200]
    assert Caller(url, "POST", "/admin/drain").json()["draining"] is True
    ask()
    assert statuses == [200, 503]
    Caller(url, "POST", "/admin/resume")
    ask()
    assert statuses == [200, 503, 200]


def test_a_held_request_is_rejected_when_a_drain_begins(scripted: ScriptedServer) -> None:
    url, statuses = scripted.url, []
    Caller(url, "POST", "/admin/pause")
    thread = threading.Thread(
        target=lambda: statuses.append(
            Caller(url, "POST", COMPLETIONS, {"prompt": "a"}).response.status
        )
    )
    thread.start()
    until_held(url)
    Caller(url, "POST", "/admin/drain")
    thread.join(GIVE_UP_S)
    assert statuses == [503]

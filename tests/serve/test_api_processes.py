"""Several API processes before one engine behave as one server, whichever accepts a connection."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import (
    GIVE_UP_S,
    RunningServer,
    alive,
    children_of,
    kill,
    text_of,
)
from tests.serve.serve_command import serve, serve_in_process

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "on and on", "max_tokens": 30_000, "ignore_eos": True}
KEY, OTHER_KEY = "a-key", "another-key"
FLAGS = ("--api-processes", "2", "--threads", "1", "--max-num-seqs", "8", "--api-key", KEY)


class Caller:
    """A connection, and the number of the process that accepted it."""

    def __init__(self, server: RunningServer, key: str = KEY) -> None:
        self._key = key
        self.response: http.client.HTTPResponse | None = None
        self.http = http.client.HTTPConnection("127.0.0.1", server.port, timeout=GIVE_UP_S)
        name = f"who-{time.monotonic_ns()}"
        assert self.ask("GET", "/v1/models", **{"x-request-id": name})[0] == 200
        line = re.compile(rf"server (\d+): request .*name={name}\b")
        server.until(lambda: line.search(server.stderr()) is not None, "its line is logged")
        found = line.search(server.stderr())
        assert found is not None
        self.number = int(found[1])

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        raw = None if body is None else json.dumps(body).encode()
        self.http.request(method, path, raw, {"authorization": f"Bearer {self._key}", **headers})

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return (status, JSON) of one exchange."""
        self.send(method, path, body, **headers)
        response = self.answer()
        return response.status, json.loads(response.read())

    def text(self, path: str) -> str:
        self.send("GET", path)
        return self.answer().read().decode()

    def metric(self, name: str) -> float:
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.text("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def stream(self, body: dict[str, Any], **headers: str) -> http.client.HTTPResponse:
        self.send("POST", COMPLETIONS, {**body, "stream": True}, **headers)
        return self.answer()

    def answer(self) -> http.client.HTTPResponse:
        self.response = self.http.getresponse()
        return self.response

    def close(self) -> None:
        if self.response is not None:
            self.response.close()  # a partly read response keeps the socket open
        self.http.close()


CallerAt = Callable[..., Caller]


@contextmanager
def calling() -> Iterator[CallerAt]:
    """Yield what returns a client with a connection accepted by the process of that number only."""
    with ExitStack() as closing:

        def caller_at(server: RunningServer, number: int, key: str = KEY) -> Caller:
            server.until(lambda: number in pids_of(server), f"process {number} serves")
            others = [pid for one, pid in pids_of(server).items() if one != number and alive(pid)]
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
            try:
                caller = Caller(server, key)
            finally:
                for pid in others:
                    os.kill(pid, signal.SIGCONT)
            closing.callback(caller.close)
            assert caller.number == number
            return caller

        yield caller_at


@pytest.fixture
def caller_at() -> Iterator[CallerAt]:
    """See calling."""
    with calling() as caller_at:
        yield caller_at


def next_event(response: http.client.HTTPResponse) -> tuple[str, Any]:
    """Return (id, data) of the next event; ("", "") at the end."""
    event_id = ""
    for line in response:
        if line.startswith(b"id: "):
            event_id = line[4:].strip().decode()
        if line.startswith(b"data: "):
            data = line[6:].strip()
            return event_id, "[DONE]" if data == b"[DONE]" else json.loads(data)
    return "", ""


def events_of(response: http.client.HTTPResponse) -> list[Any]:
    """Return the data of all remaining events."""
    events = []
    while (event := next_event(response)[1]) != "":
        events.append(event)
    return events


def pids_of(server: RunningServer) -> dict[int, int]:
    """Return process ids of all API processes that have served, by number."""
    found = re.findall(r"an API process serves process=(\d+) pid=(\d+)", server.stderr())
    return {int(number): int(pid) for number, pid in found}


def pid_of(server: RunningServer, number: int) -> int:
    return pids_of(server)[number]


@pytest.fixture(scope="module")
def both(tiny: Path) -> Iterator[RunningServer]:
    flags = (*FLAGS, "--api-key", OTHER_KEY, "--stall-seconds", "600")
    with RunningServer(tiny, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def mortal(tiny: Path) -> Iterator[RunningServer]:
    """A server for tests that kill one of its processes; it continues, and ends without error."""
    with RunningServer(tiny, *FLAGS, "--admin-port", "0") as server:
        yield server
    assert server.exit_code() == 0


def at_admin_port(server: RunningServer, method: str, path: str, body: Any = None) -> Any:
    """Return the answer of the process that has the admin port: the first, or its replacement."""
    found = re.search(r"admin_address=http://127.0.0.1:(\d+)", server.stderr())
    assert found is not None
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=GIVE_UP_S)
    raw = None if body is None else json.dumps(body)
    connection.request(method, path, raw, headers={"authorization": f"Bearer {KEY}"})
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply


@pytest.fixture
def first(both: RunningServer, caller_at: CallerAt) -> Caller:
    return caller_at(both, 1)


@pytest.fixture
def second(both: RunningServer, caller_at: CallerAt) -> Caller:
    return caller_at(both, 2)


def test_streams_through_each_process_are_equal(first: Caller, second: Caller) -> None:
    asked = {"prompt": "the sea", "seed": 3, "max_tokens": 40, "ignore_eos": True}
    streams = [caller.stream(asked) for caller in (first, second)]
    one, other = (events_of(stream) for stream in streams)
    assert one[-1] == other[-1] == "[DONE]"
    assert text_of(one) == text_of(other) != ""


def test_a_request_is_found_and_aborted_by_id_and_name_through_the_other_process(
    first: Caller, second: Caller
) -> None:
    for name, asked_by in (("my-name", "my-name"), ("another", "id")):
        stream = first.stream(LONG, **{"x-request-id": name})
        assert stream.getheader("x-request-id") == name
        _, event = next_event(stream)
        asked = name if asked_by != "id" else event["id"]
        status, reply = second.ask("GET", f"/v1/requests/{asked}")
        assert (status, reply["id"], reply["state"]) == (200, event["id"], "running")
        status, reply = second.ask("POST", f"/v1/requests/{asked}/abort")
        assert (status, reply["aborted"]) == (200, True)
        assert events_of(stream)[-1]["error"]["code"] == "aborted"
        assert second.ask("GET", f"/v1/requests/{asked}")[1]["error"] == "aborted"


def test_a_request_is_unknown_with_another_key_at_the_other_process(
    both: RunningServer, first: Caller, caller_at: CallerAt
) -> None:
    stranger = caller_at(both, 2, OTHER_KEY)
    stream = first.stream(LONG, **{"x-request-id": "mine"})
    _, event = next_event(stream)
    for asked in ("mine", event["id"], "nobodys", "%00%0d%0a", "x" * 500):
        for method, path in (("GET", ""), ("POST", "/abort"), ("GET", "/stream")):
            status, reply = stranger.ask(method, f"/v1/requests/{asked}{path}")
            assert (status, reply["error"]["code"]) == (404, "unknown_request")
    assert next_event(stream)[1]["choices"]


def test_a_timeline_is_read_through_the_other_process_with_its_own_key_or_an_admins(
    both: RunningServer, first: Caller, caller_at: CallerAt
) -> None:
    asked = {"prompt": "Once upon a time there was a dog", "max_tokens": 6, "seed": 1}
    first.send("POST", COMPLETIONS, asked, **{"x-request-id": "timed"})
    id_ = json.loads(first.answer().read())["id"]
    second = caller_at(both, 2)
    for name in ("timed", id_):
        status, told = second.ask("GET", f"/v1/requests/{name}/timeline")
        assert (status, told["id"], told["state"]) == (200, id_, "done")
        assert len(told["streams"][0]["gaps"]) == told["streams"][0]["completion_tokens"] - 1
    stranger = caller_at(both, 2, OTHER_KEY)
    status, told = stranger.ask("GET", f"/v1/requests/{id_}/timeline")
    assert (status, told["error"]["code"]) == (404, "unknown_request")
    assert "--timeline-steps" in told["error"]["message"]


def test_a_broken_stream_resumes_at_the_other_process_and_back(
    both: RunningServer, caller_at: CallerAt
) -> None:
    asked = {**LONG, "max_tokens": 600, "seed": 1, "stream_options": {"resumable": True}}
    caller = caller_at(both, 1)
    stream = caller.stream(asked)
    events, last = [], ""
    for number in (2, 1, 2):
        for _ in range(20):
            last, event = next_event(stream)
            events.append(event)
        caller.close()
        caller = caller_at(both, number)
        path = f"/v1/requests/{events[0]['id']}/stream"
        caller.send("GET", path, **{"last-event-id": last})
        stream = caller.answer()
        assert stream.status == 200
        assert stream.getheader("content-type", "").startswith("text/event-stream")
    events += events_of(stream)
    assert events[-1] == "[DONE]"
    again = caller_at(both, 1)
    again.send("GET", path)
    assert events_of(again.answer()) == events
    status, reply = caller.ask("GET", path, **{"last-event-id": f"{events[0]['id']}:9999999"})
    assert (status, reply["error"]["code"]) == (410, "resume_gone")


def test_each_process_reports_the_counts_of_all(
    both: RunningServer, first: Caller, second: Caller
) -> None:
    both.until(lambda: first.metric("quire_open_requests") == 1, "only the one that asks")
    before = first.metric("quire_requests_total")
    for caller in (first, second, second):
        assert caller.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 3})[0] == 200
    for caller in (first, second):

        def all_are_counted(caller: Caller = caller) -> bool:
            steps = caller.metric("quire_steps_total")
            return (
                caller.metric("quire_requests_total") == before + 3
                and 0 < caller.metric("quire_batch_rows_count") == steps
            )

        both.until(all_are_counted, "three requests, and each step once")
    stream = first.stream(LONG)
    next_event(stream)
    both.until(lambda: second.metric("quire_running_requests") == 1, "the other's is shown")
    both.until(lambda: second.metric("quire_open_requests") == 2, "and this one")
    assert second.ask("GET", "/health")[1]["pending"] == 1


def test_an_admin_setting_of_one_process_holds_for_all(
    both: RunningServer, first: Caller, second: Caller
) -> None:
    assert first.ask("POST", "/admin/pause")[1]["paused"]
    assert second.ask("GET", "/health")[1]["state"] == "paused"
    second.send("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    both.until(lambda: first.ask("GET", "/admin")[1]["held_requests"] == 1, "one is held")
    assert first.ask("POST", "/admin/resume")[1]["paused"] is False
    assert second.answer().status == 200


def test_drain_and_resume_at_different_processes(first: Caller, second: Caller) -> None:
    assert first.ask("POST", "/admin/drain")[1]["draining"]
    status, reply = second.ask("POST", COMPLETIONS, {"prompt": "a"})
    assert (status, reply["error"]["code"]) == (503, "shutting_down")
    assert second.ask("POST", "/admin/resume")[1]["draining"] is False
    assert first.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
    assert first.ask("PUT", "/admin/log-level", {"level": "warning"})[0] == 200
    assert second.ask("GET", "/admin")[1]["log_level"] == "warning"
    assert second.ask("PUT", "/admin/log-level", {"level": "info"})[0] == 200
    assert first.ask("GET", "/admin")[1]["log_level"] == "info"


def test_a_killed_process_costs_only_its_own_clients_and_is_replaced(
    mortal: RunningServer, caller_at: CallerAt
) -> None:
    asked = {"prompt": "the sea", "seed": 3, "max_tokens": 6000, "ignore_eos": True}
    server = mortal
    first, second = caller_at(server, 1), caller_at(server, 2)
    assert first.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 3})[0] == 200
    assert at_admin_port(server, "POST", "/admin/pause")["paused"]
    assert at_admin_port(server, "POST", "/admin/resume")["paused"] is False
    level = {"level": "info"}
    assert at_admin_port(server, "PUT", "/admin/log-level", level)["log_level"] == "info"
    watching = caller_at(server, 2)
    lost, kept = first.stream(LONG), second.stream(asked)
    begun = [next_event(lost)[1], next_event(kept)[1]]
    server.until(lambda: watching.metric("quire_running_requests") == 2, "both are shown")
    kill(pid_of(server, 1))
    with suppress(http.client.HTTPException, OSError):
        assert "[DONE]" not in events_of(lost)
    events = [begun[1], *events_of(kept)]
    assert events[-1] == "[DONE]"
    assert len(events) > 100
    server.until(
        lambda: watching.metric("quire_running_requests") == 0, "the engine ends the lost one"
    )
    assert watching.metric("quire_kv_blocks_used") == 0
    third = caller_at(server, 3)
    status, answer = third.ask("POST", COMPLETIONS, asked)
    assert (status, answer["choices"][0]["text"]) == (200, text_of(events))
    server.until(lambda: third.metric("quire_api_process_restarts_total") == 1, "it is counted")
    server.until(lambda: third.metric("quire_requests_total") == 3, "what the dead one counted too")
    server.until(lambda: third.metric("quire_open_requests") == 1, "only the one that asks")
    server.until(lambda: "was ended by signal 9" in server.stderr(), "its line is logged")


def test_a_replacement_process_is_paused_like_the_others(
    mortal: RunningServer, caller_at: CallerAt
) -> None:
    server = mortal
    assert at_admin_port(server, "POST", "/admin/pause")["paused"]
    newest = max(pids_of(server))
    kill(pid_of(server, newest))
    server.until(lambda: newest + 1 in pids_of(server), "another is there")
    third = caller_at(server, newest + 1)
    assert third.ask("GET", "/health")[1]["state"] == "paused"
    assert at_admin_port(server, "POST", "/admin/resume")["paused"] is False
    assert third.ask("GET", "/health")[1]["state"] == "ready"


def test_sigterm_drains_all_processes_and_rejects_new_requests(
    tiny: Path, caller_at: CallerAt
) -> None:
    with RunningServer(tiny, *FLAGS, "--grace-seconds", "600") as server:
        first, children = caller_at(server, 1), children_of(server.process.pid)
        assert len(children) == 3
        stream = first.stream(LONG)
        _, event = next_event(stream)
        assert event["choices"]
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: not alive(pid_of(server, 2)), "the idle one leaves")
        headers = {"authorization": f"Bearer {KEY}"}
        status, _, raw = server.request("POST", COMPLETIONS, {"prompt": "a"}, **headers)
        assert (status, json.loads(raw)["error"]["code"]) == (503, "shutting_down")
        assert server.get("/health")[1]["state"] == "draining"
        ended = server.request("POST", f"/v1/requests/{event['id']}/abort", **headers)
        assert ended[0] == 200
        assert events_of(stream)[-1]["error"]["code"] == "aborted"
        assert server.exit_code() == 0
        assert not any(map(alive, children))


def test_a_second_signal_or_the_end_of_the_supervisor_ends_all_at_once(
    tiny: Path, caller_at: CallerAt
) -> None:
    with RunningServer(tiny, *FLAGS) as server:
        caller, children = caller_at(server, 1), children_of(server.process.pid)
        stream = caller.stream(LONG)
        next_event(stream)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: "server 1: draining" in server.stderr(), "it drains")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM
        server.until(lambda: not any(map(alive, children)), "all processes end")
    with RunningServer(tiny, *FLAGS) as server:
        children = children_of(server.process.pid)
        kill(server.process.pid)
        server.until(lambda: not any(map(alive, children)), "all processes end")


def test_engine_death_is_an_error_event_at_each_process_and_a_failed_exit(
    tiny: Path, caller_at: CallerAt
) -> None:
    with RunningServer(tiny, *FLAGS) as server:
        callers = [caller_at(server, number) for number in (1, 2)]
        streams = [caller.stream(LONG) for caller in callers]
        for stream in streams:
            next_event(stream)
        api = {pid_of(server, number) for number in (1, 2)}
        (engine,) = set(children_of(server.process.pid)) - api
        kill(engine)
        for stream in streams:
            *_, last = events_of(stream)
            assert last["error"]["code"] == "worker_error"
            assert "signal 9" in last["error"]["message"]
        assert server.exit_code() == 1
        assert not any(map(alive, api))


def test_processes_share_a_unix_socket(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with RunningServer(tiny, *FLAGS, at=("--uds", str(path))) as server:
        for _ in range(8):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(GIVE_UP_S)
                connection.connect(str(path))
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert not path.exists()


def test_changed_keys_are_read_by_all_processes(
    tiny: Path, tmp_path: Path, caller_at: CallerAt
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.default]\nkeys = ["old-key"]\n')
    flags = ("--api-processes", "2", "--threads", "1", "--tenants", str(file))
    with RunningServer(tiny, *flags) as server:
        old = [caller_at(server, number, "old-key") for number in (1, 2)]
        file.write_text('[tenants.default]\nkeys = ["new-key"]\n')
        server.process.send_signal(signal.SIGHUP)
        for caller in old:
            server.until(
                lambda caller=caller: caller.ask("GET", "/v1/models")[0] == 401,  # type: ignore[misc]
                "the old key is none",
            )


@pytest.mark.parametrize(("given", "expected"), [("0", "1 to 64"), ("1000", "1 to 64"), ("x", "x")])
def test_impossible_process_counts_are_rejected(tiny: Path, given: str, expected: str) -> None:
    ended = serve_in_process(str(tiny), "--api-processes", given)
    assert ended.returncode == 2
    assert "--api-processes" in ended.stderr
    assert expected in ended.stderr


def test_a_port_used_by_another_multi_process_server_is_rejected(
    both: RunningServer, tiny: Path
) -> None:
    for number in ("1", "2"):
        flags = ("--port", str(both.port), "--api-processes", number)
        ended = serve_in_process(str(tiny), *flags)
        assert ended.returncode == 2
        assert "is in use" in ended.stderr


def test_an_unusable_model_is_reported_once(tmp_path: Path) -> None:
    ended = serve(str(tmp_path), "--port", "0", "--api-processes", "2")
    assert ended.returncode == 2
    assert ended.stderr.count("quire serve: ") == 1
    assert "Traceback" not in ended.stderr


def test_an_unusable_template_is_reported_once(tiny: Path) -> None:
    flags = ("--port", "0", "--api-processes", "2", "--chat-template", "no-such-template")
    ended = serve(str(tiny), *flags)
    assert ended.returncode == 2
    assert ended.stderr.count("quire serve: ") == 1
    assert "Traceback" not in ended.stderr


def test_concurrent_clients_of_all_processes_get_what_each_gets_alone(both: RunningServer) -> None:
    asked = [{"prompt": "x" * at, "seed": at, "max_tokens": 30} for at in range(1, 13)]
    headers = {"authorization": f"Bearer {KEY}"}

    def answer(body: dict[str, Any]) -> str:
        raw = both.request("POST", COMPLETIONS, body, **headers)[2]
        return str(json.loads(raw)["choices"][0]["text"])

    alone = [answer(body) for body in asked]
    together: dict[int, str] = {}

    def put(at: int) -> None:
        together[at] = answer(asked[at])

    threads = [threading.Thread(target=put, args=(at,)) for at in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP_S)
    assert [together[at] for at in range(len(asked))] == alone


def test_a_recording_has_the_requests_of_all_processes(
    both: RunningServer, caller_at: CallerAt
) -> None:
    """Equal prompts have equal block ids, whichever process they reached."""
    reader, first, second = caller_at(both, 1), caller_at(both, 1), caller_at(both, 2)
    reader.send("GET", "/admin/record")
    response = reader.answer()
    assert json.loads(response.readline())["quire_recording"] == 1
    asked = {"prompt": list(range(1, 41)), "max_tokens": 2, "cache_salt": "same"}
    lines = []
    for caller in (first, second):
        assert caller.ask("POST", COMPLETIONS, asked)[0] == 200
        lines.append(json.loads(response.readline()))
    assert [line["prompt_tokens"] for line in lines] == [40, 40]
    assert lines[0]["block_ids"] == lines[1]["block_ids"] != []
    assert lines[0]["arrival_ms"] < lines[1]["arrival_ms"]

"""A server's lifecycle: start, drain, failure; exit codes, error events, and never a hang."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve import preloaded
from tests.serve.running_server import (
    GIVE_UP_S,
    NO_PREFAULT,
    RunningServer,
    alive,
    kill,
)
from tests.serve.serve_command import serve, serve_in_process
from tests.serve.unix_connection import at_socket

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "on and on", "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def configured(tiny: Path) -> Iterator[RunningServer]:
    """A server with settings that several tests check."""
    flags = ("--served-model-name", "my-model", "--max-num-batched-tokens", "64", "--threads", "1")
    flags += ("--max-output-tokens", "5", "--unknown-fields", "warn", "--max-body", "4KiB")
    with RunningServer(tiny, *flags) as server:
        yield server


def test_the_startup_block_prints_model_memory_and_address(configured: RunningServer) -> None:
    printed = configured.stdout()
    assert re.search(r"my-model \(f32, \w+\), context 32768 tokens", printed)
    assert "KV cache" in printed
    assert configured.url in printed
    assert configured.get("/v1/models")[1]["data"][0]["id"] == "my-model"


def test_a_long_prompt_reports_progress_per_chunk(configured: RunningServer) -> None:
    asked = {"prompt": list(range(1, 201)), "max_tokens": 2, "seed": 1, "return_progress": True}
    with configured.stream(COMPLETIONS, asked) as reader:
        progress = [reader.next()["prompt_progress"] for _ in range(4)]
    assert [one["processed"] for one in progress] == [64, 128, 192, 200]
    assert [one["total"] for one in progress] == [200] * 4
    times_ms = [one["time_ms"] for one in progress]
    assert times_ms == sorted(times_ms)


def test_sigterm_finishes_open_requests_rejects_new_ones_and_exits_0(tiny: Path) -> None:
    with RunningServer(tiny, "--threads", "1", "--grace-seconds", "300") as server:
        engine = server.engine_pid
        asked = {**LONG, "seed": 1, "max_tokens": 10_000}
        with server.stream(COMPLETIONS, asked) as reader:
            events = [reader.next()]
            server.process.send_signal(signal.SIGTERM)
            server.until(lambda: server.get("/health")[1]["state"] == "draining", "draining")
            status, answer = server.post(COMPLETIONS, {"prompt": "a"})
            assert (status, answer["error"]["code"]) == (503, "shutting_down")
            assert server.get("/health")[0] == 503
            events += list(reader)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0
        assert not alive(engine)


def test_after_the_grace_period_open_requests_get_an_error_and_the_exit_is_0(
    tiny: Path,
) -> None:
    with RunningServer(tiny, "--threads", "1", "--grace-seconds", "0.2") as server:
        engine = server.engine_pid
        with server.stream(COMPLETIONS, LONG) as reader:
            reader.next()
            server.process.send_signal(signal.SIGTERM)
            *_, last = reader
        assert last["error"]["code"] == "shutting_down"
        assert server.exit_code() == 0
        assert not alive(engine)


def test_an_idle_server_ends_at_once_also_on_an_interrupt(tiny: Path) -> None:
    """The startup block of this server shows how weights and keys are held."""
    with (
        RunningServer(tiny, "--quantization", "int4", "--kv-cache-dtype", "int8") as server,
        socket.create_connection(("127.0.0.1", server.port)) as idle,
    ):
        assert "(f32, weights int4-g32 (head: int8), KV int8, " in server.stdout()
        server.process.send_signal(signal.SIGINT)
        assert server.exit_code() == 0
        assert idle.recv(1) == b""


def test_a_second_signal_ends_server_and_engine_at_once(tiny: Path) -> None:
    with RunningServer(tiny, "--threads", "1") as server:
        engine = server.engine_pid
        with server.stream(COMPLETIONS, LONG) as reader:
            reader.next()
            server.process.send_signal(signal.SIGTERM)
            server.until(lambda: server.get("/health")[1]["state"] == "draining", "draining")
            server.process.send_signal(signal.SIGTERM)
            assert server.exit_code() == 128 + signal.SIGTERM
        server.until(lambda: not alive(engine), "the engine process ends")


def test_engine_death_is_an_error_of_every_open_request_and_a_failed_exit(
    tiny: Path,
) -> None:
    raw = json.dumps(LONG).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n"
    with RunningServer(tiny, "--threads", "1") as server:
        with (
            server.stream(COMPLETIONS, LONG) as first,
            server.stream(COMPLETIONS, {**LONG, "prompt": ["a", "b"], "n": 2}) as second,
            socket.create_connection(("127.0.0.1", server.port), timeout=GIVE_UP_S) as whole,
        ):
            first.next()
            second.next()
            whole.sendall(head.encode() + raw)
            server.until(lambda: server.metric("quire_running_requests") == 6, "all run")
            kill(server.engine_pid)
            for reader in (first, second):
                *_, last = reader
                assert last["error"]["code"] == "worker_error"
                assert last["error"]["type"] == "server_error"
            assert whole.recv(65536).startswith(b"HTTP/1.1 500")
            status, health = server.get("/health")
            assert (status, health["state"]) == (503, "dead")
            assert health["reason"]
            assert server.get("/v1/models")[0] == 500
        assert server.exit_code() == 1
        assert "engine" in server.stderr()


def test_engine_death_while_idle_ends_the_server(tiny: Path) -> None:
    with RunningServer(tiny) as server:
        kill(server.engine_pid)
        assert server.exit_code() == 1


def test_killing_the_server_ends_its_engine(tiny: Path) -> None:
    with RunningServer(tiny) as server:
        engine = server.engine_pid
        server.process.kill()
        server.until(lambda: not alive(engine), "the engine process ends")


def test_requests_during_loading_are_rejected_as_retryable(tiny: Path) -> None:
    with RunningServer(tiny, wait=False) as server:
        states = set()

        def ready() -> bool:
            status, health = server.get("/health")
            states.add(health["state"])
            assert (status == 200) == (health["state"] == "ready")
            return status == 200

        server.until(ready, "ready")
        assert states <= {"starting", "ready"}
        assert server.post(COMPLETIONS, {"prompt": "a"})[0] == 200


def test_a_stop_while_loading_is_a_clean_exit(tiny: Path) -> None:
    with RunningServer(tiny, wait=False, fresh=False) as server:
        server.until(lambda: server.get("/health")[0] in (200, 503), "HTTP answers")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_a_port_in_use_is_one_line_with_a_remedy(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = serve(str(tiny), "--port", str(port))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert "--port" in ended.stderr
    assert ended.stdout == ""


def test_beyond_loopback_a_key_or_an_explicit_flag_is_required(tiny: Path) -> None:
    ended = serve_in_process(str(tiny), "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "--api-key" in ended.stderr
    assert "--insecure" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/folder",), "/no/such/folder"),
        (("--max-model-len", "99999999"), "max-model-len"),
        (("--record-plans", "/no/such/plans"), "--record-plans /no/such/plans cannot be written"),
        (("--kv-cache-memory", "1"), "kv-cache-memory"),
        (("--kv-cache-memory", "9000TiB"), "kv-cache-memory"),
    ],
)
def test_an_unservable_model_is_reported_once_and_the_exit_is_2(
    tiny: Path, arguments: tuple[str, ...], words: str
) -> None:
    model = [] if arguments[0].startswith("/") else [str(tiny)]
    ended = serve(*model, *arguments, "--port", "0")
    assert ended.returncode == 2
    log, *complaints = ended.stderr.split("quire serve: ")
    assert [words in complaint for complaint in complaints] == [True]
    assert [line.split(" ")[1] for line in log.splitlines()] == ["info"]  # "loading"
    assert "Traceback" not in ended.stderr


def test_with_keys_only_their_bearers_are_served(tiny: Path) -> None:
    with RunningServer(tiny, "--api-key", "one", "--api-key", "two") as server:
        assert server.get("/health")[0] == 200
        assert server.get("/metrics")[0] == 401
        assert server.post(COMPLETIONS, {"prompt": "a"})[0] == 401
        for key in ("one", "two"):
            body = {"prompt": "a", "max_tokens": 1}
            keyed = {"Authorization": f"Bearer {key}"}
            assert server.request("POST", COMPLETIONS, body, **keyed)[0] == 200
        assert "two" not in server.stderr()


def test_a_key_from_the_environment_is_not_visible_in_the_process_list(tiny: Path) -> None:
    with RunningServer(tiny, environment={"QUIRE_API_KEY": "hidden"}) as server:
        assert server.get("/v1/models")[0] == 401
        keyed = {"Authorization": "Bearer hidden"}
        assert server.request("GET", "/v1/models", **keyed)[0] == 200


def test_http_settings_are_honoured(configured: RunningServer) -> None:
    status, answer = configured.post(COMPLETIONS, {"prompt": "a", "max_tokens": 6})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    body = {"prompt": "a", "temprature": 1, "ignore_eos": True}
    status, headers, raw = configured.request("POST", COMPLETIONS, body)
    assert (status, headers["x-quire-ignored-fields"]) == (200, "temprature")
    assert json.loads(raw)["usage"]["completion_tokens"] == 5
    assert configured.post(COMPLETIONS, {"prompt": "x" * 5000})[0] == 413


def test_a_request_past_its_time_limit_ends_and_frees_its_blocks(tiny: Path) -> None:
    with RunningServer(tiny, "--request-timeout", "1", "--threads", "1") as server:
        with server.stream(COMPLETIONS, LONG) as reader:
            assert reader.next()["choices"]
            status, answer = server.post(COMPLETIONS, LONG)
            assert (status, answer["error"]["code"]) == (504, "timeout")
            *_, last = reader
        assert last["error"]["code"] == "timeout"
        assert server.metric("quire_timeouts_total") == 2
        server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks given back")


def test_a_full_queue_rejects_and_queued_requests_are_served(tiny: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "2", "--threads", "1")
    with RunningServer(tiny, *flags) as server, server.stream(COMPLETIONS, LONG) as running:
        running.next()
        short = {"prompt": "short", "max_tokens": 2}
        with server.stream(COMPLETIONS, short) as one, server.stream(COMPLETIONS, short) as two:
            server.until(lambda: server.metric("quire_waiting_requests") == 2, "two wait")
            status, answer = server.post(COMPLETIONS, short)
            assert (status, answer["error"]["code"]) == (503, "overloaded")
            running.close()
            assert list(one)[-1] == list(two)[-1] == "[DONE]"


@pytest.mark.parametrize("where", ["a full disk", "a closed pipe"])
def test_serving_continues_if_the_log_cannot_be_written(
    tiny: Path, tmp_path: Path, where: str
) -> None:
    path = tmp_path / "quire.sock"  # a free port would be in the log only
    words = ["serve", str(tiny), "--uds", str(path), *NO_PREFAULT]
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full, open(write, "w") as lost:
        output = full if where == "a full disk" else lost
        process = preloaded.start(words, output, output)
    try:
        deadline = time.monotonic() + GIVE_UP_S
        while _status(path, "GET", "/health") != 200:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for _ in range(3):
            assert _status(path, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2}) == 200
        assert _status(path, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": "x"}) == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 0
    finally:
        process.kill()
        process.wait()


def _status(path: Path, method: str, url: str, body: dict[str, Any] | None = None) -> int:
    """Return the status; 0 if no socket listens yet."""
    try:
        return at_socket(path, method, url, body)[0]
    except (ConnectionError, FileNotFoundError):
        return 0

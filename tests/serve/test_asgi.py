"""build_asgi: the answers of `quire serve` from other ASGI servers, with engine start and drain."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.api.asgi import ServedApp, build_asgi
from quire.base.errors import ConfigError, SettingError
from tests.serve.preloaded import forked_children
from tests.serve.running_server import GIVE_UP_S, ROOT, RunningServer, alive, is_engine

FLAGS = ("--threads", "1", "--max-num-seqs", "4")
SETTINGS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "kv_touch_ahead": 0}
QUESTION = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "ignore_eos": True}
Reply = tuple[int, dict[bytes, bytes], bytes]


class Client:
    """Sends requests to an ASGI application in this process."""

    def __init__(self, app: ServedApp) -> None:
        self._app = app

    async def request(
        self, method: str, path: str, fields: Any = None, host: str = "localhost", key: str = ""
    ) -> Reply:
        headers = [(b"host", host.encode()), (b"content-type", b"application/json")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        body = b"" if fields is None else json.dumps(fields).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": headers,
            "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 6),
        }
        received = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app(scope, receive, send)  # type: ignore[arg-type]
        start = next(one for one in sent if one["type"] == "http.response.start")
        text = b"".join(one.get("body", b"") for one in sent if "body" in one)
        return start["status"], dict(start["headers"]), text


@asynccontextmanager
async def lifespan_of(app: ServedApp) -> AsyncIterator[list[dict[str, Any]]]:
    """Run the lifespan of an application as an ASGI server does; yield what it has sent."""
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: list[dict[str, Any]] = []
    answered = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        answered.set()

    running = asyncio.ensure_future(app({"type": "lifespan"}, orders.get, send))  # type: ignore[arg-type]
    await orders.put({"type": "lifespan.startup"})
    await answered.wait()
    yield sent
    await orders.put({"type": "lifespan.shutdown"})
    await running


@pytest.fixture(scope="module", autouse=True)
def preloaded_engines() -> Iterator[None]:
    """Fork the engines of this process; the program under uvicorn is a fresh interpreter."""
    with forked_children():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("", *FLAGS) as running:
        yield running


def _same(answer: Any) -> Any:
    """Return an answer without what names it or measures time."""
    usage = {name: value for name, value in answer["usage"].items() if name.endswith("_tokens")}
    return answer["choices"], answer["system_fingerprint"], usage


def test_answers_are_those_of_the_server(server: RunningServer) -> None:
    async def story() -> None:
        app = build_asgi(**SETTINGS)
        client = Client(app)
        with pytest.raises(RuntimeError, match="lifespan"):
            await client.request("GET", "/health")
        async with lifespan_of(app) as sent:
            assert sent == [{"type": "lifespan.startup.complete"}]
            status, _, body = await client.request("POST", "/v1/completions", QUESTION)
            assert status == 200, body
            wanted_status, wanted = server.post("/v1/completions", QUESTION)
            assert wanted_status == 200
            assert _same(json.loads(body)) == _same(wanted)
            streamed = {**QUESTION, "stream": True}
            status, headers, body = await client.request("POST", "/v1/completions", streamed)
            assert headers[b"content-type"].startswith(b"text/event-stream")
            events = [line[6:] for line in body.decode().splitlines() if line[:6] == "data: "]
            assert events.pop() == "[DONE]"
            parts = [json.loads(event)["choices"] for event in events]
            text = "".join(choices[0]["text"] for choices in parts if choices)
            assert text == wanted["choices"][0]["text"]
            assert (await client.request("GET", "/health"))[0] == 200
            assert (await client.request("GET", "/metrics"))[0] == 200
            assert (await client.request("GET", "/v1/nothing"))[0] == 404
            assert (await client.request("GET", "/v1/models", host="example.org"))[0] == 403
        with pytest.raises(RuntimeError, match="lifespan"):
            await client.request("GET", "/health")

    asyncio.run(story())


def test_a_shutdown_lets_open_requests_finish_and_refuses_new_ones(tiny: Path) -> None:
    async def story() -> None:
        app = build_asgi(**SETTINGS, model=str(tiny), grace_seconds=300)
        client = Client(app)
        async with lifespan_of(app):
            long = {**QUESTION, "max_tokens": 5000}
            answering = asyncio.ensure_future(client.request("POST", "/v1/completions", long))
            while not app.engine.stats.running:
                assert not answering.done(), "it was never seen to run"
                await asyncio.sleep(0)
            stopping = asyncio.ensure_future(app.drain())
            await asyncio.sleep(0)
            status, headers, body = await client.request("POST", "/v1/completions", QUESTION)
            assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
            assert b"retry-after" in headers
            status, _, body = await answering
            assert status == 200
            assert json.loads(body)["usage"]["completion_tokens"] == 5000
            await stopping

    asyncio.run(story())


def test_a_dead_engine_is_reported_and_its_requests_end(tiny: Path) -> None:
    async def story() -> None:
        app = build_asgi(**SETTINGS, model=str(tiny))
        client = Client(app)
        async with lifespan_of(app):
            long = {**QUESTION, "max_tokens": 30_000}
            answering = asyncio.ensure_future(client.request("POST", "/v1/completions", long))
            while not app.engine.stats.running:
                assert not answering.done(), "it was never seen to run"
                await asyncio.sleep(0)
            [engine] = own_engines()
            os.kill(engine, signal.SIGKILL)
            status, _, body = await answering
            assert (status, json.loads(body)["error"]["code"]) == (500, "worker_error")
            status, _, body = await client.request("GET", "/health")
            assert (status, json.loads(body)["state"]) == (503, "dead")

    asyncio.run(story())


def own_engines() -> list[int]:
    """Return the engine processes that this process has started."""
    children = [
        int(child)
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid for pid in children if is_engine(pid)]


def test_keys_and_hosts_are_checked_as_by_the_server() -> None:
    async def story() -> None:
        for settings, wanted in (
            ({"insecure": True}, {"": 200}),
            ({"api_key": "secret"}, {"": 401, "other": 401, "secret": 200}),
        ):
            app = build_asgi(**SETTINGS, **settings)
            async with lifespan_of(app):
                client = Client(app)
                for key, status in wanted.items():
                    reply = await client.request("GET", "/v1/models", host="example.org", key=key)
                    assert reply[0] == status, (settings, reply)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 8000}, "port is a setting of the listener"),
        ({"tls_cert": "x.pem"}, "tls_cert is a setting of the listener"),
        ({"keep_alive_seconds": 3}, "keep_alive_seconds is a setting of the listener"),
        ({"api_processes": 2}, "another program's ASGI server"),
        ({"max_num_seq": 2}, "did you mean 'max_num_seqs'"),
        ({"grace_second": 2}, "did you mean 'grace_seconds'"),
        ({"api_key_file": "/no/such/file"}, "cannot be read"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        build_asgi(**settings)


def test_what_keeps_the_engine_from_starting_fails_the_startup(tmp_path: Path) -> None:
    async def story() -> None:
        app = build_asgi(tmp_path / "nothing", **SETTINGS)
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app({"type": "lifespan"}, receive, send)  # type: ignore[arg-type]
        assert [one["type"] for one in sent] == ["lifespan.startup.failed"]
        assert "nothing" in sent[0]["message"]

    with pytest.raises(ConfigError, match="no-such-model"):
        build_asgi("quire/no-such-model")
    asyncio.run(story())


def test_uvicorn_serves_it_drains_it_and_leaves_no_process() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "tests.serve.asgi_program:app"]
    command += ["--fd", str(listening.fileno()), "--lifespan", "on", "--no-access-log"]
    process = subprocess.Popen(
        command, pass_fds=[listening.fileno()], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
        body = json.dumps({**QUESTION, "max_tokens": 450, "stream": True})
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        assert response.status == 200
        first = response.readline()
        [engine] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        rest = response.read()
        assert rest.endswith(b"data: [DONE]\n\n"), (first, rest[-200:])
        connection.close()
        process.wait(GIVE_UP_S)
        assert not alive(int(engine))
    finally:
        listening.close()
        process.kill()
        process.wait()

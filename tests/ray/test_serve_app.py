"""An application of Ray Serve on two nodes: streams go on when an engine dies, stops or drains, and
engines come and go with the load, from none to three and back.

One story, since each step needs the state that the one before leaves.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from tests.ray.two_nodes import LONG_S, TwoNodes, until
from tests.serve.running_server import ROOT, alive
from tests.serve.test_router import normal

# Ray reads its variables when it is imported, which importorskip would do too early.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

KEY = "key-of-the-test"
ARGS: dict[str, Any] = {
    "host": "127.0.0.1",
    "num_cpus": 1,
    "resources": {"engine": 1},
    "settings": {
        "max_num_seqs": 2,
        "kv_cache_memory": "16MiB",
        "kv_touch_ahead": 0,
        "grace_seconds": 0,
    },
    "scaling": {
        "min_replicas": 0,
        "max_replicas": 3,
        "waiting_tokens": 20,
        "upscale_delay_s": 0,
        "downscale_delay_s": 30,
        "to_zero_delay_s": 5,
        "look_back_s": 2,
    },
    "router": {"stall-seconds": 6, "probe-seconds": 0.5, "grace-seconds": 2},
}
# With many log-probabilities a stream takes long enough to be interrupted.
LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "logprobs": 20,
    "seed": 7,
    "frequency_penalty": 0.5,
}
STREAM = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
SHORT = {"prompt": "Once upon a time", "max_tokens": 30, "seed": 1, "ignore_eos": True}


class Client:
    def __init__(self, port: int) -> None:
        self._port = port

    def open(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Return the response to a request, unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LONG_S)
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        raw = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, raw, headers)
        return connection.getresponse()

    def read(self, path: str, body: Any = None) -> bytes:
        """Return the body of a response with status 200."""
        with self.open(path, body) as response:
            raw = response.read()
            assert response.status == 200, raw
            return raw

    def replicas(self) -> list[dict[str, Any]]:
        """Return the engines as the router sees them."""
        with self.open("/health") as response:
            found: list[dict[str, Any]] = json.loads(response.read())["replicas"]
            return [one for one in found if one["available"]]

    def metric(self, name: str) -> float:
        text = self.read("/metrics").decode()
        return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as started:
        yield started
    assert not started.left, started.left


@pytest.fixture(scope="module")
def client(nodes: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Client:
    from ray import serve

    from quire.deploy.ray import build_app

    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY + "\n")
    settings = {**ARGS["settings"], "api_key_file": str(keys)}
    options = {"host": "127.0.0.1", "port": nodes.port}
    serve.start(proxy_location="HeadOnly", http_options=options)
    serve.run(build_app({**ARGS, "settings": settings}), name="quire", route_prefix="/")
    return Client(nodes.port)


def num_engines() -> int:
    """Return how many engines Serve runs."""
    from ray import serve

    deployments = serve.status().applications["quire"].deployments
    return int(deployments["Engine"].replica_states.get("RUNNING", 0))


def test_streams_survive_and_engines_follow_the_load(nodes: TwoNodes, client: Client) -> None:
    assert num_engines() == 0
    short = json.loads(client.read("/v1/completions", SHORT))  # it waits for a first engine
    assert num_engines() == 1
    assert short["usage"]["completion_tokens"] == 30
    alone = client.read("/v1/completions", STREAM)
    assert alone.rstrip().endswith(b"data: [DONE]")

    _scale_up(client)
    for how in (_kill, _stop):
        pids = {one["url"]: nodes.listener(_port_of(one)) for one in client.replicas()}
        resumed = client.metric("quire_router_resumed_streams_total")
        stream, replica = _open_stream(client)  # it may end soon: all else is known before
        how(pid := pids[replica["url"]])
        assert normal(stream.read()) == normal(alone), how
        assert client.metric("quire_router_resumed_streams_total") > resumed
        if alive(pid):
            os.kill(pid, signal.SIGKILL)

    _scale_up(client)
    resumed = client.metric("quire_router_resumed_streams_total")
    with _streams_equal_to(alone, client):
        nodes.drain_second(seconds=25)
        until(
            lambda: client.metric("quire_router_resumed_streams_total") > resumed,
            "a stream left the drained node",
        )
    assert client.metric("quire_router_broken_streams_total") == 0

    until(lambda: num_engines() == 0 and not client.replicas(), "no engine is left")
    again = json.loads(client.read("/v1/completions", SHORT))
    assert again["choices"] == short["choices"]
    assert num_engines() == 1


def _port_of(replica: dict[str, Any]) -> int:
    return int(replica["url"].rpartition(":")[2])


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _open_stream(client: Client) -> tuple[http.client.HTTPResponse, dict[str, Any]]:
    """Begin a stream; return it, unread, and the engine that has most open requests."""
    stream = client.open("/v1/completions", STREAM)
    assert stream.status == 200
    replica = max(client.replicas(), key=lambda one: one["open"])
    assert replica["open"]
    return stream, replica


@contextmanager
def _streams_equal_to(alone: bytes, client: Client) -> Iterator[None]:
    """Stream all the time, so that each engine has streams; each must be the undisturbed one."""
    is_enough, wanted = threading.Event(), normal(alone)
    wrong: list[bytes] = []

    def stream() -> None:
        while not is_enough.is_set():
            with client.open("/v1/completions", STREAM) as response:
                raw = response.read()
            if normal(raw) != wanted:
                wrong.append(raw)

    threads = [threading.Thread(target=stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_enough.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0][-600:]


def _scale_up(client: Client) -> None:
    """Send requests until three engines run."""
    is_enough = threading.Event()

    def load() -> None:
        while not is_enough.is_set():
            with client.open("/v1/completions", LONG) as response:  # it may be refused
                response.read()

    threads = [threading.Thread(target=load) for _ in range(12)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(client.replicas()) == 3, "three engines")
    finally:
        is_enough.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("name", ["deploy/ray/serve.yaml", "deploy/kubernetes/ray-service.yaml"])
def test_the_examples_are_valid_for_serve(nodes: TwoNodes, name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    found = yaml.safe_load((ROOT / name).read_text("utf-8"))
    if found.get("kind") == "RayService":
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    [application] = ServeDeploySchema.model_validate(found).applications
    assert application.args["model"] == "ORG/NAME"

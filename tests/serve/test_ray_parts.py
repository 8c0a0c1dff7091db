"""The parts of a Ray application without Ray: an engine with its lease, and a router before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.deploy.ray_serve.app_args import read_args
from quire.deploy.ray_serve.directory import ReplicaDirectory
from quire.deploy.ray_serve.engine_replica import EngineReplica
from quire.deploy.ray_serve.ingress import Ingress
from quire.deploy.ray_serve.scaling import RUNNING, SLOTS, TTFT_MS, WAITING_TOKENS
from tests.serve.running_server import GIVE_UP_S
from tests.serve.test_asgi import own_engines, preloaded_engines

__all__ = ["preloaded_engines"]  # a fixture of each test

SETTINGS = {"max_num_seqs": 2, "kv_touch_ahead": 0, "kv_cache_memory": "16MiB", "grace_seconds": 20}
ARGS = read_args(
    {"insecure": True, "settings": SETTINGS, "router": {"wait-seconds": 60, "probe-seconds": 0.1}}
)
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "seed": 3, "ignore_eos": True}


class Down(ReplicaDirectory):
    """A directory that can be away."""

    is_down = False

    async def hold(self, address: str) -> None:
        if self.is_down:
            raise ConnectionError("the directory is away")
        await super().hold(address)


async def _post(address: str, body: Any) -> tuple[int, Any]:
    def post() -> tuple[int, Any]:
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=GIVE_UP_S) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    return await asyncio.to_thread(post)


async def _routed(ingress: Ingress, body: Any) -> tuple[int, Any]:
    """Send a request to the router's application."""
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    received = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Future[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    await ingress({**scope, "headers": headers}, receive, send)
    raw = b"".join(one.get("body", b"") for one in sent[1:])
    return sent[0]["status"], json.loads(raw)


def test_an_engine_is_asked_for_holds_a_lease_reports_its_load_and_drains() -> None:
    async def story() -> None:
        directory = Down()
        asked = asyncio.Event()

        async def ask_for_engine() -> None:
            asked.set()

        ingress = Ingress(ARGS, directory.addresses, ask_for_engine)
        await ingress.start()
        first = asyncio.create_task(_routed(ingress, LONG))
        await asyncio.wait_for(asked.wait(), GIVE_UP_S)  # a request waits and there is no engine

        directory.is_down = True
        replica = EngineReplica(ARGS, directory, "127.0.0.1", 1)
        await replica.start()
        replica.check()
        directory.is_down = False
        status, answer = await first
        assert (status, answer["usage"]["completion_tokens"]) == (200, 400)
        assert await directory.addresses() == [replica.address]
        ingress.check()

        open_ = [asyncio.create_task(_routed(ingress, {**LONG, "n": 2})) for _ in range(3)]
        while True:
            load = await replica.load()
            if load[RUNNING] == 2.0 and load[WAITING_TOKENS]:
                break
            await asyncio.sleep(0)
        assert load[SLOTS] == 2.0
        assert load[TTFT_MS] >= 0.0
        stopping = asyncio.create_task(replica.stop())
        while await directory.addresses():
            await asyncio.sleep(0.01)
        status, answer = await _post(replica.address, LONG)
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert [status for status, _ in await asyncio.gather(*open_)] == [200] * 3
        await stopping
        await replica.stop()  # twice is once
        assert await replica.load() == {}
        with pytest.raises(urllib.error.URLError):
            await _post(replica.address, LONG)
        await ingress.stop()
        await ingress.stop()

    asyncio.run(story())


def test_an_engine_that_dies_fails_its_check() -> None:
    async def story() -> None:
        replica = EngineReplica(ARGS, ReplicaDirectory(), "127.0.0.1", 1)
        await replica.start()
        replica.check()
        [engine] = own_engines()
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the engine is dead"):
            await check_for_ever(replica)
        await replica.stop()

    async def check_for_ever(replica: EngineReplica) -> None:
        while True:
            replica.check()
            await asyncio.sleep(0.01)

    asyncio.run(story())


def test_files_that_a_node_lacks_are_errors_of_its_engine() -> None:
    keyed = read_args({"settings": {**SETTINGS, "tenants": "/no/such/file"}})
    with pytest.raises(SettingError, match="/no/such/file"):
        EngineReplica(keyed, ReplicaDirectory(), "127.0.0.1", 1)

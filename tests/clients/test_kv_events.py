"""Dynamo's SelectionService follows the KV events of two servers and knows what each has cached."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.clients.conftest import BOX
from tests.serve.running_server import RunningServer

dynamo = pytest.importorskip("dynamo._core")

BLOCK_SIZE = 16


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def servers() -> Iterator[list[tuple[RunningServer, dict[str, str]]]]:
    """Two servers with few blocks, and where they publish."""
    with ExitStack() as stack:
        found = []
        for _ in range(2):
            config = {
                name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")
            }
            events = json.dumps({"enable_kv_cache_events": True, **config})
            flags = ("--threads", "1", "--kv-cache-memory", "4MiB", "--kv-events-config", events)
            found.append((stack.enter_context(RunningServer(BOX, *flags)), config))
        yield found


def compute(server: RunningServer, prompt: list[int]) -> int:
    """Let a server compute a prompt; return how many blocks it had cached."""
    status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"]) // BLOCK_SIZE


def test_overlaps_are_what_each_server_finds(
    servers: list[tuple[RunningServer, dict[str, str]]],
) -> None:
    async def test() -> None:
        service = dynamo.SelectionService()
        for number, (server, config) in enumerate(servers, start=1):
            worker = {
                "worker_id": number,
                "model_name": "box",
                "endpoint": server.url,
                "block_size": BLOCK_SIZE,
                "kv_events_endpoints": {0: config["endpoint"]},
                "replay_endpoint": config["replay_endpoint"],
                "total_kv_blocks": 1000,
                "max_num_batched_tokens": 2048,
            }
            assert (await service.upsert_worker(worker))["lifecycle"] == "schedulable"
        chance = random.Random(7)
        stems = [[chance.randrange(3, 400) for _ in range(160)] for _ in range(4)]
        for turn in range(60):
            stem = stems[turn % 4][: chance.randrange(20, 160)]
            prompt = stem + [chance.randrange(3, 400) for _ in range(chance.randrange(30, 120))]
            number = chance.randrange(2)
            expected = await overlaps(service, prompt)
            assert compute(servers[number][0], prompt) == expected[number + 1], turn
            async with asyncio.timeout(60):  # for the events, of which these blocks are the last
                while (await overlaps(service, prompt))[number + 1] < len(prompt) // BLOCK_SIZE:
                    await asyncio.sleep(0.01)
        evicted = servers[0][0].get("/v1/cache")[1]["evicted_blocks_total"]
        assert evicted > 0, "blocks were evicted, so removals count"
        service.shutdown()

    asyncio.run(test())


async def overlaps(service: Any, prompt: list[int]) -> dict[int, int]:
    """Return how many blocks of a prompt each worker has, by the events until now."""
    found = await service.overlap_scores({"model_name": "box", "token_ids": prompt})
    return {worker["worker_id"]: worker["device_blocks"] for worker in found["workers"]}

"""`quire serve --kv-events-config`: a subscriber rebuilds the tree of the prefix cache."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.serve.running_server import GIVE_UP_S, RunningServer, kill

BLOCK_SIZE = 16


class Subscriber:
    """The tree of a server's events: of each block its parent and its tokens."""

    def __init__(self, folder: Path) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.topics: set[bytes] = set()
        self._last = -1
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(f"ipc://{folder}/events")
        self._events.subscribe(b"")
        self._asking = self._context.socket(zmq.DEALER)
        self._asking.connect(f"ipc://{folder}/replay")

    def read(self) -> None:
        """Take all that has come; ask for what was lost."""
        while self._events.poll(100):
            topic, number, batch = self._events.recv_multipart()
            self.topics.add(topic)
            if int.from_bytes(number, "big") == self._last + 1:
                self._take(int.from_bytes(number, "big"), batch)
            elif int.from_bytes(number, "big") > self._last:
                self.catch_up()

    def catch_up(self) -> None:
        """Read the batches after the last."""
        self._asking.send_multipart((b"", (self._last + 1).to_bytes(8, "big")))
        while True:
            assert self._asking.poll(GIVE_UP_S * 1000)
            _, number, batch = self._asking.recv_multipart()
            if number == b"\xff" * 8:
                return
            self._take(int.from_bytes(number, "big"), batch)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self, number: int, batch: bytes) -> None:
        assert number == self._last + 1
        self._last = number
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                assert fields == []
                self.blocks.clear()
            elif kind == "BlockRemoved":
                hashes, medium = fields
                assert medium == "GPU"
                for hash_ in hashes:
                    del self.blocks[hash_]
            else:
                assert kind == "BlockStored"
                hashes, parent, token_ids, block_size, lora_id, medium, lora_name = fields
                assert (block_size, lora_id, medium, lora_name) == (BLOCK_SIZE, None, "GPU", None)
                for at, hash_ in enumerate(hashes):
                    tokens = token_ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
                    self.blocks[hash_] = (parent, tokens)
                    parent = hash_

    def paths(self) -> set[tuple[int, ...]]:
        """Return the tokens from the beginning to each block with all blocks before it."""
        found = set()
        for hash_ in self.blocks:
            parts: list[list[int]] = []
            at: int | None = hash_
            while at is not None and at in self.blocks:
                at, tokens = self.blocks[at]
                parts.insert(0, tokens)
            if at is None:
                found.add(tuple(itertools.chain(*parts)))
        return found


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    found = Subscriber(tmp_path)
    yield found
    found.close()


def _flags(folder: Path, **fields: Any) -> tuple[str, ...]:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        **fields,
    }
    return ("--threads", "1", "--kv-events-config", json.dumps(config))


def _fill(server: RunningServer, first: int, num_tokens: int, **fields: Any) -> tuple[int, ...]:
    """Let the server compute a prompt; return its tokens in full blocks."""
    prompt = [3 + (first + at * at) % 200 for at in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return tuple(prompt[: num_tokens // BLOCK_SIZE * BLOCK_SIZE])


def _findable(server: RunningServer) -> int:
    blocks: dict[str, int] = server.get("/v1/cache")[1]["blocks"]
    return blocks["findable"]


def test_events_rebuild_the_tree(tiny: Path, tmp_path: Path, subscriber: Subscriber) -> None:
    # So few blocks that prompts evict each other.
    flags = (*_flags(tmp_path), "--max-model-len", "512", "--kv-cache-memory", "1MiB")
    with RunningServer(tiny, *flags) as server:
        for first in range(6):
            prompt = _fill(server, first, 100 + 40 * first)
            subscriber.catch_up()
            assert prompt in subscriber.paths()
        assert len(subscriber.blocks) == _findable(server)
        for number in range(40):
            prompt = _fill(server, 7 * number + 1, 300)
        subscriber.read()
        subscriber.catch_up()
        assert server.get("/v1/cache")[1]["evicted_blocks_total"] > 100
        assert len(subscriber.blocks) == _findable(server)
        assert prompt in subscriber.paths()
        assert subscriber.topics <= {f"kv@127.0.0.1:{server.port}@tiny".encode()}
        # Salted requests are isolated: their tokens are not published.
        _fill(server, 150, 64, cache_salt="private")
        subscriber.catch_up()
        assert len(subscriber.blocks) < _findable(server)
        assert server.request("POST", "/v1/cache/flush")[0] == 200
        subscriber.catch_up()
        assert subscriber.blocks == {}
        assert _fill(server, 6, 64) is not None
        subscriber.catch_up()
        assert len(subscriber.blocks) == _findable(server) == 4


def test_the_events_of_a_restarted_engine_begin_anew(tmp_path: Path) -> None:
    flags = (*_flags(tmp_path), "--restart-engine")
    with RunningServer("quire/models/box", *flags) as server:
        before = Subscriber(tmp_path)
        prompt = _fill(server, 1, 64)
        before.catch_up()
        assert prompt in before.paths()
        before.close()
        kill(server.engine_pid)
        server.until(lambda: server.metric("quire_engine_restarts_total") == 1, "restarted")
        server.until(lambda: server.get("/health")[0] == 200, "ready")
        after = Subscriber(tmp_path)
        after.catch_up()
        assert after.blocks == {}
        other = _fill(server, 2, 64)
        after.catch_up()
        assert after.paths() == {other[:16], other[:32], other[:48], other}
        after.close()


def test_isolated_tenants_are_published_only_if_asked_for(tmp_path: Path) -> None:
    keys = ("--api-key", "one", "--api-key", "two")
    for isolated in (False, True):
        flags = (*_flags(tmp_path, isolated_tenants=isolated), *keys)
        with RunningServer("quire/models/box", *flags) as server:
            body = {"prompt": list(range(3, 67)), "max_tokens": 1}
            status, _, raw = server.request(
                "POST", "/v1/completions", body, authorization="Bearer one"
            )
            assert status == 200, raw
            subscriber = Subscriber(tmp_path)
            subscriber.catch_up()
            assert len(subscriber.blocks) == (4 if isolated else 0)
            subscriber.close()

"""KVEventPublisher: frames and arrays of vLLM's format, replay, bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.base.errors import SettingError
from quire.cache.reporting import BlocksRemoved, BlocksStored, CacheCleared
from quire.config.kv_events import KVEventsConfig, read_kv_events
from quire.engine.kv_events.publisher import END_OF_REPLAY, KVEventPublisher
from tests.cases import each_case

WAIT_MS = 20_000
STORED = BlocksStored(hashes=(2**64 - 1, 7), parent=None, token_ids=(1, 2, 3, 4))


class Subscriber:
    """A publisher, and a client of both of its sockets."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.problems: list[str] = []
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{folder}/events",
            replay_endpoint=f"ipc://{folder}/replay",
            **fields,
        )
        self.publisher = KVEventPublisher(
            config,
            topic="kv@localhost:8000@box",
            block_size=2,
            report=lambda what, **_: self.problems.append(what),
        )
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(config.endpoint)
        self.events.subscribe(b"kv@")
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(str(config.replay_endpoint))

    def next(self) -> tuple[bytes, int, Any]:
        assert self.events.poll(WAIT_MS)
        topic, number, batch = self.events.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)

    def replay(self, first: int) -> list[tuple[int, Any]]:
        self.asking.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.asking.poll(WAIT_MS)
            _, number, batch = self.asking.recv_multipart()
            if number == END_OF_REPLAY:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)))

    def until_connected(self) -> int:
        """Publish until something arrives; return the number of the last batch."""
        while not self.events.poll(20):
            self.publisher.put(BlocksRemoved((0,)))
        number = 0
        while self.events.poll(200):
            number = self.next()[1]
        return number

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    found = Subscriber(tmp_path)
    yield found
    found.close()


def test_a_batch_has_the_frames_and_arrays_of_vllm(subscriber: Subscriber) -> None:
    before = subscriber.until_connected()
    subscriber.publisher.put(STORED)
    topic, number, (ts, events, rank) = subscriber.next()
    assert topic == b"kv@localhost:8000@box"
    assert number == before + 1
    assert isinstance(ts, float)
    assert rank == 0
    assert events == [["BlockStored", [2**64 - 1, 7], None, [1, 2, 3, 4], 2, None, "GPU", None]]
    subscriber.publisher.put(BlocksRemoved((7,)))
    assert subscriber.next()[2][1] == [["BlockRemoved", [7], "GPU"]]
    subscriber.publisher.put(CacheCleared())
    assert subscriber.next()[2][1] == [["AllBlocksCleared"]]


def test_batches_are_replayed_from_a_number_on(subscriber: Subscriber) -> None:
    last = subscriber.until_connected()
    for hash_ in range(5):
        subscriber.publisher.put(BlocksRemoved((hash_,)))
        subscriber.next()
    got = subscriber.replay(last + 3)
    assert [number for number, _ in got] == [last + 3, last + 4, last + 5]
    assert [batch[1] for _, batch in got] == [[["BlockRemoved", [h], "GPU"]] for h in (2, 3, 4)]
    assert subscriber.replay(last + 6) == []
    first_of_all = subscriber.replay(0)[0]
    assert first_of_all[0] == 0
    assert first_of_all[1][1][0] == ["AllBlocksCleared"]


def test_requests_that_are_no_replay_are_ignored(subscriber: Subscriber) -> None:
    for frames in ((b"",), (b"", b"short"), (b"a", b"b", b"c")):
        subscriber.asking.send_multipart(frames)
    assert subscriber.replay(10**9) == []
    assert subscriber.problems == []


def test_only_the_last_batches_are_kept(tmp_path: Path) -> None:
    subscriber = Subscriber(tmp_path, buffer_steps=3)
    last = subscriber.until_connected()
    for hash_ in range(6):
        subscriber.publisher.put(BlocksRemoved((hash_,)))
        subscriber.next()
    assert [number for number, _ in subscriber.replay(0)] == [last + 4, last + 5, last + 6]
    subscriber.close()


def test_dropped_events_leave_a_gap(tmp_path: Path) -> None:
    subscriber = Subscriber(tmp_path, max_queue_size=4)
    last = subscriber.until_connected()
    publisher = subscriber.publisher
    publisher._max_queued = 0  # as if the publisher's thread had not kept up
    publisher.put(BlocksRemoved((1,)))
    publisher._max_queued = 4
    publisher.put(BlocksRemoved((2,)))
    _, number, batch = subscriber.next()
    assert number == last + 2
    assert batch[1] == [["BlockRemoved", [2], "GPU"]]
    assert subscriber.problems == ["KV events were dropped"]
    subscriber.close()


def test_an_address_in_use_is_refused(subscriber: Subscriber, tmp_path: Path) -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
    with pytest.raises(SettingError, match="cannot be listened at"):
        KVEventPublisher(config, topic="", block_size=2, report=lambda what, **_: None)
    context.destroy(linger=0)


@each_case(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[]", "a JSON object"),
        ('{"enabled": true}', "known are enable_kv_cache_events"),
        ('{"enable_kv_cache_events": 1}', "true or false"),
        ('{"publisher": "kafka"}', '"zmq" or "null"'),
        ('{"endpoint": "udp://a:1"}', "an address as in"),
        ('{"endpoint": "tcp://a:99999"}', "an address as in"),
        ('{"endpoint": null}', "an address as in"),
        ('{"replay_endpoint": "tcp://"}', "an address as in"),
        ('{"topic": 7}', "a text"),
        ('{"buffer_steps": 0}', "a whole number"),
        ('{"hwm": 1e9}', "a whole number"),
    ],
)
def test_wrong_settings_are_refused(text: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        read_kv_events(text)


def test_the_defaults_are_loopback_and_off() -> None:
    assert not read_kv_events("{}").is_on
    config = read_kv_events(json.dumps({"enable_kv_cache_events": True}))
    assert config.is_on
    assert config.remote_endpoints == []
    assert not config.isolated_tenants
    assert read_kv_events('{"endpoint": "tcp://*:5557"}').remote_endpoints == ["tcp://*:5557"]
    assert not read_kv_events('{"enable_kv_cache_events": true, "publisher": "null"}').is_on

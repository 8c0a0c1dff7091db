"""A router that follows the KV events of its replicas, from publishers as servers have them."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.api.generation.fields import TOKENIZE
from quire.base.errors import SettingError
from quire.base.server_url import server_url
from quire.cache.reporting import BlocksRemoved, BlocksStored, CacheCleared
from quire.config.kv_events import KVEventsConfig
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.router.block_hashes import block_hashes
from quire.router.event_feed import Endpoints
from quire.router.event_order import EventOrder
from quire.router.exact_prefixes import ExactPrefixes, endpoints_of, given_ids
from quire.router.features import Features
from quire.router.route_file import KVEndpointsTable, KVEventsTable
from quire.router.tokenize_fields import TOKENIZE_FIELDS
from quire.routing.block_sets import BlockSets
from tests.unit.router.fake_replica import FakeReplica, Router, run

SIZE = 4
PROMPT = list(range(300, 364))
HASHES = block_hashes(array("i", PROMPT), SIZE)


class Published:
    """Replicas with publishers, and a router's features that follow them."""

    def __init__(self, stack: ExitStack, folder: Path, count: int, **fields: Any) -> None:
        self.replicas = [FakeReplica() for _ in range(count)]
        self.configs = [
            KVEventsConfig(
                enable_kv_cache_events=True,
                endpoint=f"ipc://{folder}/{at}.events",
                replay_endpoint=f"ipc://{folder}/{at}.replay",
            )
            for at in range(count)
        ]
        self.publishers = [self.publisher(at) for at in range(count)]
        stack.callback(lambda: [one.close() for one in self.publishers])
        self.sets = BlockSets(100_000)
        self.fields = {"min_prompt_tokens": 0, "tokenize_ms": 5000, **fields}

    def publisher(self, at: int, engine: int = 0, rank: int | None = None) -> KVEventPublisher:
        """Return what one engine of a replica publishes with. rank: in its batches."""
        config = self.configs[at]
        if engine:
            config = replace(
                config,
                endpoint=f"{config.endpoint}.{engine}",
                replay_endpoint=f"{config.replay_endpoint}.{engine}",
            )
        config = replace(config, data_parallel_rank=engine if rank is None else rank)
        return KVEventPublisher(
            config, topic="kv@a:1@box", block_size=SIZE, report=lambda *_, **__: None
        )

    def run(self, story: Callable[[Router], Any], **settings: Any) -> None:
        def make(fleet: Any) -> ExactPrefixes:
            tables = {
                f"{replica.url}/v1": KVEndpointsTable(
                    endpoint=config.endpoint, replay_endpoint=str(config.replay_endpoint)
                )
                for replica, config in zip(self.replicas, self.configs, strict=True)
            }
            return ExactPrefixes(fleet, KVEventsTable(replicas=tables, **self.fields), self.sets)

        features = Features(sets=self.sets, make_look_up=make)
        run(self.replicas, story, features, **{"policy": "warm-cache", "stall_s": 30.0, **settings})

    async def until(self, at: int, num_blocks: int) -> None:
        """Wait until the router knows so many blocks of a replica."""
        async with asyncio.timeout(15):
            while self.sets.num_blocks(at) != num_blocks:
                await asyncio.sleep(0.01)


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    with ExitStack() as stack:
        yield Published(stack, tmp_path, 2)


def stored(hashes: list[int]) -> BlocksStored:
    return BlocksStored(tuple(hashes), None, tuple([1] * SIZE * len(hashes)))


def test_prompts_go_where_their_blocks_are(published: Published) -> None:
    first, second = published.replicas
    published.publishers[1].put(stored(HASHES))

    async def story(router: Router) -> None:
        await published.until(1, len(HASHES))
        for turn in range(4):
            await router.post("/generate", {"tokens": [*PROMPT, turn]})
        published.publishers[1].put(BlocksRemoved(tuple(HASHES)))
        published.publishers[0].put(stored(HASHES))
        await published.until(0, len(HASHES))
        await published.until(1, 0)
        for turn in range(3):
            await router.post("/generate", {"tokens": [*PROMPT, turn]})
        assert router.prefixes is not None
        assert router.prefixes.counts["known_blocks"] == len(HASHES)

    published.run(story)
    assert (len(first.requests), len(second.requests)) == (3, 4)


@pytest.mark.parametrize("is_chat", [True, False])
def test_texts_are_looked_up_by_the_tokens_of_a_replica(
    published: Published, is_chat: bool
) -> None:
    first, second = published.replicas
    asked = list[dict[str, Any]]()

    def answer(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        if path != "/tokenize":
            return None
        asked.append(fields)
        return 200, json.dumps({"count": 64, "max_model_len": 99, "tokens": PROMPT}).encode()

    first.answer = second.answer = answer
    published.publishers[1].put(stored(HASHES))
    text = {"messages": [{"role": "user", "content": "Hello"}], "tools": []}
    body = {**(text if is_chat else {"prompt": "Hello"}), "model": "box", "temperature": 0.5}

    async def story(router: Router) -> None:
        await published.until(1, len(HASHES))
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        for _ in range(3):
            assert (await router.post(path, body))[0] == 200
        for changed in ({"cache_salt": "a"}, {"truncate_prompt_tokens": 5}):
            await router.post(path, {**body, **changed})

    published.run(story)
    assert len(asked) == 3
    for fields in asked:
        assert fields == {name: body[name] for name in body if name != "temperature"}
    answered = [one for one in second.requests if "temperature" in one]
    assert len(answered) >= 3


def test_every_field_that_is_sent_to_tokenize_is_known_there() -> None:
    assert set(TOKENIZE_FIELDS) <= TOKENIZE
    assert TOKENIZE - set(TOKENIZE_FIELDS) == {"content", "return_token_strs"}


@pytest.mark.parametrize("answer", [(400, b"{}"), (200, b"[]"), (200, b'{"tokens":[-1]}')])
def test_without_tokens_a_request_is_routed_by_what_was_sent(
    published: Published, answer: tuple[int, bytes]
) -> None:
    for one in published.replicas:
        one.answer = lambda method, path, fields: answer if path == "/tokenize" else None
    published.publishers[1].put(stored([1]))

    async def story(router: Router) -> None:
        await published.until(1, 1)
        assert (await router.post("/v1/completions", {"prompt": "Hello " * 100}))[0] == 200

    published.run(story)


def test_a_replica_that_was_fenced_is_followed_from_its_first_event(published: Published) -> None:
    replica = published.replicas[1]
    published.publishers[1].put(stored(HASHES))

    async def story(router: Router) -> None:
        await published.until(1, len(HASHES))
        published.publishers[1].close()  # with its server
        replica.stop_listening(cuts=True)
        await published.until(1, 0)
        published.publishers[1] = published.publisher(1)
        published.publishers[1].put(stored(HASHES[:5]))
        await replica.start()
        await published.until(1, 5)

    published.run(story)


def test_lost_events_are_asked_for(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second batch is lost on its way."""
    publisher = published.publishers[0]
    socket, num_sent = publisher._publisher, [0]

    class Lossy:
        @staticmethod
        def send_multipart(frames: tuple[bytes, ...]) -> None:
            num_sent[0] += 1
            if num_sent[0] % 2:
                socket.send_multipart(frames)

    monkeypatch.setattr(publisher, "_publisher", Lossy)

    async def story(router: Router) -> None:
        publisher.put(stored([1000]))
        await published.until(0, 1)
        for at in range(1, 40):
            publisher.put(stored([1000 + at]))
            await asyncio.sleep(0.002)
        publisher.put(BlocksRemoved((1000,)))
        publisher.put(CacheCleared())
        publisher.put(stored([7, 8]))
        publisher.put(stored([9, 10]))
        await published.until(0, 4)

    published.run(story)


def test_frames_that_are_no_batch_are_logged_once(published: Published, tmp_path: Path) -> None:
    context = zmq.Context()
    with closing(context.socket(zmq.PUB)) as other:
        other.bind(f"ipc://{tmp_path}/false.events")
        published.publishers[0].close()
        published.configs[0] = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{tmp_path}/false.events",
            replay_endpoint=f"ipc://{tmp_path}/0.replay",
        )
        published.publishers = published.publishers[1:]

        async def story(router: Router) -> None:
            async with asyncio.timeout(15):
                while not any("no batch of events" in line for line in router.lines):
                    other.send_multipart((b"kv@", b"short", b"x"))
                    other.send(b"alone")
                    await asyncio.sleep(0.01)
            assert (await router.post("/generate", {"tokens": PROMPT}))[0] == 200
            assert sum("no batch of events" in line for line in router.lines) == 1

        published.run(story)
    context.destroy(linger=0)


def test_all_engines_of_a_data_parallel_replica_are_followed(published: Published) -> None:
    """A prompt is where any of them has it; what one has lost another may still have."""
    first, second = published.replicas
    published.fields["data_parallel_size"] = 2
    others = [published.publisher(at, engine=1) for at in (0, 1)]
    published.publishers[1].put(stored(HASHES[:4]))
    others[1].put(stored(HASHES))

    async def story(router: Router) -> None:
        await published.until(1, len(HASHES) + 4)
        for turn in range(3):
            await router.post("/generate", {"tokens": [*PROMPT, turn]})
        assert (len(first.requests), len(second.requests)) == (0, 3)
        published.publishers[1].put(CacheCleared())
        await published.until(1, len(HASHES))
        await router.post("/generate", {"tokens": [*PROMPT, 4]})
        assert (len(first.requests), len(second.requests)) == (0, 4)
        others[1].put(BlocksRemoved(tuple(HASHES)))
        others[0].put(stored(HASHES))
        await published.until(1, 0)
        await published.until(0, len(HASHES))
        await router.post("/generate", {"tokens": [*PROMPT, 5]})
        assert (len(first.requests), len(second.requests)) == (1, 4)
        # One that begins anew has forgotten what it had, and the other has not.
        others[0].close()
        others[0] = published.publisher(0, engine=1)
        published.publishers[0].put(stored(HASHES[:2]))
        await published.until(0, 2)

    try:
        published.run(story)
    finally:
        for one in others:
            one.close()


def test_what_another_replica_publishes_at_the_next_port_is_not_an_engine_of_this_one(
    published: Published,
) -> None:
    published.fields["data_parallel_size"] = 2
    other = published.publisher(0, engine=1, rank=0)
    other.put(stored(HASHES))
    published.publishers[0].put(stored(HASHES[:3]))

    async def story(router: Router) -> None:
        await published.until(0, 3)
        assert router.prefixes is not None
        while not router.prefixes.counts["kv_event_invalid_batches"]:
            await asyncio.sleep(0.01)
        lines = [line for line in router.lines if "is of engine 0" in line]
        assert len(lines) == 1
        assert "engine=1" in lines[0]
        assert "data-parallel-size" in lines[0]
        assert router.prefixes.counts["known_blocks"] == 3

    try:
        published.run(story)
    finally:
        other.close()


@pytest.mark.parametrize("body", [{"prompt": PROMPT}, {"prompt": "Hello"}])
def test_a_prompt_of_llama_cpps_form_is_looked_up(
    published: Published, body: dict[str, Any]
) -> None:
    second = published.replicas[1]
    for one in published.replicas:
        one.answer = lambda method, path, fields: (
            (200, json.dumps({"tokens": PROMPT}).encode()) if path == "/tokenize" else None
        )
    published.publishers[1].put(stored(HASHES))

    async def story(router: Router) -> None:
        await published.until(1, len(HASHES))
        for turn in range(3):
            assert (await router.post("/completion", {**body, "n_predict": turn + 1}))[0] == 200

    published.run(story)
    assert [one["n_predict"] for one in second.requests if "n_predict" in one] == [1, 2, 3]


def test_replicas_with_one_endpoint_are_named(published: Published) -> None:
    published.configs[1] = published.configs[0]

    async def story(router: Router) -> None:
        found = [line for line in router.lines if "share an endpoint" in line]
        assert len(found) == 2
        assert all(one.url in line for one, line in zip(published.replicas, found, strict=True))

    published.run(story)


def test_where_replicas_publish() -> None:
    table, own = KVEventsTable(), KVEndpointsTable(endpoint="tcp://b:7")
    assert endpoints_of(server_url("http://a:1"), own, table) == [Endpoints("tcp://b:7")]
    usual = endpoints_of(server_url("http://[::1]:2"), None, table)
    assert usual == [Endpoints("tcp://[::1]:5557", "tcp://[::1]:5558")]


def test_where_the_engines_of_a_replica_publish() -> None:
    table = KVEventsTable(replay_port=6557, data_parallel_size=2)
    assert endpoints_of(server_url("http://a:1"), None, table) == [
        Endpoints("tcp://a:5557", "tcp://a:6557", is_checked=True),
        Endpoints("tcp://a:5558", "tcp://a:6558", is_checked=True),
    ]
    own = KVEndpointsTable(endpoint="ipc:///run/kv", data_parallel_size=3)
    assert [one.events for one in endpoints_of(server_url("http://a:1"), own, table)] == [
        *("ipc:///run/kv", "ipc:///run/kv.1", "ipc:///run/kv.2"),
    ]
    one = KVEndpointsTable(endpoint="ipc:///run/kv", data_parallel_size=1)
    assert endpoints_of(server_url("http://a:1"), one, table) == [Endpoints("ipc:///run/kv")]


def test_token_ids_in_requests() -> None:
    assert given_ids({"tokens": [1, 2]}) == array("i", [1, 2])
    assert given_ids({"prompt": [[1, 2]]}) == array("i", [1, 2])
    for fields in ({"prompt": "text"}, {"prompt": ["a"]}, {"tokens": [1, True]}, {"tokens": [-1]}):
        assert given_ids(fields) is None


def test_an_error_of_the_feed_ends_it_and_forgets_what_it_said(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publishers[1].put(stored(HASHES))

    async def story(router: Router) -> None:
        await published.until(1, len(HASHES))
        monkeypatch.setattr(EventOrder, "live", lambda *_: 1 / 0)
        published.publishers[1].put(stored([1]))
        await published.until(1, 0)
        assert any("no longer followed" in line for line in router.lines)
        assert (await router.post("/generate", {"tokens": PROMPT}))[0] == 200

    published.run(story)


def test_addresses_in_the_table_are_checked(published: Published) -> None:
    table = KVEndpointsTable(endpoint="tcp://b:7")

    async def story(router: Router) -> None:
        with pytest.raises(SettingError, match=r"kv-events.replicas.*ftp"):
            ExactPrefixes(router.fleet, KVEventsTable(replicas={"ftp://a": table}), published.sets)
        other = KVEventsTable(replicas={"http://10.0.0.9:1": table})
        ExactPrefixes(router.fleet, other, published.sets).close()
        assert any("not there yet" in line and "10.0.0.9" in line for line in router.lines)

    published.run(story)

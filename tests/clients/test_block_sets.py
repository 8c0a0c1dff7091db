"""What the router knows from KV events equals what Dynamo's radix index knows from the same events.

Two publishers, as servers have them, store and evict the blocks of drawn prompts. Both followers
are asked how much of a prompt each has cached.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from quire.base.log import Log
from quire.cache.reporting import BlocksRemoved, BlocksStored
from quire.config.kv_events import KVEventsConfig
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.router.block_hashes import block_hashes
from quire.router.event_feed import Endpoints, EventFeed
from quire.router.event_order import Change
from quire.routing.block_sets import BlockSets
from tests.clients.test_kv_events import BLOCK_SIZE, free_port, overlaps

dynamo = pytest.importorskip("dynamo._core")

CACHE_BLOCKS = 40


class Cache:
    """The prefix cache of a server, as its events describe it."""

    def __init__(self, stack: ExitStack) -> None:
        self.endpoints = Endpoints(
            f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        )
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=self.endpoints.events,
            replay_endpoint=self.endpoints.replay,
        )
        self.publisher = KVEventPublisher(
            config, topic="kv@a:1@box", block_size=BLOCK_SIZE, report=lambda *_, **__: None
        )
        stack.callback(self.publisher.close)
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def compute(self, prompt: list[int]) -> None:
        """Store the blocks of a prompt, and evict the oldest, the last of a prompt first."""
        hashes = hashes_of(prompt)
        found = self.matched(prompt)
        for one in reversed(hashes):
            self.blocks[one] = None
            self.blocks.move_to_end(one)
        if hashes[found:]:
            parent = hashes[found - 1] if found else None
            tokens = tuple(prompt[found * BLOCK_SIZE : len(hashes) * BLOCK_SIZE])
            self.publisher.put(BlocksStored(tuple(hashes[found:]), parent, tokens))
        evicted = []
        while len(self.blocks) > CACHE_BLOCKS:
            evicted.append(self.blocks.popitem(last=False)[0])
        if evicted:
            self.publisher.put(BlocksRemoved(tuple(evicted)))

    def matched(self, prompt: list[int]) -> int:
        hashes = hashes_of(prompt)
        return next((at for at, one in enumerate(hashes) if one not in self.blocks), len(hashes))


def hashes_of(prompt: list[int]) -> list[int]:
    return block_hashes(array("i", prompt), BLOCK_SIZE)


def test_both_find_the_same_blocks() -> None:
    async def test() -> None:
        with ExitStack() as stack:
            caches = [Cache(stack) for _ in range(2)]
            service, sets = dynamo.SelectionService(), BlockSets(100_000)
            for number, cache in enumerate(caches, start=1):
                worker = {
                    "worker_id": number,
                    "model_name": "box",
                    "endpoint": f"http://127.0.0.1:{number}",
                    "block_size": BLOCK_SIZE,
                    "kv_events_endpoints": {0: cache.endpoints.events},
                    "replay_endpoint": cache.endpoints.replay,
                    "total_kv_blocks": CACHE_BLOCKS,
                    "max_num_batched_tokens": 2048,
                }
                assert (await service.upsert_worker(worker))["lifecycle"] == "schedulable"

            def apply(name: str, changes: Sequence[Change]) -> None:
                for change in changes:
                    if not change.hashes:
                        sets.clear(int(name))
                    elif change.block_size:
                        sets.store(int(name), change.hashes, change.block_size)
                    else:
                        sets.remove(int(name), change.hashes)

            feed = EventFeed(asyncio.get_running_loop(), apply, Log("router", io.StringIO()))
            stack.callback(feed.close)
            for number, cache in enumerate(caches, start=1):
                feed.follow(str(number), cache.endpoints)
            await _compare(service, sets, caches)
            service.shutdown()

    asyncio.run(test())


async def _compare(service: Any, sets: BlockSets, caches: list[Cache]) -> None:
    drawn = random.Random(11)
    stems = [[drawn.randrange(3, 400) for _ in range(160)] for _ in range(5)]
    num_partial = 0
    for turn in range(60):
        stem = drawn.choice(stems)[: drawn.randrange(20, 160)]
        prompt = stem + [drawn.randrange(3, 400) for _ in range(drawn.randrange(10, 100))]
        hashes = hashes_of(prompt)
        true = {number: cache.matched(prompt) for number, cache in enumerate(caches, start=1)}
        ended_s = time.monotonic() + 60  # events come late on a busy machine
        while True:
            theirs, found = await overlaps(service, prompt), sets.matched_tokens(hashes, BLOCK_SIZE)
            ours = {number: found.get(number, 0) // BLOCK_SIZE for number in true}
            if ours == true == theirs:
                break
            assert time.monotonic() < ended_s, (turn, ours, true, theirs)
            await asyncio.sleep(0.01)
        num_partial += sum(0 < blocks < len(hashes) for blocks in true.values())
        drawn.choice(caches).compute(prompt)
    assert num_partial > 20, "prefixes were found in part"

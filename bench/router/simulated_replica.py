"""A replica that computes nothing and has a prefix cache: uncached tokens take time.

    python -m bench.router.simulated_replica --tokens-per-s 40000 --cache-blocks 4000 --events 5557

One prompt is computed at a time, in order of arrival. Its blocks are cached, the least recently
used evicted, and both published as KV events by the publisher of the real server. GET /stats has
the tokens of all prompts, and how many of them were cached.
"""

from __future__ import annotations

import argparse
import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from bench.router.scripted_replica import ScriptedReplica, Times, serve
from quire.cache.reporting import BlocksRemoved, BlocksStored
from quire.config.kv_events import KVEventsConfig
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.router.block_hashes import block_hashes

BLOCK_SIZE = 16


class PrefixCache:
    """Blocks of prompts by their public hashes, at most `max_blocks`."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, hashes: Sequence[int]) -> tuple[int, list[int]]:
        """Find and then store a prompt; return how many blocks were there, and those evicted."""
        num_found = next(
            (at for at, one in enumerate(hashes) if one not in self._blocks), len(hashes)
        )
        for one in reversed(hashes):  # within a prompt the last are evicted first
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        evicted = list[int]()
        while len(self._blocks) > self._max_blocks:
            evicted.append(self._blocks.popitem(last=False)[0])
        return num_found, evicted


class SimulatedReplica(ScriptedReplica):
    """tokens_per_s: of prompts."""

    def __init__(
        self,
        times: Times,
        cache: PrefixCache,
        publisher: KVEventPublisher | None,
        tokens_per_s: float,
    ) -> None:
        super().__init__(times)
        self._cache = cache
        self._publisher = publisher
        self._tokens_per_s = tokens_per_s
        self._device = asyncio.Lock()
        self._prompt_tokens = self._cached_tokens = 0

    def answer(self, path: bytes) -> object:
        """See ScriptedReplica."""
        if path == b"/stats":
            return {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens}
        return super().answer(path)

    async def first_token(self, request: dict[str, Any]) -> None:
        """Compute the prompt when it is its turn."""
        tokens = request["tokens"]
        hashes = block_hashes(array("i", tokens), BLOCK_SIZE)
        async with self._device:
            num_found, evicted = self._cache.use(hashes)
            cached = min(num_found * BLOCK_SIZE, len(tokens) - 1)
            self._prompt_tokens += len(tokens)
            self._cached_tokens += cached
            await asyncio.sleep((len(tokens) - cached) / self._tokens_per_s)
            if self._publisher is not None:
                self._publish(self._publisher, tokens, hashes, num_found, evicted)

    def _publish(
        self,
        publisher: KVEventPublisher,
        tokens: list[int],
        hashes: list[int],
        num_found: int,
        evicted: list[int],
    ) -> None:
        new = hashes[num_found:]
        if new:
            publisher.put(
                BlocksStored(
                    hashes=tuple(new),
                    parent=hashes[num_found - 1] if num_found else None,
                    token_ids=tuple(tokens[num_found * BLOCK_SIZE : len(hashes) * BLOCK_SIZE]),
                )
            )
        if evicted:
            publisher.put(BlocksRemoved(tuple(evicted)))


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--tokens-per-s", type=float, default=40_000.0)
    parser.add_argument("--cache-blocks", type=int, default=4000)
    parser.add_argument("--token-ms", type=float, default=2.0)
    parser.add_argument("--events", type=int, default=0, help="port of KV events; 0: none")
    arguments = parser.parse_args()
    publisher = None
    if arguments.events:
        publisher = KVEventPublisher(
            KVEventsConfig(
                enable_kv_cache_events=True,
                endpoint=f"tcp://127.0.0.1:{arguments.events}",
                replay_endpoint=f"tcp://127.0.0.1:{arguments.events + 1}",
            ),
            topic="kv@localhost:0@scripted",
            block_size=BLOCK_SIZE,
            report=lambda what, **fields: print(what, fields),
        )

    async def go() -> None:
        times = Times(0.0, 0.0, 0.0, arguments.token_ms)
        cache = PrefixCache(arguments.cache_blocks)
        await serve(SimulatedReplica(times, cache, publisher, arguments.tokens_per_s))

    asyncio.run(go())


if __name__ == "__main__":
    main()

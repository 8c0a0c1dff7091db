"""Replicas with prefix caches in virtual time, and the router before them.

Each computes one prompt at a time, in order of arrival, and its open answers beside it. Exchanges
are those of the router's own HTTP client; only sockets are left out. What a replica has cached is
known by its history, or exactly, as its KV events would say it. Always holds: the same requests
and settings give the same times and hits.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from bench.router.simulated_replica import BLOCK_SIZE, PrefixCache
from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router.block_hashes import block_hashes
from quire.router.discovery import StaticList
from quire.router.faults import ReplicaFault
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.http_client import Exchange
from quire.router.routed_request import RoutedRequest
from quire.router.service import RouterService
from quire.router.settings import RouterSettings
from quire.routing.block_sets import BlockSets
from quire.routing.power_of_two import PowerOfTwo

_MODELS = json.dumps({"data": [{"id": "box", "system_fingerprint": "fp_a"}]}).encode()


class _Link:
    """A connection of an Exchange. is_cut: the router has given it up."""

    def __init__(self) -> None:
        self.is_cut = False

    def abort(self) -> None:
        self.is_cut = True

    def resume(self) -> None:
        """Nothing is held back here."""


class CachingReplica:
    """The part of a ConnectionPool that a fleet uses, and the server behind it.

    tokens_per_s: of prompts. token_s: between the tokens of an answer. max_answers: that are
    computed at a time; further prompts wait.
    """

    has_processes = False

    def __init__(
        self,
        number: int,
        *,
        cache_blocks: int,
        tokens_per_s: float,
        token_s: float,
        max_answers: int,
    ) -> None:
        self.url = server_url(f"http://10.0.0.{number + 1}:8000")
        self.number = number
        self.sets: BlockSets | None = None
        self.prompt_tokens = self.cached_tokens = 0
        self._cache = PrefixCache(cache_blocks)
        self._tokens_per_s, self._token_s = tokens_per_s, token_s
        self._device, self._places = asyncio.Lock(), asyncio.Semaphore(max_answers)
        self._answers = set[asyncio.Task[None]]()
        self._steps_total = 0
        self._loop = asyncio.get_running_loop()

    async def send(
        self, method: bytes, path: bytes, headers: Any, body: bytes, **options: Any
    ) -> Exchange:
        """See ConnectionPool: take a stream of POST /generate; there are no beats."""
        if method == b"GET":
            raise ReplicaFault("it answers probes and prompts only", is_suspect=False)
        exchange, link = Exchange(self._loop, may_be_stale=False), _Link()
        exchange.began(link)  # type: ignore[arg-type]
        exchange.got_head(200, [(b"content-type", b"text/event-stream")])
        answer = asyncio.ensure_future(self._answer(exchange, link, json.loads(body)))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return exchange

    async def request(self, method: bytes, path: bytes, headers: Any) -> tuple[int, bytes]:
        """See ConnectionPool: answer a probe."""
        if path == b"/v1/models":
            return 200, _MODELS
        health = {"ok": True, "state": "ready", "pending": len(self._answers)}
        return 200, json.dumps({**health, "steps_total": self._steps_total}).encode()

    def close(self) -> None:
        """Nothing is kept open."""

    async def _answer(self, exchange: Exchange, link: _Link, request: dict[str, Any]) -> None:
        async with self._places:
            async with self._device:
                await self._compute(request["tokens"])
            for number in range(request["max_tokens"]):
                if link.is_cut:
                    return
                self._steps_total += 1
                self._emit(exchange, number)
                await asyncio.sleep(self._token_s)
        exchange.got(b'data: [DONE]\n\n: {"ended":null}\n\n')
        exchange.completed()

    async def _compute(self, tokens: list[int]) -> None:
        hashes = block_hashes(array("i", tokens), BLOCK_SIZE)
        num_found, evicted = self._cache.use(hashes)
        cached = min(num_found * BLOCK_SIZE, len(tokens) - 1)
        self.prompt_tokens += len(tokens)
        self.cached_tokens += cached
        await asyncio.sleep((len(tokens) - cached) / self._tokens_per_s)
        self._steps_total += 1
        if self.sets is not None:
            self.sets.store(self.number, hashes[num_found:], BLOCK_SIZE)
            self.sets.remove(self.number, evicted)

    def _emit(self, exchange: Exchange, number: int) -> None:
        exchange.last_s = self._loop.time()
        cursor = f"gen-{'0' * 24}:1:{number + 1}:0"
        comment = b': {"output_ids":[%d],"output_cursor":"%b"}\n\n' % (number, cursor.encode())
        exchange.got(b'data: {"token":%d}\n\n' % number + comment)


class _Known:
    """The look-up of a router that knows what its replicas have; without `exact`, by its history.

    It is made with the fleet, so it also gives the fleet its replicas.
    """

    def __init__(self, fleet: Fleet, replicas: Sequence[CachingReplica], *, exact: bool) -> None:
        self._is_exact = exact
        by_name = {one.url.shown: one for one in replicas}
        fleet.pool = lambda replica: by_name[replica.name]  # type: ignore[method-assign,assignment,return-value]
        if isinstance(fleet.policy, PowerOfTwo):
            fleet.policy = PowerOfTwo(seed=1)

    async def look_up(self, request: RoutedRequest) -> None:
        """See PrefixLookUp."""
        if self._is_exact:
            ids = array("i", request.fields["tokens"])
            request.block_hashes, request.block_size = block_hashes(ids, BLOCK_SIZE), BLOCK_SIZE

    @property
    def counts(self) -> Mapping[str, int]:
        """See PrefixLookUp."""
        return {"known_blocks": 0, "kv_event_gaps": 0, "kv_event_invalid_batches": 0}

    def close(self) -> None:
        """Nothing is followed."""


class VirtualRouter:
    """The application of `quire route` before replicas in memory."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls, replicas: Sequence[CachingReplica], *, exact: bool, **settings: Any
    ) -> VirtualRouter:
        """Return a router that has probed its replicas. settings: of RouterSettings."""
        sets = BlockSets(10**6) if exact else None
        for one in replicas:
            one.sets = sets
        features = Features(
            sets=sets, make_look_up=lambda fleet: _Known(fleet, replicas, exact=exact)
        )
        discovery = StaticList(tuple(one.url for one in replicas))
        log = Log("router", _Nowhere())  # type: ignore[arg-type]
        return cls(await RouterService.open(RouterSettings(**settings), discovery, log, features))

    def policy_counts(self) -> dict[str, float]:
        """Return what the policy has counted and learned."""
        return {one.name: one.value for one in self._service.fleet.policy.counts()}

    async def first_token_s(self, num_tokens: int, prompt: list[int]) -> float:
        """Stream one answer; return the virtual time to its first token.

        Raises SystemExit if the answer is wrong.
        """
        fields = {"tokens": prompt, "max_tokens": num_tokens, "stream": True, "seed": 1}
        waiting = [{"type": "http.request", "body": json.dumps(fields).encode()}]
        pieces, began_s, first_s = list[bytes](), self._loop.time(), 0.0

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal first_s
            pieces.append(message.get("body", b""))
            if not first_s and b'"token":' in pieces[-1]:
                first_s = self._loop.time() - began_s

        scope = {
            **{"type": "http", "method": "POST", "path": "/generate", "query_string": b""},
            **{"headers": [(b"host", b"localhost")], "client": ("10.0.0.7", 5)},
        }
        await self._service.app(scope, receive, send)  # type: ignore[arg-type]
        answer = b"".join(pieces)
        if answer.count(b'"token":') != num_tokens or not answer.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"an answer is not complete: {answer[-300:]!r}")
        return first_s

    async def close(self) -> None:
        """Stop probing."""
        await self._service.close()


class _Nowhere:
    def write(self, line: str) -> int:
        return len(line)

    def flush(self) -> None:
        """Nothing is kept."""

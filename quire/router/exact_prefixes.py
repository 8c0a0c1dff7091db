"""ExactPrefixes: which replicas have how much of a prompt cached, by the KV events they publish.

The token ids of a prompt are those of the request, or come from `POST /tokenize` of a replica,
which gives exactly what the engine computes. Whatever fails or takes too long, the request is
routed by what was sent where. Always holds: a prompt with a cache_salt is not looked up, since its
blocks are not published.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.base.engine_endpoints import endpoint_of_engine
from quire.base.errors import InvalidParameter, SettingError
from quire.base.http_apis import any_key_headers
from quire.base.server_url import ServerUrl
from quire.router.block_hashes import block_hashes
from quire.router.discovery import replica_url
from quire.router.event_feed import Endpoints, EngineName, EventFeed
from quire.router.event_order import Change
from quire.router.faults import ReplicaFault
from quire.router.fleet import Fleet
from quire.router.replica import Replica
from quire.router.route_file import KVEndpointsTable, KVEventsTable
from quire.router.routed_request import RoutedRequest
from quire.router.tokenize_fields import is_tokenized, tokenize_fields
from quire.routing.block_sets import BlockSets

# Fields with which the prompt is another one, or its blocks are not published.
_NOT_LOOKED_UP = ("cache_salt", "truncate_prompt_tokens", "suffix")
_FORWARDED = (*any_key_headers(), b"host", b"origin", b"x-forwarded-for")
_MAX_TOKEN = 2**31 - 1
# Of a prompt that are looked up, so that a long one does not hold up the event loop.
_MAX_TOKENS = 65_536


class _Tokens(msgspec.Struct):
    tokens: list[int]


class ExactPrefixes:
    """sets: what replicas have, also read by the policy."""

    def __init__(self, fleet: Fleet, table: KVEventsTable, sets: BlockSets) -> None:
        self._fleet = fleet
        self._table = table
        self._sets = sets
        self._own = {_name_of(name): own for name, own in table.replicas.items()}
        self._feed = EventFeed(asyncio.get_running_loop(), self._apply, fleet.log)
        self._followed: dict[EngineName, Endpoints] = {}
        fleet.on_changed = self._follow
        fleet.on_fenced = self._begin_anew
        self._follow()
        for name in self._own.keys() - fleet.replicas.keys():
            fleet.log.warning("[kv-events] names a replica that is not there yet", replica=name)

    @property
    def counts(self) -> dict[str, int]:
        """Blocks that are known, gaps in the events, and batches that could not be read."""
        numbers = [one.number for one in self._fleet.replicas.values()]
        return {
            "known_blocks": sum(map(self._sets.num_blocks, numbers)),
            "kv_event_gaps": self._feed.num_gaps,
            "kv_event_invalid_batches": self._feed.num_invalid,
        }

    def close(self) -> None:
        """Follow no replica any more."""
        self._feed.close()

    async def look_up(self, request: RoutedRequest) -> None:
        """Set the block hashes of a request with a prompt that may be cached somewhere."""
        size = self._sets.block_size
        if not size or not is_tokenized(request.path) or not self._is_worth_it(request):
            return
        token_ids = given_ids(request.fields)
        if token_ids is None:
            token_ids = await self._tokenized(request)
        if token_ids is not None:
            request.block_hashes, request.block_size = block_hashes(token_ids, size), size
            if len(token_ids) < _MAX_TOKENS:
                request.prompt_tokens = len(token_ids)

    def _is_worth_it(self, request: RoutedRequest) -> bool:
        if request.prompt_tokens < self._table.min_prompt_tokens:
            return False
        if any(request.fields.get(name) is not None for name in _NOT_LOOKED_UP):
            return False
        return self._fleet.num_available > 1

    async def _tokenized(self, request: RoutedRequest) -> array[int] | None:
        """Ask the replica with the fewest open requests for the ids; None: in vain."""
        fleet, now_s = self._fleet, asyncio.get_running_loop().time()
        able = [
            one
            for one in fleet.replicas.values()
            if one.is_available(now_s) and one.serves(request.model)
        ]
        fields = tokenize_fields(request.path, request.fields)
        if not able or fields is None:
            return None
        replica = min(able, key=lambda one: len(one.loads))
        headers = [header for header in request.headers if header[0] in _FORWARDED]
        headers.append((b"content-type", b"application/json"))
        try:
            async with asyncio.timeout(self._table.tokenize_ms / 1000):
                status, raw = await fleet.pool(replica).request(
                    b"POST", b"/tokenize", headers, msgspec.json.encode(fields)
                )
            found = msgspec.json.decode(raw, type=_Tokens) if status == 200 else None
        except (ReplicaFault, TimeoutError, msgspec.MsgspecError):
            return None
        return None if found is None else _array(found.tokens)

    def _follow(self) -> None:
        """Follow the engines of the replicas that there are now."""
        wanted = {
            EngineName(name, number): endpoints
            for name, replica in self._fleet.replicas.items()
            for number, endpoints in enumerate(
                endpoints_of(replica.url, self._own.get(name), self._table)
            )
        }
        self._warn_of_shared(wanted)
        for name in self._followed.keys() - wanted.keys():
            self._feed.leave(name)
        for name, endpoints in wanted.items():
            if self._followed.get(name) != endpoints:
                self._feed.follow(name, endpoints)
        self._followed = wanted

    def _warn_of_shared(self, wanted: Mapping[EngineName, Endpoints]) -> None:
        """Log replicas that are new at an endpoint of another one, as on one machine."""
        names = Counter(endpoints.events for endpoints in wanted.values())
        for name, endpoints in wanted.items():
            if names[endpoints.events] > 1 and name not in self._followed:
                self._fleet.log.warning(
                    "replicas share an endpoint of KV events, so the blocks of one count for all; "
                    "name the endpoint of each in [kv-events.replicas]",
                    replica=name.replica,
                    endpoint=endpoints.events,
                )

    def _begin_anew(self, replica: Replica) -> None:
        """Forget a replica that lost its cache, and follow it from its first event on."""
        self._sets.forget(replica.number)
        for name, endpoints in self._followed.items():
            if name.replica == replica.name and name.replica in self._fleet.replicas:
                self._feed.follow(name, endpoints)

    def _apply(self, name: EngineName, changes: Sequence[Change]) -> None:
        replica, engine = self._fleet.replicas.get(name.replica), name.number
        if replica is None:
            return
        for change in changes:
            if not change.hashes:
                self._sets.clear(replica.number, engine=engine)
            elif change.block_size:
                self._sets.store(replica.number, change.hashes, change.block_size, engine=engine)
            else:
                self._sets.remove(replica.number, change.hashes, engine=engine)


def _name_of(address: str) -> str:
    """Return the name of the replica with an address. Raises SettingError."""
    try:
        url = replica_url(address)
    except InvalidParameter as error:
        raise SettingError(f"[kv-events.replicas]: {error}") from error
    return url.full


def endpoints_of(
    url: ServerUrl, own: KVEndpointsTable | None, table: KVEventsTable
) -> list[Endpoints]:
    """Return where each engine of a replica publishes: at the replica's own places, else at its
    host and the usual ports; further engines at the next ones."""
    host = f"[{url.host}]" if ":" in url.host else url.host
    events = f"tcp://{host}:{table.port}"
    replay = f"tcp://{host}:{table.replay_port}" if table.replay_port else ""
    num_engines = table.data_parallel_size
    if own is not None:
        events, replay = own.endpoint, own.replay_endpoint
        num_engines = own.data_parallel_size or num_engines
    return [
        Endpoints(
            endpoint_of_engine(events, number),
            endpoint_of_engine(replay, number) if replay else "",
            is_checked=num_engines > 1,
        )
        for number in range(num_engines)
    ]


def given_ids(fields: dict[str, Any]) -> array[int] | None:
    """Return the token ids of a request that has them in place of a text."""
    for name in ("tokens", "prompt"):
        given = fields.get(name)
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list):
            given = given[0]
        if isinstance(given, list) and given:
            return _array(given)
    return None


def _array(ids: list[Any]) -> array[int] | None:
    ids = ids[:_MAX_TOKENS]
    if not all(type(one) is int and 0 <= one <= _MAX_TOKEN for one in ids):
        return None
    return array("i", ids)

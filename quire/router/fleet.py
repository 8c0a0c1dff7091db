"""Fleet: the replicas as they are now, their connections, and the choice of one for a request.

Follows a Discovery: a replica that it no longer names gets no new requests and ends those it has.
Always holds: only available replicas are chosen; a stream that has output is continued only by a
replica of its fingerprint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from quire.base.log import Log
from quire.base.server_url import key_headers
from quire.router.discovery import Discovery
from quire.router.http_client import ConnectionPool, Headers
from quire.router.policies import make_routing_policy
from quire.router.replica import ASLEEP, REMOVED, Load, Replica
from quire.router.resumes import Resumes
from quire.router.settings import RouterSettings
from quire.routing.block_sets import BlockSets
from quire.routing.policy import RouteKey, RoutingPolicy

_MAX_NAMED = 4
# Streams that continue are divided among replicas with queues that differ by less.
SPREAD_TOKENS = 128
# With so many tokens of output to give, or the most of all, a replica counts as busy.
_BUSY_TOKENS = 4096
# States of a server that will take requests by itself.
_STARTING = ("starting", "restarting")


class Fleet:
    """replicas: by name, those that the discovery names. sets: what replicas report to have cached,
    for the policy. on_changed: called after replicas came or left. on_fenced: called with a replica
    that is fenced. on_available: called where more requests may be sent. num_waiting: requests
    without one. resumes: streams that are interrupted."""

    def __init__(
        self,
        settings: RouterSettings,
        discovery: Discovery,
        log: Log,
        sets: BlockSets | None = None,
    ) -> None:
        self.settings = settings
        self.log = log
        self.policy: RoutingPolicy = make_routing_policy(settings, sets)
        self.on_changed: Callable[[], None] = lambda: None
        self.on_fenced: Callable[[Replica], None] = lambda replica: None
        self.on_available: Callable[[], None] = lambda: None
        self.replicas: dict[str, Replica] = {}
        self._pools: dict[Replica, ConnectionPool] = {}
        self._discovery = discovery
        self._free_numbers: list[int] = []
        self._num_numbers = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        key = key_headers(settings.replica_key)
        self._key = [(name.lower().encode(), value.encode()) for name, value in key.items()]
        self.probe_now = asyncio.Event()
        self.num_waiting = 0
        self.resumes = Resumes()
        self.follow()

    def follow(self) -> None:
        """Take over the addresses of the discovery."""
        urls = {url.full: url for url in self._discovery.poll()}
        is_changed = urls.keys() != self.replicas.keys()
        for name, url in urls.items():
            if name not in self.replicas:
                number = self._free_numbers.pop() if self._free_numbers else self._num_numbers
                self._num_numbers += number == self._num_numbers
                replica = Replica(url, number)
                replica.on_fenced = self._fenced
                self.replicas[name] = replica
                self._pools[replica] = ConnectionPool(url, self.settings.connect_s)
                self.log.event("replica added", replica=name)
        for name in [name for name in self.replicas if name not in urls]:
            replica = self.replicas.pop(name)
            replica.state, replica.reason = REMOVED, "the discovery no longer names it"
            self.policy.forget(replica)
            self._free_numbers.append(replica.number)
            self.log.event("replica removed", replica=name, open=len(replica.loads))
        if is_changed:
            self.on_changed()

    def leaving(self) -> list[Replica]:
        """Return removed replicas with open requests; forget those without."""
        removed = [one for one in self._pools if one.state == REMOVED]
        for replica in removed:
            if not replica.loads:
                self._pools.pop(replica).close()
        return [one for one in removed if one.loads]

    def pool(self, replica: Replica) -> ConnectionPool:
        """Return the connections to a replica."""
        pool = self._pools.get(replica)
        if pool is None:
            pool = self._pools[replica] = ConnectionPool(replica.url, self.settings.connect_s)
        return pool

    def own_headers(self, replica: Replica) -> Headers:
        """Return the headers of requests of the router itself to a replica."""
        return [(b"host", replica.url.authority), *self._key]

    def choose(
        self,
        key: RouteKey,
        model: str,
        *,
        fingerprint: str = "",
        exclude: Collection[Replica] = (),
        max_long: int | None = None,
        spreads: bool = False,
    ) -> Replica | None:
        """Return the replica for a request; None if none is available.

        fingerprint: that it must have; "" for any. exclude: those that were tried. max_long: of the
        long prompts that it computes, with this one; None for any number. spreads: only those with
        the shortest queues of prompts: many streams that continue at once are divided, and none
        waits behind all others. One that has the beginning of the prompt may have as many tokens
        more as that spares.
        """
        now_s = self._loop.time()
        able = [
            one
            for one in self.replicas.values()
            if one not in exclude
            and one.is_available(now_s)
            and one.serves(model)
            and (not fingerprint or one.fingerprint(model) == fingerprint)
            and (max_long is None or one.num_long < max_long)
        ]
        able = [one for one in able if one.state != ASLEEP] or able
        if spreads and len(able) > 1:
            able = self._with_short_queue(able, key)
        return self.policy.choose(able, key) if able else None

    def _with_short_queue(self, able: list[Replica], key: RouteKey) -> list[Replica]:
        """Return the replicas with the fewest prompt tokens to compute, with those of this request;
        of two that differ by little, both. A busy replica counts as half as fast as one without
        output to give: one that has just started takes two thirds of what both get, and the next
        failure interrupts fewer streams at once."""
        busiest = max(_BUSY_TOKENS, *(one.expected_tokens for one in able))
        queues = [one.queued_tokens * (1 + one.expected_tokens / busiest) for one in able]
        most = min(queues) + SPREAD_TOKENS
        idle = [one for one, queue in zip(able, queues, strict=True) if queue <= most]
        if len(idle) == len(able):
            return able
        warm = self.policy.choose(able, key)
        spared_tokens = key.prompt_tokens - self.policy.new_tokens(warm, key)
        return [warm] if queues[able.index(warm)] <= most + spared_tokens else idle

    def weigh(self, replica: Replica, key: RouteKey, load: Load) -> None:
        """Note what a request has computed at a replica, before it is sent there."""
        output_tokens = max(load.prompt_tokens - key.prompt_tokens, 0)  # of a stream that continues
        load.new_tokens = self.policy.new_tokens(replica, key) + output_tokens
        load.ahead_tokens = replica.queued_tokens

    def note_first_token(self, replica: Replica, load: Load, seconds: float) -> None:
        """Let the policy learn from a first token, before it is counted as output."""
        if self.replicas.get(replica.name) is replica:  # else its number is another's
            self.policy.note_first_token(replica, load.new_tokens, load.ahead_tokens, seconds)

    def equals(self, replica: Replica) -> list[Replica]:
        """Return the others that take requests and give the same answers."""
        models = replica.models.items()
        return [
            one
            for one in self.replicas.values()
            if one is not replica and one.is_up and (not models or one.models.items() & models)
        ]

    def has_fingerprint(self, model: str, fingerprint: str) -> bool:
        """Return whether a replica of this fingerprint is known, available or not."""
        return any(one.fingerprint(model) == fingerprint for one in self.replicas.values())

    def context_tokens(self, models: Collection[str]) -> int:
        """Return the shortest context of these models; 0 where it is not known."""
        found = [
            entry.get("max_model_len")
            for one in self.replicas.values()
            for entry in one.model_entries
            if entry.get("id") in models
        ]
        return min((length for length in found if type(length) is int), default=0)

    def knows(self, model: str) -> bool:
        """Return whether any replica serves `model`, or what replicas serve is not known yet."""
        replicas = self.replicas.values()
        return not replicas or any(one.serves(model) or not one.models for one in replicas)

    def is_served(self, model: str, exclude: Collection[Replica] = ()) -> bool:
        """Return whether an available replica serves `model`."""
        now_s = self._loop.time()
        return any(
            one.serves(model) and one not in exclude and one.is_available(now_s)
            for one in self.replicas.values()
        )

    def why_none(self) -> str:
        """Return why no replica takes requests, and what to do."""
        replicas = list(self.replicas.values())
        if not replicas:
            return "none is known; replicas join by themselves once the discovery names them"
        states = [
            f"{one.name} {one.state}" + (f": {one.reason}" if one.reason else "")
            for one in replicas[:_MAX_NAMED]
        ]
        if len(replicas) > _MAX_NAMED:
            states.append(f"{len(replicas) - _MAX_NAMED} more")
        advice = f"each is probed every {self.settings.probe_s:g} s and joins by itself"
        down = next((one for one in replicas if one.state == "unreachable"), None)
        if down is not None:
            port = down.url.port_number
            advice += f": start it on its machine, as in `quire serve --port {port}`"
        return f"{'; '.join(states)}; {advice}"

    def suspect(self, replica: Replica) -> None:
        """Send nothing more to a replica until a probe, which comes at once, has checked it."""
        if replica.is_fenced:  # one failure has many requests
            replica.breaker.gave_up()
        else:
            replica.breaker.failed(self._loop.time())
            replica.failed()
            replica.reason = "a request failed; it is checked"
        self.probe_now.set()

    def recheck_models(self, replica: Replica) -> None:
        """Send nothing more to a replica with answers of another fingerprint until its models were
        read again. Its open requests go on: each has an answer of one fingerprint."""
        if replica.state == REMOVED:
            return  # its number may be that of another one
        self.log.warning("models of a replica changed", replica=replica.name)
        self.policy.forget(replica)
        replica.models = {}  # what is read next is no change
        replica.failed()
        replica.reason = "its answers have another fingerprint; it is checked"
        self.probe_now.set()

    def became_available(self) -> None:
        """Wake those that wait for a replica."""
        self.on_available()
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request that waits for a replica."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def wait_for_change(self, limit_s: float) -> None:
        """Wait until a replica became available, at most so long."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait({future}, timeout=limit_s)
        finally:
            self._waiting.discard(future)
            future.cancel()

    @property
    def num_available(self) -> int:
        """Replicas that take requests."""
        now_s = self._loop.time()
        return sum(one.is_available(now_s) for one in self.replicas.values())

    def close(self) -> None:
        """Close kept connections."""
        for pool in self._pools.values():
            pool.close()

    def _fenced(self, replica: Replica) -> None:
        now_s = self._loop.time()
        self.policy.forget(replica)
        self.on_fenced(replica)
        self.pool(replica).close()
        state, reason = replica.state, replica.reason
        if not (replica.was_used or replica.loads):
            write = self.log.event if state in _STARTING else self.log.warning
            write("replica takes no requests yet", replica=replica.name, state=state, reason=reason)
            return
        self.log.warning(
            "replica fenced",
            replica=replica.name,
            state=state,
            reason=reason,
            open=len(replica.loads),
            others=sum(one.is_available(now_s) for one in self.equals(replica)),
        )

"""Sleepers: replicas that share a machine's memory take turns: at most some of them are awake.

A request for a replica that sleeps wakes it, after the least recently used ones without open
requests were put to sleep to make room. So are those that are too many because they started awake.
Replicas sleep and wake by `POST /admin/sleep` and `/admin/wake`. Always holds: a replica with open
requests is not put to sleep; while one is woken, no other is, also where the request that wakes it
waits no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.base.server_url import key_headers
from quire.router.faults import ClientGone, Refusal, ReplicaFault
from quire.router.fleet import Fleet
from quire.router.replica import ASLEEP, Replica
from quire.router.route_file import SleepTable

_CHECK_S = 0.25
# Replicas that are awake are counted each second. One that does not sleep is asked again after so
# long.
_COUNT_S, _AGAIN_S = 1.0, 10.0


class Sleepers:
    """num_woken: so far."""

    def __init__(self, table: SleepTable) -> None:
        self._table = table
        self._turn = asyncio.Lock()
        self._waking: set[asyncio.Task[None]] = set()
        self.num_woken = 0

    async def run(self, fleet: Fleet) -> None:
        """Put idle replicas to sleep while too many are awake."""
        loop = asyncio.get_running_loop()
        refusing, again_s = set[Replica](), loop.time() + _AGAIN_S
        while True:
            async with self._turn:
                awake = _awake(fleet)
                num_surplus = len(awake) - self._table.max_awake
                for victim in _idle_by_use(awake, refusing)[: max(num_surplus, 0)]:
                    await self._put_to_sleep(fleet, victim, refusing)
            await asyncio.sleep(_COUNT_S)
            if loop.time() >= again_s:
                refusing, again_s = set(), loop.time() + _AGAIN_S

    async def wake(self, fleet: Fleet, replica: Replica, is_gone: Callable[[], bool]) -> None:
        """Wake a replica once there is room. Raises ReplicaFault, Refusal and ClientGone.

        A caller that is cancelled, as by its deadline, gives up its place; a replica that is being
        woken or put to sleep by then keeps the turn until it is.
        """
        is_over = False
        waking = asyncio.ensure_future(self._wake(fleet, replica, lambda: is_over or is_gone()))
        self._waking.add(waking)
        waking.add_done_callback(self._waking.discard)
        try:
            await asyncio.shield(waking)
        finally:
            is_over = True

    async def _wake(self, fleet: Fleet, replica: Replica, is_gone: Callable[[], bool]) -> None:
        async with self._turn:
            if replica.state != ASLEEP:
                return
            await self._make_room(fleet, replica, is_gone)
            status = await self._post(fleet, replica, b"/admin/wake")
            if status != 200:
                raise ReplicaFault(f"it does not wake ({status})", is_suspect=False)
            self.num_woken += 1
            if replica.state == ASLEEP:
                replica.state = "ready"
            fleet.became_available()

    async def _make_room(self, fleet: Fleet, replica: Replica, is_gone: Callable[[], bool]) -> None:
        table, loop = self._table, asyncio.get_running_loop()
        until_s, refusing = loop.time() + table.max_wait_seconds, set[Replica]()
        while True:
            if is_gone():
                raise ClientGone("the client has closed its connection")
            awake = [one for one in _awake(fleet) if one is not replica]
            if len(awake) < table.max_awake:
                return
            if idle := _idle_by_use(awake, refusing):
                await self._put_to_sleep(fleet, idle[0], refusing)
                continue
            if len(refusing) == len(awake):
                raise Refusal(
                    503,
                    "no_replica",
                    f"{replica.name} sleeps, and no other replica can be put to sleep for it; "
                    "start replicas with --restart-engine, and give the router an admin's key "
                    "(--replica-key-file)",
                )
            left_s = until_s - loop.time()
            if left_s <= 0:
                raise Refusal(
                    503,
                    "overloaded",
                    f"{replica.name} sleeps, and the {len(awake)} replicas that are awake were "
                    f"busy for {table.max_wait_seconds:g} s (max-awake of [sleep]); try again "
                    "later",
                    retry_after_s=table.max_wait_seconds,
                )
            await fleet.wait_for_change(min(left_s, _CHECK_S))

    async def _put_to_sleep(self, fleet: Fleet, victim: Replica, refusing: set[Replica]) -> None:
        state, victim.state = victim.state, ASLEEP  # gets no request meanwhile
        try:
            status = await self._post(fleet, victim, b"/admin/sleep")
        except ReplicaFault as fault:
            status = 0
            fleet.log.warning("replica not put to sleep", replica=victim.name, reason=str(fault))
        if status != 200:
            victim.state = state
            refusing.add(victim)
            fleet.log.warning("replica does not sleep", replica=victim.name, status=status)
            return
        fleet.policy.forget(victim)  # its cache is gone
        fleet.log.event("replica sleeps", replica=victim.name)

    async def _post(self, fleet: Fleet, replica: Replica, path: bytes) -> int:
        """Return the status of a POST without a body. Raises ReplicaFault."""
        given = key_headers(fleet.settings.replica_key)
        headers = [(name.lower().encode(), value.encode()) for name, value in given.items()]
        headers.append((b"host", replica.url.shown.partition("//")[2].encode()))
        try:
            async with asyncio.timeout(self._table.max_wait_seconds):
                exchange = await fleet.pool(replica).send(
                    b"POST", path, headers, b"", is_fresh=True
                )
                try:
                    await exchange.head()
                    await exchange.body()
                    return exchange.status
                finally:
                    exchange.close()
        except TimeoutError:
            raise ReplicaFault("it does not answer in time", is_suspect=False) from None


def _awake(fleet: Fleet) -> list[Replica]:
    return [one for one in fleet.replicas.values() if one.state == "ready" and not one.is_fenced]


def _idle_by_use(awake: list[Replica], refusing: set[Replica]) -> list[Replica]:
    """Return those without open requests; of several that were never used, the last named first."""
    idle = [one for one in reversed(awake) if not one.loads and one not in refusing]
    return sorted(idle, key=lambda one: one.used_s)

"""Sleepers: replicas that share a machine's memory take turns: at most some of them are awake.

A request for a replica that sleeps wakes it, after the least recently used ones without open
requests were put to sleep to make room. Surplus replicas that started awake are put to sleep as
well. Replicas sleep and wake by `POST /admin/sleep` and `/admin/wake`. Knows no requests of other
routers. Always holds: a replica with open requests is not put to sleep; while one is woken, no
other is, also where the request that wakes it waits no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container

from quire.router.faults import ClientGone, Refusal, ReplicaFault
from quire.router.fleet import Fleet
from quire.router.replica import ASLEEP, Replica
from quire.router.route_file import SleepTable

_CHECK_S = 0.25
# Replicas that are awake are counted each second. One that did not sleep is asked again after so
# long. After a start, streams of the router before this one may be open for as long.
_COUNT_S, _AGAIN_S = 1.0, 10.0


class Sleepers:
    """num_woken: so far."""

    def __init__(self, table: SleepTable) -> None:
        self._table = table
        self._turn = asyncio.Lock()
        self._waking: set[asyncio.Task[None]] = set()
        self._warned: set[Replica] = set()  # of those that do not sleep
        self.num_woken = 0

    async def run(self, fleet: Fleet) -> None:
        """Put idle replicas to sleep while too many are awake."""
        loop, again_s = asyncio.get_running_loop(), dict[Replica, float]()
        await asyncio.sleep(_AGAIN_S)
        while True:
            async with self._turn:  # of one replica at a time: requests wake others in between
                awake, now_s = _awake(fleet), loop.time()
                again_s = {one: at_s for one, at_s in again_s.items() if at_s > now_s}
                is_surplus = len(awake) > self._table.max_awake
                idle = _idle_by_use(awake, again_s) if is_surplus else []
                if idle and not await self._put_to_sleep(fleet, idle[0]):
                    again_s[idle[0]] = loop.time() + _AGAIN_S
            self._warned.intersection_update(fleet.replicas.values())
            if not idle:
                await asyncio.sleep(_COUNT_S)

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
                raise ClientGone
            awake = [one for one in _awake(fleet) if one is not replica]
            if len(awake) < table.max_awake:
                return
            if idle := _idle_by_use(awake, refusing):
                if not await self._put_to_sleep(fleet, idle[0]):
                    refusing.add(idle[0])
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
                )
            await fleet.wait_for_change(min(left_s, _CHECK_S))

    async def _put_to_sleep(self, fleet: Fleet, victim: Replica) -> bool:
        """Return whether it sleeps. It gets no request meanwhile."""
        state, victim.state = victim.state, ASLEEP
        try:
            status = await self._post_unless_fenced(fleet, victim, b"/admin/sleep")
            reason = f"status {status}"
        except ReplicaFault as fault:
            status, reason = 0, str(fault)
        # A probe from before may say that it is awake; what else has changed its state stays.
        is_ours = victim.state in (ASLEEP, state) and not victim.is_fenced
        if status != 200:
            if is_ours:
                victim.state = state
            if victim not in self._warned:
                self._warned.add(victim)
                fleet.log.warning("replica does not sleep", replica=victim.name, reason=reason)
            return False
        self._warned.discard(victim)
        if is_ours:
            victim.state = ASLEEP
            fleet.policy.forget(victim)  # its cache is gone
        fleet.log.event("replica sleeps", replica=victim.name)
        return True

    async def _post_unless_fenced(self, fleet: Fleet, replica: Replica, path: bytes) -> int:
        """As _post; raises ReplicaFault, too, once the replica is fenced."""
        posting = asyncio.ensure_future(self._post(fleet, replica, path))
        try:
            while not posting.done():
                await asyncio.wait({posting}, timeout=_CHECK_S)
                if replica.is_fenced and not posting.done():
                    raise ReplicaFault(f"it is {replica.state}", is_suspect=False)
            return posting.result()
        finally:
            posting.cancel()

    async def _post(self, fleet: Fleet, replica: Replica, path: bytes) -> int:
        """Return the status of a POST without a body. Raises ReplicaFault."""
        headers, pool = fleet.own_headers(replica), fleet.pool(replica)
        try:
            async with asyncio.timeout(self._table.max_wait_seconds):
                status, _ = await pool.request(b"POST", path, headers, is_fresh=True)
                return status
        except TimeoutError:
            raise ReplicaFault("it does not answer in time", is_suspect=False) from None


def _awake(fleet: Fleet) -> list[Replica]:
    return [one for one in fleet.replicas.values() if one.state == "ready" and not one.is_fenced]


def _idle_by_use(awake: list[Replica], refusing: Container[Replica]) -> list[Replica]:
    """Return those without open requests; of several that were never used, the last named first."""
    idle = [one for one in reversed(awake) if not one.loads and one not in refusing]
    return sorted(idle, key=lambda one: one.used_s)

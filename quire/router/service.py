"""RouterService: a router without a listener: its application, its prober and its discovery.

    service = await RouterService.open(settings, discovery, log, features)
    ... serve service.app ...
    await service.drain()
    await service.close()

Knows no signal, no socket and no process. Always holds: replicas are probed from `open` to `close`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from quire.base.log import Log
from quire.router.admission import Admission
from quire.router.app import RouterApp
from quire.router.discovery import Discovery
from quire.router.features import Features, PrefixLookUp
from quire.router.fleet import Fleet
from quire.router.prefill_pairs import PrefillPairs
from quire.router.prober import Prober
from quire.router.role_balance import MovableServers, RoleBalance
from quire.router.router_metrics import RouterMetrics
from quire.router.settings import RouterSettings

# Open requests have so long to write their last events once they are ended.
LAST_EVENTS_S = 2.0
_IDLE_CHECK_S = 0.05


class RouterService:
    """app: the ASGI application. probing: done only where the prober, or what runs beside
    it, has failed."""

    def __init__(
        self,
        settings: RouterSettings,
        discovery: Discovery,
        log: Log,
        features: Features,
        prefill: Discovery | None = None,
        movable: MovableServers | None = None,
    ) -> None:
        self._settings = settings
        self._log = log
        self.fleet = Fleet(settings, discovery, log, features.sets)
        self._fleets = [self.fleet]
        self._admission = Admission(self.fleet)
        for cascade in features.cascades.values():
            cascade.report_to(log)
        metrics = RouterMetrics(self.fleet)
        waiting = "Requests without an available replica"
        metrics.watch("waiting_requests", waiting, lambda: self.fleet.num_waiting)
        self._sleepers = features.sleepers
        self._prefixes = _follow_prefixes(features, self.fleet, metrics)
        look_up = None if self._prefixes is None else self._prefixes.look_up
        hand_over, self._balance = None, None
        if prefill is not None:
            pairs = PrefillPairs(
                Fleet(settings, prefill, log), metrics, min_tokens=settings.min_prefill_tokens
            )
            self._fleets.append(pairs.fleet)
            hand_over = pairs.hand_over
            if movable is not None:
                self._balance = _new_balance(settings, self.fleet, pairs.fleet, movable, metrics)
        self.app = RouterApp(
            self.fleet, self._admission, metrics, log, features, hand_over, look_up
        )
        self._watching = asyncio.ensure_future(discovery.watch(self.fleet.probe_now.set))
        self._watching.add_done_callback(self._check_watch)

    @classmethod
    async def open(
        cls,
        settings: RouterSettings,
        discovery: Discovery,
        log: Log,
        features: Features | None = None,
        prefill: Discovery | None = None,
        movable: MovableServers | None = None,
    ) -> RouterService:
        """Read the discovery, probe each replica once, and go on probing.

        prefill: replicas that compute prompts for the others. movable: those that both discoveries
        divide among themselves.
        """
        await discovery.read()
        service = cls(settings, discovery, log, features or Features(), prefill, movable)
        await service._begin_probing()
        return service

    async def _begin_probing(self) -> None:
        # A prompt that no prefill replica computes is computed by the replica that answers.
        probers = [Prober(one, can_do_without=one is not self.fleet) for one in self._fleets]
        await asyncio.gather(*(prober.first_round() for prober in probers))
        running = [("the prober", prober.run()) for prober in probers]
        if self._balance is not None:
            running.append(("the balance of roles", self._balance.run()))
        if self._sleepers is not None:
            running.append(("[sleep]", self._sleepers.run(self.fleet)))
        self._tasks = [asyncio.create_task(one, name=name) for name, one in running]
        self.probing: asyncio.Future[Any] = asyncio.gather(*self._tasks)

    def why_ended(self) -> str:
        """Return which task has ended `probing`, and by which error."""
        ended = (one for one in self._tasks if one.done() and not one.cancelled())
        return "; ".join(f"{one.get_name()}: {one.exception()!r}" for one in ended)

    async def drain(self) -> float:
        """Refuse new requests, let open ones end within the grace time, then end them; return when
        that time is over."""
        admission, grace_s = self._admission, self._settings.grace_s
        over_s = asyncio.get_running_loop().time() + grace_s
        admission.is_draining = True
        self._log.event("draining", grace_s=grace_s, open=admission.num_open)
        await self._wait_until_idle(grace_s)
        if admission.num_open:
            self._log.warning(
                "grace time is over; open requests are ended", open=admission.num_open
            )
            self.app.cut.set_result(None)
            await self._wait_until_idle(LAST_EVENTS_S)
        self._log.event("stopped")
        return over_s

    async def close(self) -> None:
        """Stop probing and close kept connections."""
        tasks = (*self._tasks, self.probing, self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for fleet in self._fleets:
            fleet.close()
        if self._prefixes is not None:
            self._prefixes.close()

    async def _wait_until_idle(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while self._admission.num_open and loop.time() < until_s:
            await asyncio.sleep(_IDLE_CHECK_S)

    def _check_watch(self, task: asyncio.Task[None]) -> None:
        """Log that a discovery failed; the last addresses stay."""
        if not task.cancelled() and task.exception() is not None:
            reason = str(task.exception())
            self._log.error("the discovery ended; replicas stay as they are", reason=reason)


def _follow_prefixes(
    features: Features, fleet: Fleet, metrics: RouterMetrics
) -> PrefixLookUp | None:
    """Follow the KV events of the replicas, where that is configured."""
    if features.make_look_up is None:
        return None
    prefixes = features.make_look_up(fleet)
    for name, text in (
        ("known_blocks", "KV blocks of all replicas, by their events"),
        ("kv_event_gaps", "Gaps in the KV events of the replicas"),
        ("kv_event_invalid_batches", "Batches of KV events that could not be read"),
    ):
        metrics.watch(name, text, lambda name=name: prefixes.counts[name])  # type: ignore[misc]
    return prefixes


def _new_balance(
    settings: RouterSettings,
    decode: Fleet,
    prefill: Fleet,
    movable: MovableServers,
    metrics: RouterMetrics,
) -> RoleBalance:
    balance = RoleBalance(decode, prefill, movable, hold_s=settings.role_hold_s)
    metrics.watch("role_changes", "Servers that changed their role", lambda: balance.num_changes)
    return balance

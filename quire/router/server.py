"""The router's process: start, serve, drain, exit code.

A first signal drains: new requests are refused, open ones may end within the grace time, and are
then ended with an error. A second ends at once. HTTP is uvicorn's; replicas are probed beside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from quire.base.log import Log
from quire.router.admission import Admission
from quire.router.app import RouterApp
from quire.router.discovery import Discovery
from quire.router.features import Features, PrefixLookUp
from quire.router.fleet import Fleet
from quire.router.head_bounds import BoundedHeads
from quire.router.prefill_pairs import PrefillPairs
from quire.router.prober import Prober
from quire.router.role_balance import MovableServers, RoleBalance
from quire.router.router_metrics import RouterMetrics
from quire.router.settings import RouterSettings

_LAST_EVENTS_S = 2.0
_IDLE_CHECK_S = 0.05


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    settings: RouterSettings,
    discovery: Discovery,
    listening: socket.socket,
    log: Log,
    announce: Callable[[int], None],
    features: Features,
    prefill: Discovery | None = None,
    movable: MovableServers | None = None,
) -> int:
    """Serve until a signal; return the exit code. announce: called with the number of available
    replicas once requests are accepted. prefill: replicas that compute prompts for the others.
    movable: those that both discoveries divide among themselves."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            _serve(settings, discovery, listening, log, announce, features, prefill, movable)
        )


async def _serve(
    settings: RouterSettings,
    discovery: Discovery,
    listening: socket.socket,
    log: Log,
    announce: Callable[[int], None],
    features: Features,
    prefill: Discovery | None,
    movable: MovableServers | None,
) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    await discovery.read()
    fleet = Fleet(settings, discovery, log, features.sets)
    admission, metrics = Admission(fleet), RouterMetrics(fleet)
    prefixes = _follow_prefixes(features, fleet, metrics)
    pairs = None
    if prefill is not None:
        tokens = settings.min_prefill_tokens
        pairs = PrefillPairs(Fleet(settings, prefill, log), metrics, min_tokens=tokens)
    hand_over = None if pairs is None else pairs.hand_over
    look_up = None if prefixes is None else prefixes.look_up
    app = RouterApp(fleet, admission, metrics, log, features, hand_over, look_up)
    server = _Server(_uvicorn_config(app))

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    probers = [Prober(one) for one in (fleet, *([pairs.fleet] if pairs else []))]
    await asyncio.gather(*(prober.first_round() for prober in probers))
    running = [prober.run() for prober in probers]
    if movable is not None and pairs is not None:
        balance = RoleBalance(fleet, pairs.fleet, movable, hold_s=settings.role_hold_s)
        running.append(balance.run())
        metrics.watch(
            "role_changes", "Servers that changed their role", lambda: balance.num_changes
        )
    probing: asyncio.Future[Any] = asyncio.gather(*running)
    watching = asyncio.ensure_future(discovery.watch(fleet.probe_now.set))
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    if not fleet.num_available:
        log.warning("no replica is available yet", reason=fleet.why_none())
    announce(fleet.num_available)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        watching.add_done_callback(lambda task: _check_watch(task, log))
        await asyncio.wait({stopped, serving, probing}, return_when=asyncio.FIRST_COMPLETED)
        if probing.done():
            log.error("the prober ended", reason=str(probing.exception()))
            return 1
        if serving.done():
            log.error("the HTTP server ended by itself")
            return 1
        await _drain(admission, app, log, settings.grace_s)
        return 0
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=_LAST_EVENTS_S)
        tasks = (probing, watching, serving, stopped)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        fleet.close()
        if prefixes is not None:
            prefixes.close()
        if pairs is not None:
            pairs.fleet.close()


def _uvicorn_config(app: RouterApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHeads,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


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


def _check_watch(task: asyncio.Task[None], log: Log) -> None:
    """Log that a discovery failed; the last addresses stay."""
    if not task.cancelled() and task.exception() is not None:
        log.error("the discovery ended; replicas stay as they are", reason=str(task.exception()))


async def _drain(admission: Admission, app: RouterApp, log: Log, grace_s: float) -> None:
    """Let open requests end within the grace time, then end them."""
    admission.is_draining = True
    log.event("draining", grace_s=grace_s, open=admission.num_open)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + grace_s
    while admission.num_open and loop.time() < until_s:
        await asyncio.sleep(_IDLE_CHECK_S)
    if admission.num_open:
        log.warning("grace time is over; open requests are ended", open=admission.num_open)
        app.cut.set_result(None)
        until_s = loop.time() + _LAST_EVENTS_S
        while admission.num_open and loop.time() < until_s:
            await asyncio.sleep(_IDLE_CHECK_S)
    log.event("stopped")

"""Ingress: the router of `quire route` as the ASGI application of a Ray Serve deployment.

It sends requests to the engines' own ports and continues the streams of engines that die, stop or
drain. Knows Ray as two functions: one reads the addresses of the engines, one asks Serve for an
engine. Always holds: while requests wait for an engine, Serve is asked for one; a request without
a key makes no engine start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from quire.base.log import Log
from quire.deploy.ray_serve.app_args import AppArgs
from quire.deploy.ray_serve.directory_discovery import DirectoryDiscovery
from quire.deploy.ray_serve.wake_keys import WakeKeys
from quire.router.faults import Refusal
from quire.router.features import features_of
from quire.router.quotas import LocalBuckets, Quotas
from quire.router.service import RouterService

_NO_KEY = Refusal(
    401, "invalid_api_key", "the API key is missing or not known; send Authorization: Bearer KEY"
)
_CHECK_S = 0.1
_ASK_S = 30.0


class Ingress:
    """read_addresses: of the engines. ask_for_engine: returns once Serve has one."""

    def __init__(
        self,
        args: AppArgs,
        read_addresses: Callable[[], Awaitable[Sequence[str]]],
        ask_for_engine: Callable[[], Awaitable[Any]],
    ) -> None:
        self._args = args
        self._read_addresses = read_addresses
        self._ask_for_engine = ask_for_engine
        self._log = Log("router")
        self._wake_keys = WakeKeys(args, self._log)
        self._service: RouterService | None = None
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the directory, probe the engines, and accept requests."""
        file = self._args.route_file()
        quotas = None
        if file.quotas is not None or file.tenants:
            # Each router allows its part of a quota.
            buckets = LocalBuckets(time.monotonic, self._args.num_routers)
            quotas = Quotas(file.quotas, file.tenants, buckets)
        discovery = DirectoryDiscovery(self._read_addresses, self._log, time.monotonic)
        settings = self._args.router_settings(self._args.replica_key())
        features = features_of(file, quotas)
        self._service = await RouterService.open(settings, discovery, self._log, features)
        self._asking = asyncio.create_task(self._ask_while_requests_wait())

    async def stop(self) -> None:
        """Drain, and stop probing."""
        if self._service is None or self._asking is None:
            return
        await self._service.drain()
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)
        service, self._service = self._service, None
        await service.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; `start` and `stop` do what a lifespan would."""
        if scope["type"] == "lifespan":
            for answer in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
                await receive()
                await send({"type": answer})
            return
        if self._service is None:
            raise RuntimeError("the router is not started, or has stopped")
        may_wait = scope["method"] == "POST" and not self._service.fleet.num_available
        if may_wait and not self._wake_keys.accept(scope["headers"]):
            await self._service.app.refuse(scope, receive, send, _NO_KEY)
            return
        await self._service.app(scope, receive, send)

    def check(self) -> None:
        """Raise RuntimeError where the router must be replaced."""
        if self._service is not None and self._service.probing.done():
            raise RuntimeError(f"a task of the router has ended: {self._service.why_ended()}")

    async def _ask_while_requests_wait(self) -> None:
        """Call the engines' deployment while requests wait: Serve counts calls that wait, and
        starts a first engine for them."""
        while True:
            await asyncio.sleep(_CHECK_S)
            if self._service is None or not self._service.fleet.num_waiting:
                continue
            try:
                async with asyncio.timeout(_ASK_S):
                    await self._ask_for_engine()
            except TimeoutError:  # it waits still, or went to an engine that is stopped
                continue
            except Exception as error:  # noqa: BLE001  Ray's errors have no common class
                self._log.warning("no engine could be asked for", reason=str(error))
                await asyncio.sleep(1.0)
            self._service.fleet.probe_now.set()

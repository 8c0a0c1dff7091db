"""`quire lease URL --redis URL`: hold the lease of a server, by which routers find it.

Runs beside the server and holds the lease until a signal; then it gives the lease up, so that
routers send nothing new. Checks no health: routers do.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from quire.base.errors import InvalidParameter, SettingError
from quire.base.log import Log
from quire.router.discovery import replica_url
from quire.router.redis_leases import LEASE_S, PUT_TIMEOUT_S, hold_lease
from quire.router.redis_link import RedisLink


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("url", metavar="URL", help="address of the server, as routers reach it")
    parser.add_argument(
        "--redis", metavar="URL", required=True, help="as in redis://127.0.0.1:6379/0"
    )
    parser.add_argument("--prefix", default="quire:", help="of the keys in Redis (default quire:)")


def run(arguments: argparse.Namespace) -> int:
    """Hold the lease until a signal. Raises SettingError."""
    try:
        url = replica_url(arguments.url)
    except InvalidParameter as error:
        raise SettingError(str(error)) from error
    log = Log("lease")
    link = RedisLink(arguments.redis, PUT_TIMEOUT_S)
    return asyncio.run(_hold(link, arguments.prefix, url.full, log))


async def _hold(link: RedisLink, prefix: str, address: str, log: Log) -> int:
    holding = asyncio.ensure_future(hold_lease(link, prefix, address, log))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, holding.cancel)
    log.event("holding the lease", address=address, lease_s=LEASE_S)
    await asyncio.wait({holding})
    await link.close()
    if not holding.cancelled():
        log.error("the lease is no longer held", reason=str(holding.exception()))
        return 1
    return 0

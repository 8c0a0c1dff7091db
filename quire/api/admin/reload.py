"""What a server reads again while it runs: tenants, admins' keys, the certificate.

Each is taken up whole or not at all: what is wrong in a file is told in the log, and what was known
stays. Knows no route. Always holds: reading again ends no server and no request, and where there
is nothing to read again that is said.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.api.http.sockets import check_tls
from quire.api.server_state import ServerState
from quire.base.errors import SettingError
from quire.base.log import Log
from quire.config.admin_keys import read_admin_keys
from quire.config.tenants import Tenant, needs_restart

# How often files that are watched are looked at.
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadSource:
    """Something that can be read again. watched: a file whose change is enough."""

    again: Callable[[], Awaitable[None]]
    watched: str | None = None


class Reloader:
    """Reads `sources` again, one at a time. Made and used in the event loop's thread."""

    def __init__(self, log: Log, sources: Sequence[ReloadSource]) -> None:
        self._log, self._sources = log, sources
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Future[None]] = set()

    def all(self) -> None:
        """Begin to read everything again."""
        if not self._sources:
            self._log.event("there is nothing to read again (no tenants, admin keys, certificate)")
        for source in self._sources:
            self._begin(self._read(source))

    def watch(self) -> None:
        """From now on files that change are read again."""
        for source in self._sources:
            if source.watched is not None:
                self._begin(self._look(source, source.watched))

    def close(self) -> None:
        """Read nothing more."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, source: ReloadSource) -> None:
        async with self._turn:
            await source.again()

    async def _look(self, source: ReloadSource, file: str) -> None:
        known = await asyncio.to_thread(_mark_of, file)
        while True:
            await asyncio.sleep(_LOOK_S)
            mark = await asyncio.to_thread(_mark_of, file)
            if mark != known and mark is not None:
                known = mark
                await self._read(source)


def sources_of(
    serving: ServerState,
    *,
    read_tenants: Callable[[], Sequence[Tenant]] | None,
    tenants_file: str | None,
    contexts: Sequence[ssl.SSLContext],
) -> list[ReloadSource]:
    """What a server with this configuration can read again. contexts: of the listeners with TLS."""
    config, found = serving.config, []
    if read_tenants is not None:
        read = read_tenants
        found.append(
            ReloadSource(again=lambda: reload_tenants(serving, read), watched=tenants_file)
        )
    if config.admin_key_file is not None:
        again = ReloadSource(
            again=lambda: reload_admin_keys(serving), watched=config.admin_key_file
        )
        found.append(again)
    if config.tls_cert is not None:
        found.append(ReloadSource(again=lambda: reload_certificate(serving, contexts)))
    return found


async def reload_tenants(serving: ServerState, read: Callable[[], Sequence[Tenant]]) -> None:
    """Know the tenants of a file that has changed; where that cannot be, those known stay."""
    kept = "the tenants file was read again and nothing of it is taken up"
    try:
        tenants = await asyncio.to_thread(read)
    except SettingError as error:
        serving.log.error(kept, reason=str(error))
        return
    why = needs_restart(serving.tenants or (), tenants)
    if why is not None:
        serving.log.error(
            kept, reason=f"{why}; weights, limits and who there is change by a restart"
        )
        return
    serving.know(tenants)
    num_keys = sum(len(tenant.key_digests) for tenant in tenants)
    serving.log.event("the tenants file was read again", tenants=len(tenants), keys=num_keys)


async def reload_admin_keys(serving: ServerState) -> None:
    """Know the keys of an admin key file that has changed; where that cannot be, the old stay."""
    try:
        digests = await asyncio.to_thread(read_admin_keys, serving.config.admin_key_file)
    except SettingError as error:
        serving.log.error(
            "the admin key file was read again and nothing of it is taken up", reason=str(error)
        )
        return
    serving.know_admins(digests)
    serving.log.event("the admin key file was read again", keys=len(digests))


async def reload_certificate(serving: ServerState, contexts: Sequence[ssl.SSLContext]) -> None:
    """Show the certificate that lies there now to connections from now on."""
    config = serving.config
    try:
        await asyncio.to_thread(check_tls, config)  # as a whole, before the live one changes
        for context in contexts:
            context.load_cert_chain(str(config.tls_cert), config.tls_key)
    except (SettingError, OSError) as error:
        serving.log.error("the certificate was read again and is not taken up", reason=str(error))
        return
    serving.log.event("the certificate was read again")


def _mark_of(file: str) -> tuple[int, ...] | None:
    """What changes with a file; None where it is not there (it may be being replaced)."""
    try:
        found = Path(file).expanduser().stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

"""Reload tenants, admin keys and the certificate while the server runs.

Each is replaced as a whole or not at all: an error in a file is logged, and the old values stay.
Knows no route. Always holds: a reload ends neither the server nor a request; without files to
reload, that is logged.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from quire.api.http.sockets import check_tls
from quire.api.server_state import ServerState
from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.user_path import user_path
from quire.config.admin_keys import read_admin_keys
from quire.config.tenants import Tenant, needs_restart

# The interval at which watched files are checked.
_CHECK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadSource:
    """A file that can be reloaded. watched: its path, if a change of it triggers the reload."""

    reload: Callable[[], Awaitable[None]]
    watched: str | None = None


class Reloader:
    """Reloads `sources`, one at a time. Created and used in the event loop's thread."""

    def __init__(self, log: Log, sources: Sequence[ReloadSource]) -> None:
        self._log, self._sources = log, sources
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Future[None]] = set()

    def all(self) -> None:
        """Start to reload everything."""
        if not self._sources:
            self._log.event("there is nothing to reload (no tenants, admin keys, certificate)")
        for source in self._sources:
            self._begin(self._read(source))

    def watch(self) -> None:
        """Reload files that change from now on."""
        for source in self._sources:
            if source.watched is not None:
                self._begin(self._watch_file(source, source.watched))

    def close(self) -> None:
        """Stop reloading."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, source: ReloadSource) -> None:
        async with self._lock:
            await source.reload()

    async def _watch_file(self, source: ReloadSource, file: str) -> None:
        known = await asyncio.to_thread(_mark_of, file)
        while True:
            await asyncio.sleep(_CHECK_S)
            mark = await asyncio.to_thread(_mark_of, file)
            if mark != known and mark is not None:
                known = mark
                await self._read(source)


def sources_of(
    server_state: ServerState,
    *,
    read_tenants: Callable[[], Sequence[Tenant]] | None,
    tenants_file: str | None,
    contexts: Sequence[ssl.SSLContext],
) -> list[ReloadSource]:
    """Return the files that this configuration can reload. contexts: of the TLS listeners."""
    config, found = server_state.config, []
    if read_tenants is not None:
        read = read_tenants
        found.append(
            ReloadSource(reload=lambda: reload_tenants(server_state, read), watched=tenants_file)
        )
    if config.admin_key_file is not None:
        source = ReloadSource(
            reload=lambda: reload_admin_keys(server_state), watched=config.admin_key_file
        )
        found.append(source)
    if config.tls_cert is not None:
        found.append(ReloadSource(reload=lambda: reload_certificate(server_state, contexts)))
    return found


async def reload_tenants(server_state: ServerState, read: Callable[[], Sequence[Tenant]]) -> None:
    """Replace the tenants by those of the changed file; keep the old ones if it is invalid."""
    kept = "the tenants file was reloaded and is not used"
    try:
        tenants = await asyncio.to_thread(read)
    except SettingError as error:
        server_state.log.error(kept, reason=str(error))
        return
    why = needs_restart(server_state.tenants or (), tenants)
    if why is not None:
        server_state.log.error(
            kept, reason=f"{why}; weights, limits and the set of tenants change by a restart"
        )
        return
    server_state.set_tenants(tenants)
    num_keys = sum(len(tenant.key_digests) for tenant in tenants)
    server_state.log.event("the tenants file was reloaded", tenants=len(tenants), keys=num_keys)


async def reload_admin_keys(server_state: ServerState) -> None:
    """Replace the admin keys by those of the changed file; keep the old ones if it is invalid."""
    try:
        digests = await asyncio.to_thread(read_admin_keys, server_state.config.admin_key_file)
    except SettingError as error:
        server_state.log.error("the admin key file was reloaded and is not used", reason=str(error))
        return
    server_state.set_admin_keys(digests)
    server_state.log.event("the admin key file was reloaded", keys=len(digests))


async def reload_certificate(server_state: ServerState, contexts: Sequence[ssl.SSLContext]) -> None:
    """Use the certificate that is in the file now for new connections."""
    config = server_state.config
    try:
        await asyncio.to_thread(check_tls, config)  # check all of it before the current one changes
        for context in contexts:
            context.load_cert_chain(str(config.tls_cert), config.tls_key)
    except (SettingError, OSError) as error:
        server_state.log.error("the certificate was reloaded and is not used", reason=str(error))
        return
    server_state.log.event("the certificate was reloaded")


def _mark_of(file: str) -> tuple[int, ...] | None:
    """Return what changes with a file; None if it is missing (it may be being replaced)."""
    try:
        found = user_path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

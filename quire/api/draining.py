"""Drain a server: refuse new requests, let open ones finish, and end what is left.

Knows no signal and no process: callers decide when a server drains and what follows. Always holds:
each wait has a limit.
"""

from __future__ import annotations

import asyncio
from typing import Any

from quire.api.server_state import ServerState

# Time for open requests to write their last events once they are ended.
LAST_EVENTS_S = 3.0


async def drain(server_state: ServerState, died: asyncio.Future[Any]) -> None:
    """Let open requests finish within the grace time, then end them; return once `died` is done."""
    grace_s = server_state.config.grace_s
    server_state.lifecycle.drain()
    server_state.log.event("draining", grace_s=grace_s)
    if await _is_idle(server_state, grace_s, died) or died.done():
        return
    server_state.log.warning("grace time is over; open requests are ended")
    server_state.lifecycle.end_all()
    await _is_idle(server_state, LAST_EVENTS_S)


async def end_streams_of_dead_engine(server_state: ServerState) -> None:
    """Let open streams end with an error, which their generators raise."""
    await _is_idle(server_state, LAST_EVENTS_S)
    server_state.lifecycle.end_all()


async def close_state(server_state: ServerState) -> None:
    """Close what a server opened, whether it drained before or never accepted a request.

    The batch worker closes its journal as an open request, which is waited for.
    """
    server_state.lifecycle.drain()
    await _is_idle(server_state, LAST_EVENTS_S)
    server_state.closing.close()


async def _is_idle(server_state: ServerState, limit_s: float, *ends: asyncio.Future[Any]) -> bool:
    """Wait until no request is open, one of `ends` is done or the time is over.

    Return whether no request is open.
    """
    idle = asyncio.ensure_future(server_state.idle.wait())
    await asyncio.wait({idle, *ends}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    return server_state.idle.is_set()

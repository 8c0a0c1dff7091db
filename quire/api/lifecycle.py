"""Lifecycle: whether a server accepts requests, holds them, refuses them, or ends them.

An admin pauses (requests wait), drains (requests are refused) and resumes; a stop drains for good
and, after the grace time, ends what still runs. Knows no engine and no HTTP. Always holds: a server
that is stopping never accepts again; requests are held only while it does not drain.
"""

from __future__ import annotations

import asyncio

from quire.base.errors import OverloadedError, ShuttingDown

# Requests that wait while the server is paused.
MAX_HELD = 1024
# `retry-after` of a paused or drained server: when an admin resumes it is not known.
_RETRY_AFTER_S = 10.0


class Lifecycle:
    """The state of one server process. Created and used in the event loop's thread.

    draining: requests are refused. accepting: set while generation requests are not held.
    stopping, grace_over: set when the server stops, and when its open requests must end.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.draining = False
        self.num_held = 0
        self.accepting = asyncio.Event()
        self.accepting.set()
        loop = asyncio.get_running_loop()
        self.stopping: asyncio.Future[None] = loop.create_future()
        self.grace_over: asyncio.Future[None] = loop.create_future()

    @property
    def paused(self) -> bool:
        """Whether generation requests are held."""
        return not self.accepting.is_set()

    def pause(self) -> None:
        """Hold new generation requests; running ones continue."""
        if not self.draining:
            self.accepting.clear()

    def refuse_new(self) -> None:
        """Refuse new requests, and those that are held, until `resume`."""
        self.draining = True
        self.accepting.set()

    def resume(self) -> None:
        """Accept requests again, unless the server is stopping."""
        self.accepting.set()
        self.draining = self.stopping.done()

    def set_admission(self, *, paused: bool, draining: bool) -> None:
        """Take over the state of another API process of this server."""
        self.draining = draining or self.stopping.done()
        if paused and not self.draining:
            self.accepting.clear()
        else:
            self.accepting.set()

    async def wait_while_paused(self) -> None:
        """Wait while requests are held. Raises OverloadedError if too many requests wait, or if
        the server drains in the meantime."""
        if self.num_held >= MAX_HELD:
            raise OverloadedError(
                "the server is paused; try again later", retry_after_s=_RETRY_AFTER_S
            )
        self.num_held += 1
        try:
            await self.accepting.wait()
        finally:
            self.num_held -= 1
        if self.draining:
            raise self.refusal()

    def drain(self) -> None:
        """Refuse new requests for good; open ones continue."""
        self.refuse_new()
        if not self.stopping.done():
            self.stopping.set_result(None)

    def end_all(self) -> None:
        """End open requests with an error: the grace time is over."""
        if not self.grace_over.done():
            self.grace_over.set_result(None)

    def refusal(self) -> ShuttingDown:
        """Return the error of requests to a server that drains."""
        retry_s = max(self._grace_s, 1.0) if self.stopping.done() else _RETRY_AFTER_S
        return ShuttingDown(f"{self.draining_reason}; use another server", retry_after_s=retry_s)

    @property
    def draining_reason(self) -> str:
        """Return why no requests are accepted."""
        cause = (
            "the server is shutting down"
            if self.stopping.done()
            else "the server was drained by an admin"
        )
        return f"{cause} and accepts no new requests"

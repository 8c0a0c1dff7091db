"""WaitingConnections: accept what waits at a listening socket beside a connection just accepted.

The event loop (libuv) accepts one connection in each of its iterations, and with hundreds of busy
streams an iteration takes tens of milliseconds: the streams of a server that has failed, which come
all at once, would be accepted one by one over seconds. Knows no HTTP. Always holds: the loop
accepts the first connection itself, so a lone one costs a poll of the socket more; of those
accepted here no more are not served yet than requests run, which make iterations long, or than a
few; and they take a small share of the process's open files; a failing accept is left to the loop.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import sys
from collections.abc import Callable, Sized
from contextlib import suppress
from functools import partial

# Of connections that are not served yet: at most where fewer requests run, and as a share of the
# limit on open files, half of what is kept spare (quire.api.http.connection).
_FEW, _SHARE_OF_FILES = 16, 1 / 32


class WaitingConnections:
    """connect: makes the protocol of a connection. It gets this object as `waiting`, and calls
    accept() when poll(0) is true. running: the requests of all connections that run.
    make_protocol: makes a protocol without arguments."""

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[..., asyncio.Protocol],
        running: Sized = (),
    ) -> None:
        self.make_protocol = partial(connect, waiting=self)
        self._listening, self._running = listening, running
        listening.setblocking(False)
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_accepted = sys.maxsize
        if open_files != resource.RLIM_INFINITY:
            self._max_accepted = int(open_files * _SHARE_OF_FILES)
        self._tasks: set[asyncio.Task[None]] = set()
        poll = select.poll()
        poll.register(listening.fileno(), select.POLLIN)
        self.poll: Callable[[int], object] = poll.poll  # no Python code: nearly always false

    async def serve(self, backlog: int) -> asyncio.Server:
        """Return a server that accepts connections."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(self.make_protocol, sock=self._listening, backlog=backlog)

    def accept(self) -> None:
        """Accept the connections that wait."""
        loop = asyncio.get_running_loop()
        limit = min(max(len(self._running), _FEW), self._max_accepted)
        while len(self._tasks) < limit:
            try:
                accepted, _ = self._listening.accept()
            except OSError:  # none waits, the socket is closed, or there are no descriptors
                return
            accepted.setblocking(False)
            with suppress(OSError):  # a Unix socket, or the client has already disconnected
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._serve(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self.make_protocol, accepted)
        except OSError:  # the client has already disconnected
            accepted.close()

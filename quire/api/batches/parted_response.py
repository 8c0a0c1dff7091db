"""PartedResponse: content of the journal, read part by part while a client reads it.

Knows neither what the parts are nor where they are kept. Always holds: one part is in memory beside
the one that is sent; no part is read for a client that has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.http.request_io import disconnect_of

# Returns the part at a place and the place of the next one; None past the end.
ReadPart = Callable[[int], Awaitable[tuple[bytes, int] | None]]


class PartedResponse(Response):
    """Parts from place 0 on. headers: with content-length where the size is known."""

    def __init__(
        self, read: ReadPart, *, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        if headers is None or "content-length" not in headers:
            del self.headers["content-length"]
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        disconnected = disconnect_of(scope, receive)
        try:
            part = await self._read(0)
            while part is not None and not disconnected.done():
                content, at = part
                part = await self._read(at)
                # The last part is marked: a client that has it may send its next request at once.
                more = part is not None
                await send({"type": "http.response.body", "body": content, "more_body": more})
        finally:
            if isinstance(disconnected, asyncio.Task):
                disconnected.cancel()

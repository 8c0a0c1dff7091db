"""CloseDelimited: responses to HTTP/1.0 clients, which know no chunks.

uvicorn sends chunks wherever a response has no length. For the servers of API and router. Always
holds: the bytes of the response are those that any other client gets, without chunks.
"""

from __future__ import annotations

from typing import Any


class CloseDelimited:
    """An ASGI application with responses that end with the connection unless they have a length.
    cycle: uvicorn's RequestResponseCycle of the request."""

    def __init__(self, app: Any, cycle: Any) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        cycle, has_length = self._cycle, False

        async def send_unchunked(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:  # uvicorn counts down what it expects: always this piece
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)

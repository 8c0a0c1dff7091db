"""A small HTTP server with scripted answers to /v1/models and streamed /v1/completions.

Runs in its own thread, so that a client with its own event loop can be tested against it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# Given a request's body: the status, and the streamed lines.
Answer = Callable[[dict[str, Any]], tuple[int, list[str]]]


def plain_answer(body: dict[str, Any]) -> tuple[int, list[str]]:
    """Return as many tokens as requested, then their count."""
    count = body["max_tokens"]
    events: list[Any] = [
        {"choices": [{"index": 0, "text": "a ", "finish_reason": None}]} for _ in range(count)
    ]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    events.append({"choices": [], "usage": {"completion_tokens": count}})
    return 200, [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"]


class SmallServer:
    """`with SmallServer(answer) as server:`; asked holds (headers, body) of each completion; says:
    fields of its model besides the name.
    """

    def __init__(
        self,
        answer: Answer = plain_answer,
        *,
        chunked: bool = True,
        says: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._answer = answer
        self._model = {"id": "small", **says}
        self._chunked = chunked
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.url = ""

    def __enter__(self) -> SmallServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        async with server:
            await self._ended.wait()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if path.endswith("/models"):
            status, lines = 200, [json.dumps({"data": [self._model]})]
        else:
            body = json.loads(content)
            self.asked.append((headers, body))
            status, lines = self._answer(body)
        encoding = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        writer.write(f"HTTP/1.1 {status} X\r\n{encoding}Connection: close\r\n\r\n".encode())
        for told in lines:
            piece = told.encode() + b"\n\n"
            if self._chunked:  # cut in two: an event may arrive in pieces
                for part in (piece[:7], piece[7:]):
                    if part:
                        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            else:
                writer.write(piece)
        if self._chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

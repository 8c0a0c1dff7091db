"""Clients of a server, many at once: they stream, disconnect, stall, and send garbage.

Each client does one thing after the other, each on a connection of its own, drawn from a seed. Good
clients compare their whole answer with the one the server gave to the same request alone. Knows
HTTP and no part of quire. Always holds: a failure of a good client, and a status of 500 or above
for a bad one, is kept in `wrong`, with the request.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_PATH = "/v1/completions"
_LIMIT_S = 300.0
_MAX_KEPT = 20
# Frequencies of the kinds of clients.
_KINDS = {"good": 12, "whole": 2, "vanish": 3, "stall": 1, "rubbish": 2}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a good client, and its answer alone."""

    body: dict[str, Any]
    text: str


class Broken(Exception):
    """An answer differs from the expected one."""


class Callers:
    """See the module docstring. stall_s: how long a stalling client does not read. limit_s: maximal
    duration of an exchange.
    """

    def __init__(
        self,
        port: int,
        asks: Sequence[Ask],
        *,
        seed: int,
        stall_s: float,
        limit_s: float = _LIMIT_S,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._port = port
        self._asks = asks
        self._seed = seed
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._round = 0

    async def run(self, num_callers: int, go_on: Callable[[int], bool]) -> None:
        """Run all clients, each as long as go_on(number of exchanges it has done) holds."""
        self._over = asyncio.Event()
        self._round += 1
        await asyncio.gather(*(self._caller(number, go_on) for number in range(num_callers)))

    def end_stalls(self) -> None:
        """Disconnect the stalling clients."""
        self._over.set()

    async def answer(self, body: dict[str, Any]) -> bytes:
        """Return the answer to one request."""
        return await self._exchange(_post(body))

    async def _caller(self, number: int, go_on: Callable[[int], bool]) -> None:
        chance = random.Random(f"{self._seed}/{self._round}/{number}")
        done = 0
        while go_on(done):
            kind = chance.choices([*_KINDS], [*_KINDS.values()])[0]
            ask = chance.choice(self._asks)
            try:
                async with asyncio.timeout(self._limit_s):
                    await getattr(self, f"_{kind}")(ask, chance)
            except (Broken, OSError, TimeoutError, ValueError, LookupError) as error:
                self.wrong = [*self.wrong, f"{kind}: {error!r} of {ask.body}"][:_MAX_KEPT]
            done += 1
            self.done[kind] += 1

    async def _good(self, ask: Ask, _: random.Random) -> None:
        raw = await self._exchange(_post({**ask.body, "stream": True}))
        if (text := streamed_text(raw)) != ask.text:
            raise Broken(f"{text!r} came, alone it was {ask.text!r}")

    async def _whole(self, ask: Ask, _: random.Random) -> None:
        raw = await self._exchange(_post(ask.body))
        if (text := whole_text(raw)) != ask.text:
            raise Broken(f"{text!r} came, alone it was {ask.text!r}")

    async def _vanish(self, ask: Ask, chance: random.Random) -> None:
        """Disconnect after some bytes of the answer, or of the request."""
        request = _post({**ask.body, "stream": chance.random() < 0.7})
        reader, writer = await self._connect()
        try:
            whole = chance.random() < 0.8
            writer.write(request if whole else request[: chance.randrange(len(request))])
            await writer.drain()
            if whole:
                await reader.read(chance.choice([1, 200, 2000]))
        finally:
            writer.transport.abort()

    async def _stall(self, ask: Ask, _: random.Random) -> None:
        """Request much and do not read it."""
        body = {**ask.body, "stream": True, "max_tokens": 400, "logprobs": 5, "ignore_eos": True}
        reader, writer = await self._connect(receive_buffer_bytes=4096)
        try:
            writer.write(_post(body))
            await reader.read(1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._stall_s):
                    await self._over.wait()
        finally:
            writer.transport.abort()

    async def _rubbish(self, _: Ask, chance: random.Random) -> None:
        raw = await self._exchange(chance.choice(RUBBISH)(chance), bad=True)
        status = raw[9:12]
        if raw and not (raw.startswith(b"HTTP/1.1 ") and b"400" <= status < b"500"):
            raise Broken(f"rubbish was answered by {raw[:200]!r}")

    async def _exchange(self, request: bytes, *, bad: bool = False) -> bytes:
        """Return the whole response. bad: the server may close early."""
        reader, writer = await self._connect()
        came = b""
        try:
            writer.write(request)
            await writer.drain()
            if bad:
                writer.write_eof()
            came = await reader.read(-1)
        except OSError:
            if not bad:
                raise
        finally:
            writer.transport.abort()
        return came

    async def _connect(
        self, receive_buffer_bytes: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = socket.socket()
        raw.setblocking(False)
        if receive_buffer_bytes:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self._port))
            return await asyncio.open_connection(sock=raw)
        except BaseException:
            raw.close()
            raise


def _post(body: dict[str, Any] | bytes, *, path: str = _PATH, extra: str = "") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{extra}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


RUBBISH: tuple[Callable[[random.Random], bytes], ...] = (
    lambda chance: chance.randbytes(300),
    lambda chance: _post(chance.randbytes(40)),
    lambda _: _post(b'{"prompt": "a", '),
    lambda _: _post(b"[" * 5000),
    lambda _: _post({"prompt": {"a": 1}}),
    lambda _: _post({"prompt": "a", "max_tokens": -5}),
    lambda _: _post({"prompt": "a", "no_such_field": 1}),
    lambda _: _post({"prompt": "a", "temperature": "hot"}),
    lambda _: _post({"prompt": "a"}, path="/v1/nowhere"),
    lambda _: _post({"prompt": "a"}, extra=f"X-Long: {'x' * 70_000}\r\n"),
    lambda _: b"GET / HTTP/9.9\r\n\r\n",
)


def body_of(raw: bytes) -> bytes:
    """Return the body of a 200 response, joined if chunked."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise Broken(f"answered by {raw[:300]!r}")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    parts, at = [], 0
    while size := int(rest[at : (line := rest.index(b"\r\n", at))], 16):
        parts.append(rest[line + 2 : line + 2 + size])
        at = line + 4 + size
    return b"".join(parts)


def streamed_text(raw: bytes) -> str:
    """Return the text of a stream that ended correctly."""
    lines = body_of(raw).split(b"\n")
    events = [line[6:] for line in lines if line.startswith(b"data: ")]
    if not events or events.pop() != b"[DONE]":
        raise Broken(f"a stream without its end: {raw[-300:]!r}")
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def whole_text(raw: bytes) -> str:
    """Return the text of an unstreamed answer."""
    return str(json.loads(body_of(raw))["choices"][0]["text"])

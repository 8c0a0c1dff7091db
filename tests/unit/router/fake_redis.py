"""A Redis server for tests: the commands that the router sends, over Redis' own protocol.

Its clock is the test's. The script of quotas is computed by a twin in Python, and refused if its
text is another one; a real server runs the same tests where its binary exists.
"""

from __future__ import annotations

import asyncio
import hashlib
import math

from quire.router.redis_buckets import SCRIPT


class FakeRedis:
    """num_scripts: that ran. is_silent: commands are read and never answered. cuts: a
    script runs, and its connection ends without an answer."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.values: dict[str, tuple[str, float]] = {}
        self.buckets: dict[str, tuple[float, float]] = {}
        self.num_scripts = 0
        self.is_silent = False
        self.cuts = False
        self._scripts: set[str] = set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Listen at a free port, or again at the former one."""
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End all connections, and take no more. Clients have noticed it then."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                words = await _command(reader)
                if self.is_silent:
                    continue
                answer = self._answer(words)
                if self.cuts and words[0].upper() == "EVALSHA":
                    break
                writer.write(_encoded(answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, words: list[str]) -> object:
        name = words[0].upper()
        if name == "EVALSHA":
            if words[1] not in self._scripts:
                return RuntimeError("NOSCRIPT no matching script")
            return self._script(words[3], [float(one) for one in words[4:]])
        if name == "SCRIPT":
            assert words[2] == SCRIPT
            sha = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
            self._scripts.add(sha)
            return sha
        if name == "SET":
            assert words[3].upper() == "PX"
            self.values[words[1]] = (words[2], self.now_s + int(words[4]) / 1000)
            return None
        if name == "DEL":
            return int(self.values.pop(words[1], None) is not None)
        if name == "SCAN":
            prefix = words[words.index("MATCH") + 1].removesuffix("*")
            live = [key for key, (_, until_s) in self.values.items() if until_s > self.now_s]
            return ["0", [key for key in live if key.startswith(prefix)]]
        if name in ("CLIENT", "SELECT", "PING"):
            return None
        return RuntimeError(f"ERR unknown command {name}")

    def _script(self, key: str, arguments: list[float]) -> object:
        self.num_scripts += 1
        rate, burst, tokens, is_settling = arguments
        level, since_s = self.buckets.get(key, (burst, self.now_s))
        level = min(burst, level + max(0.0, self.now_s - since_s) * rate)
        if not is_settling and level < tokens:
            if self.now_s < since_s:
                self.buckets[key] = (level, self.now_s)
            return [0, f"{(tokens - level) / rate:.6f}"]
        level = min(burst, level - tokens)
        self.buckets[key] = (level, self.now_s)
        assert math.ceil((burst - level) / rate * 1000) >= 0
        return [1, f"{level:.6f}"]


async def _command(reader: asyncio.StreamReader) -> list[str]:
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(length + 2))[:-2].decode(errors="surrogateescape"))
    return words


def _encoded(answer: object) -> bytes:
    if answer is None:
        return b"+OK\r\n"
    if isinstance(answer, RuntimeError):
        return b"-%b\r\n" % str(answer).encode()
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(_encoded, answer))
    text = str(answer).encode(errors="surrogateescape")
    return b"$%d\r\n%b\r\n" % (len(text), text)

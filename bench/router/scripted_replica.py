"""A replica that computes nothing: it streams tokens at set times, with what continues a stream.

    python -m bench.router.scripted_replica --first-ms 20 --slow-ms 400 --slow-share 0.2

Answers /health, /v1/models and POST /generate. The last share of each hundred requests has a slow
first token, so that runs are alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_HEALTH = {"ok": True, "state": "ready", "reason": "", "pending": 0, "steps_total": 1}
_MODELS = {"data": [{"id": "scripted", "system_fingerprint": "fp_scripted"}]}


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds to the first token, usually and when slow, and between tokens."""

    first_ms: float
    slow_ms: float
    slow_share: float
    token_ms: float


class ScriptedReplica:
    """One server."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._num_requests = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                length = next((int(one[15:]) for one in lines if one[:15] == b"content-length:"), 0)
                raw = await reader.readexactly(length)
                path = head.split(b" ")[1]
                if path == b"/generate":
                    await self._stream(json.loads(raw), writer)
                else:
                    _whole(writer, self.answer(path))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, path: bytes) -> object:
        """Return the answer to a GET."""
        return _HEALTH if path == b"/health" else _MODELS

    async def first_token(self, request: dict[str, Any]) -> None:
        """Wait as long as the first token takes."""
        times, place = self._times, self._num_requests % 100
        self._num_requests += 1
        is_slow = place >= 100 * (1 - times.slow_share)
        await asyncio.sleep((times.slow_ms if is_slow else times.first_ms) / 1000)

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        times, num_tokens = self._times, request["max_tokens"]
        writer.write(_HEAD)
        await self.first_token(request)
        for number in range(num_tokens):
            cursor = f"gen-{'0' * 24}:1:{number + 1}:0"
            event = b'id: gen-%024d:%d\ndata: {"token":%d,"text":" word"}\n\n' % (0, number, number)
            comment = b': {"output_ids":[%d],"output_cursor":"%b"}\n\n' % (number, cursor.encode())
            _chunk(writer, event + comment)
            await writer.drain()
            if times.token_ms:
                await asyncio.sleep(times.token_ms / 1000)
        _chunk(writer, b'data: [DONE]\n\n: {"ended":null}\n\n')
        _chunk(writer, b"")


def _whole(writer: asyncio.StreamWriter, body: object) -> None:
    raw = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))


def _chunk(writer: asyncio.StreamWriter, piece: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


async def serve(replica: ScriptedReplica) -> None:
    """Serve at a free port, which is printed."""
    server = await asyncio.start_server(replica.connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"ready in 0 s at http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--slow-ms", type=float, default=400.0)
    parser.add_argument("--slow-share", type=float, default=0.0)
    parser.add_argument("--token-ms", type=float, default=2.0)
    arguments = parser.parse_args()
    times = Times(arguments.first_ms, arguments.slow_ms, arguments.slow_share, arguments.token_ms)
    asyncio.run(serve(ScriptedReplica(times)))


if __name__ == "__main__":
    main()

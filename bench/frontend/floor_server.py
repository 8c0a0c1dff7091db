"""The floor: an empty app on Quire's HTTP server: python -m bench.frontend.floor_server

Answers POST with as many events as the query's `events`, each of `bytes`, one at each tick of
`step_ms` (0: one per turn of the event loop), and any other path with {}. The server is uvicorn
with uvloop and httptools, as Quire runs it but without Quire's own limits.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from typing import Any
from urllib.parse import parse_qs

import uvicorn
import uvloop

_START = {"type": "http.response.start", "status": 200}


class Floor:
    """The app: sends the requested events and ignores everything else."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._tick = asyncio.Event()

    async def run_ticks(self) -> None:
        """Wake all streams once a step."""
        while True:
            await asyncio.sleep(self._step_s)
            self._tick.set()
            self._tick = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        asked = parse_qs(scope["query_string"].decode())
        while (await receive()).get("more_body"):
            pass
        if "events" not in asked:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
            await send({**_START, "headers": headers})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        count, size = int(asked["events"][0]), int(asked["bytes"][0])
        event = b"data: " + b"x" * (size - 8) + b"\n\n"
        await send({**_START, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(count):
            await (self._tick.wait() if self._step_s else asyncio.sleep(0))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        done = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        await send(done)


async def serve(step_s: float) -> None:
    """Serve until stopped; print the port as `quire serve` logs it."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        app = Floor(step_s)
        ticks = asyncio.ensure_future(app.run_ticks()) if step_s else None
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
        )
        port = listening.getsockname()[1]
        print(f"address=http://127.0.0.1:{port}\nready in 0 s", flush=True)
        await uvicorn.Server(config).serve(sockets=[listening])
        if ticks is not None:
            ticks.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("step_ms", type=float)
    uvloop.run(serve(parser.parse_args().step_ms / 1000))

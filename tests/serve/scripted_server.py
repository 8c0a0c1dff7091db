"""A server on a real socket with a scripted model: nothing is computed.

    with ScriptedServer("hermes template", [["Hel", "lo"], [...]]) as server: ...

HTTP layer, uvicorn and connections are those of `quire serve`; the engine is scripted. Each request
takes the next script; the last one serves all further requests.
"""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.api.server import public_server
from quire.api.server_state import ServerState
from quire.base.log import Log
from quire.config.server_config import ServerConfig
from quire.obs.metrics import Metrics
from quire.text.chat_template import ChatTemplate
from tests.unit.api.fake_engine import CARD, FakeEngine

GIVE_UP_S = 60.0


class RotatingEngine(FakeEngine):
    """An engine that answers each request with the next script."""

    def __init__(self, template: str, scripts: Sequence[Sequence[str]]) -> None:
        super().__init__(*scripts[0], card=replace(CARD, max_model_len=8192))
        self.template = ChatTemplate({"default": template}, variables={})
        self._scripts = [tuple(script) for script in scripts]

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.script = self._scripts[min(len(self.asked), len(self._scripts) - 1)]
        async for delta in super().generate(*args, **options):
            yield delta


class ScriptedServer:
    """A server in its own thread; ready once entered."""

    def __init__(self, template: str, scripts: Sequence[Sequence[str]], **settings: Any) -> None:
        self.engine: RotatingEngine
        self.url = ""
        self._made = (template, scripts)
        self._settings = settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(GIVE_UP_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(GIVE_UP_S)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = RotatingEngine(*self._made)
        server_state = ServerState(
            ServerConfig(**self._settings), Metrics(), Log("test", io.StringIO())
        )
        server_state.start(self.engine)
        server = public_server(server_state)
        self._stop = lambda: setattr(server, "should_exit", True)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self._loop.call_soon(self._ready.set)
            await server.serve(sockets=[listening])

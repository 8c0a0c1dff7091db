"""Start and stop the HTTP servers of the engines, for a load over HTTP.

Quire, llama.cpp and vLLM: OpenVINO GenAI has no server, and transformers' is not made for
throughput. Each listens on loopback and is ready when it lists its model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.peers.child import PeerFailed, engine_environment
from bench.peers.convert import converted
from bench.peers.places import environment_python, llama_tool
from quire.base.errors import WorkerError
from quire.bench.http_load import Target, served_model

ENGINES = ("quire", "llama.cpp", "vllm")
READY_LIMIT_S = 600.0


class Server:
    """One engine's server in its own process group; `target` is set once it is ready."""

    def __init__(
        self,
        engine: str,
        checkpoint: Path,
        precision: str,
        *,
        threads: int,
        log: Path,
        settings: dict[str, Any],
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        model = converted(engine, checkpoint, precision)
        self.engine = engine
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            _command(engine, model, port, threads, settings),
            stdout=self._log,
            stderr=self._log,
            env=engine_environment(engine, threads),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.target = Target(url=f"http://127.0.0.1:{port}", model="", timeout_s=300)

    def wait(self) -> None:
        """Wait until it lists its model. Raises PeerFailed if it ends or takes too long."""
        end_s = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                break
            with suppress(WorkerError):
                asyncio.run(served_model(self.target))
                return
            time.sleep(0.2)
        raise PeerFailed(f"the server of {self.engine} did not start; {self._log.name} says why")

    def close(self) -> None:
        """Stop it and all its descendants."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _command(
    engine: str, model: Path, port: int, threads: int, settings: dict[str, Any]
) -> list[str]:
    shared = ["--host", "127.0.0.1", "--port", str(port)]
    given: list[str] = []
    for name, value in settings.items():
        flag = name if name.startswith("-") else "--" + name.replace("_", "-")
        if value is False:
            given.append(flag.replace("--", "--no-", 1))
        else:
            given += [flag] if value is True else [flag, str(value)]
    if engine == "quire":
        return [
            *(sys.executable, "-m", "quire", "serve", str(model), "--threads", str(threads)),
            *(*shared, *given),
        ]
    if engine == "llama.cpp":
        return [
            *(str(llama_tool("llama-server")), "-m", str(model), "-t", str(threads)),
            *("-tb", str(threads), *shared, *given),
        ]
    return [
        *(str(environment_python("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--dtype", "bfloat16", "--enforce-eager"),
        *("--max-model-len", "4096", *shared, *given),
    ]

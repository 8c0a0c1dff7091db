"""llama.cpp behind the peers' protocol: its server, and its own benchmark programs.

Runs with Quire's Python and starts the programs that `bench/peers/setup llama.cpp` built. Requests
go to the server over loopback HTTP, streamed, a connection each, with tokens returned as ids.
Settings are command line options; only "cache_prompt" is a field of the requests.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import time
from typing import Any

from bench.peers.places import llama_tool
from bench.peers.protocol import Asked, Unsupported, serve
from quire.bench.http_load import Refused, address_of, events, exchange

START_LIMIT_S = 120.0


class LlamaServer:
    """See protocol.Driver."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._model = ""
        self._threads = 1
        self._settings: dict[str, Any] = {}

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        self.close()
        self._model, self._threads = model, threads
        self._settings = dict(settings)
        described = {
            "version": _version(),
            "kv_dtype": str(settings.get("-ctk", "f16")),
            "scheme": model.rpartition("-")[2].removesuffix(".gguf"),
        }
        if settings.get("tools_only"):
            return described
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [
            *(str(llama_tool("llama-server")), "-m", model, "--host", "127.0.0.1"),
            *("--port", str(port), "-t", str(threads), "-tb", str(threads), *_options(settings)),
        ]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        asyncio.run(self._until_ready())
        return described | {"pid": self._server.pid}

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        if self._server is None:
            raise Unsupported("nothing is loaded")
        return asyncio.run(self._run(requests, static_batch))

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Run llama-bench for one request, llama-batched-bench for several at the mean lengths."""
        if workload["max_running"] == 1:
            return self._bench(workload)
        return self._batched_bench(workload)

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            try:
                self._server.wait(20)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None

    # ---- the server

    async def _until_ready(self) -> None:
        assert self._server is not None
        address = address_of(self._url)
        end_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end_s:
            if self._server.poll() is not None:
                raise Unsupported(f"llama-server ended with exit code {self._server.returncode}")
            try:
                async for _ in exchange(address, "GET", "/health", None):
                    pass
                return
            except (OSError, Refused, IndexError):
                await asyncio.sleep(0.02)
        raise Unsupported(f"llama-server is not ready after {START_LIMIT_S:.0f} s")

    async def _run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        begin_s = time.perf_counter()
        answers: list[dict[str, Any]] = []
        size = static_batch or len(requests)
        for first in range(0, len(requests), size):
            group = requests[first : first + size]
            answers += await asyncio.gather(*(self._ask(one, begin_s) for one in group))
        return answers

    async def _ask(self, one: Asked, begin_s: float) -> dict[str, Any]:
        body = {
            "prompt": one["prompt_ids"],
            "n_predict": one["output_tokens"],
            "stream": True,
            "cache_prompt": bool(self._settings.get("cache_prompt", False)),
            "ignore_eos": True,
            "return_tokens": True,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
        }
        answer: dict[str, Any] = {"sent_s": 0.0, "first_s": 0.0, "last_s": 0.0, "token_ids": []}
        lines = exchange(address_of(self._url), "POST", "/completion", body)
        async for event in events(lines):
            if event is None:
                break
            if "error" in event:
                raise Unsupported(f"llama-server: {event['error']}")
            if timings := event.get("timings"):
                answer["generation_s"] = timings["predicted_ms"] / 1e3
                answer["drafted"] = timings.get("draft_n", 0)
                answer["accepted"] = timings.get("draft_n_accepted", 0)
            if event.get("tokens"):
                now_s = time.perf_counter() - begin_s
                answer["first_s"] = answer["first_s"] or now_s
                answer["last_s"] = now_s
                answer["token_ids"] += event["tokens"]
        return answer

    # ---- its own programs

    def _bench(self, workload: dict[str, Any]) -> dict[str, Any]:
        prompt, output = workload["prompt_tokens"], workload["output_tokens"]
        shape = (
            ["-p", str(prompt), "-n", "0"]
            if output == 1
            else ["-p", "0", "-n", str(output), "-d", str(prompt)]
        )
        output = self._tool("llama-bench", [*shape, "-r", "1", "-o", "json"], _BENCH_OPTIONS)
        [row] = json.loads(output)
        rate = "prefill_tokens_per_s" if output == 1 else "decode_tokens_per_s"
        return {"rates": {rate: float(row["avg_ts"])}}

    def _batched_bench(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Parse rows of mean length; for shared prefixes the whole prompt is shared, in its
        favour.
        """
        count, running = workload["num_requests"], workload["max_running"]
        prompt = round(workload["prompt_tokens"] / count)
        output = round(workload["output_tokens"] / count)
        shared = ["-pps"] if workload["shared"] else []
        context = running * (prompt + output) + 256
        output = self._tool(
            "llama-batched-bench",
            [
                *("-npp", str(prompt), "-ntg", str(output), "-npl", str(running), *shared),
                *("-c", str(context), "--output-format", "jsonl", "-kvu"),
            ],
            _BATCHED_OPTIONS,
        )
        rows = re.findall(r'\{"n_kv_max".*?\}', output)
        if not rows:
            raise Unsupported(f"llama-batched-bench reported nothing of a run: {output[-300:]!r}")
        wall_s = float(json.loads(rows[-1])["t"]) * count / running
        total = workload["prompt_tokens"] + workload["output_tokens"]
        return {"rates": {"wall_s": wall_s, "total_tokens_per_s": total / wall_s}}

    def _tool(self, name: str, words: list[str], known: tuple[str, ...]) -> str:
        options = {key: value for key, value in self._settings.items() if key in known}
        command = [
            *(str(llama_tool(name)), "-m", self._model, "-t", str(self._threads)),
            *(*_options(options), *words),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unsupported(f"{name} ended with {done.returncode}: {done.stderr[-500:]}")
        return done.stdout


_BENCH_OPTIONS = ("-b", "-ub", "-fa", "-ctk", "-ctv")
_BATCHED_OPTIONS = ("-b", "-ub", "-fa", "-ctk", "-ctv")


def _options(settings: dict[str, Any]) -> list[str]:
    """Return options of the command line; true stands for one without a value."""
    words: list[str] = []
    for name, value in settings.items():
        if name.startswith("-"):
            words += [name] if value is True else [name, str(value)]
    return words


def _version() -> str:
    """Return the version llama.cpp was built as."""
    done = subprocess.run(
        [str(llama_tool("llama-server")), "--version"], capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip().splitlines()[0]


if __name__ == "__main__":
    serve(LlamaServer())
